"""pprof's profile.proto, gzipped (google/pprof, proto/profile.proto)."""

from __future__ import annotations

import gzip
from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from probing.api.text import encoded
from probing.client.profile.model import Frame, Profile, Sample, merged

__all__ = ("pprof",)

_PACKAGE = "perftools.profiles"
# Fields of each message that are written: name, number, type; a star marks a repeated field.
_MESSAGES = {
    "ValueType": "type 1 int64, unit 2 int64",
    "Label": "key 1 int64, str 2 int64",
    "Sample": "location_id 1 uint64*, value 2 int64*, label 3 Label*",
    "Line": "function_id 1 uint64, line 2 int64",
    "Location": "id 1 uint64, line 4 Line*",
    "Function": "id 1 uint64, name 2 int64, system_name 3 int64, filename 4 int64",
    "Profile": (
        "sample_type 1 ValueType*, sample 2 Sample*, location 4 Location*, function 5 Function*, "
        "string_table 6 string*, time_nanos 9 int64, duration_nanos 10 int64, comment 13 int64*, "
        "default_sample_type 14 int64"
    ),
}


def pprof(profile: Profile, comment: str) -> bytes:
    """Returns a profile with two values, samples (count) and cpu, wall or off_cpu (ns), and the labels of samples.

    All labels are texts: pprof takes a number 0, such as of rank 0, for no label.
    """
    return gzip.compress(_Encoder(profile).encode(comment), mtime=0)


class _Encoder:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._message = _profile_class()()
        # The string table begins with the empty string.
        self._strings: dict[str, int] = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._locations: dict[Frame, int] = {}

    def encode(self, comment: str) -> bytes:
        message, kind = self._message, self._profile.kind
        for name, unit in (("samples", "count"), (kind, "nanoseconds")):
            message.sample_type.add(type=self._string(name), unit=self._string(unit))
        for sample in merged(self._profile.samples, labels=True):
            self._add_sample(sample)
        for frame, number in self._locations.items():
            self._add_location(frame, number)
        for (name, file), number in self._functions.items():
            text = self._string(name)
            message.function.add(id=number, name=text, system_name=text, filename=self._string(file))
        message.time_nanos, message.duration_nanos = self._profile.begin_ns, self._profile.length_ns
        message.comment.append(self._string(comment))
        message.default_sample_type = self._string(kind)
        # The table of strings is complete only now.
        message.string_table.extend(encoded(text).decode() for text in self._strings)
        return bytes(message.SerializeToString(deterministic=True))

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _add_sample(self, sample: Sample) -> None:
        # Innermost first.
        numbers = [self._locations.setdefault(f, len(self._locations) + 1) for f in reversed(sample.frames)]
        added = self._message.sample.add(location_id=numbers, value=[sample.seen, sample.ns])
        for key, value in sample.labels:
            added.label.add(key=self._string(key), str=self._string(value))

    def _add_location(self, frame: Frame, number: int) -> None:
        function = self._functions.setdefault((frame.func or "?", frame.file), len(self._functions) + 1)
        self._message.location.add(id=number).line.add(function_id=function, line=frame.lineno or 0)


@cache
def _profile_class() -> type[Any]:
    file = FileDescriptorProto(name="profile.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            title, number, kind = field.split()
            scalar, repeated = kind.rstrip("*"), kind.endswith("*")
            added = message.field.add(name=title, number=int(number))
            added.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            if scalar in _MESSAGES:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{scalar}"
            else:
                added.type = FieldDescriptorProto.Type.Value(f"TYPE_{scalar.upper()}")
    # A pool of descriptors of our own: another library may have registered the same messages.
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Profile"))
