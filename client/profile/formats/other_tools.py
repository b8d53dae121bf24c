"""Writes profiles in the formats of other tools: folded stacks (FlameGraph), speedscope, and pprof's profile.proto."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from probing.api.text import encoded, escape
from probing.client.profile.model import Frame, Profile, Sample, label, merged, short_files

__all__ = (
    "folded",
    "folded_difference",
    "pprof",
    "speedscope",
)


def folded(profile: Profile) -> str:
    """Returns folded stacks; weights are ns. A semicolon in a name becomes a colon."""
    weights = _weights(profile, short_files([profile]))
    return "".join(f"{stack} {ns}\n" for stack, ns in weights.items())


def folded_difference(base: Profile, chosen: Profile) -> str:
    """Returns folded stacks with two weights each: ns in ``base``, then ns in ``chosen``."""
    short = short_files([base, chosen])
    before, after = _weights(base, short), _weights(chosen, short)
    stacks = dict.fromkeys([*before, *after])
    return "".join(f"{stack} {before.get(stack, 0)} {after.get(stack, 0)}\n" for stack in stacks)


def _weights(profile: Profile, short: dict[str, str]) -> dict[str, int]:
    frames = {frame for sample in profile.samples for frame in sample.frames}
    names = {frame: _name(frame, short) for frame in frames}
    weights: dict[str, int] = {}
    for sample in merged(profile.samples):
        line = ";".join([names[frame] for frame in sample.frames])
        weights[line] = weights.get(line, 0) + sample.ns
    return weights


def _name(frame: Frame, short: dict[str, str]) -> str:
    return escape(label(frame, short)).replace(";", ":")


_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(profiles: Sequence[Profile], title: str, exporter: str) -> str:
    """Returns one speedscope document with ``profiles``, which speedscope lists in a menu. Weights are ns."""
    numbers: dict[Frame, int] = {}
    shown = [_sampled(profile, numbers) for profile in profiles]
    document = {
        "$schema": _SCHEMA,
        "shared": {"frames": [_frame(frame) for frame in numbers]},
        "profiles": shown,
        "name": title,
        "activeProfileIndex": 0,
        "exporter": exporter,
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _sampled(profile: Profile, numbers: dict[Frame, int]) -> dict[str, object]:
    samples = merged(profile.samples)
    return {
        "type": "sampled",
        "name": profile.title,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(sample.ns for sample in samples),
        "samples": [[numbers.setdefault(frame, len(numbers)) for frame in sample.frames] for sample in samples],
        "weights": [sample.ns for sample in samples],
    }


def _frame(frame: Frame) -> dict[str, object]:
    found: dict[str, object] = {"name": frame.func or "?"}
    if frame.file:
        found["file"] = frame.file
    if frame.lineno is not None:
        found["line"] = frame.lineno
    return found


_PACKAGE = "perftools.profiles"
# The fields of each message that are written: name, number, type; a star marks a repeated field.
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
    """Returns a pprof profile. Each sample has labels and two values: a count named ``samples``, and a time in ns named
    ``cpu``, ``wall`` or ``off_cpu``.

    All labels are texts, because pprof treats the number 0, such as rank 0, as a missing label.
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
        # The table of strings is written last, because all other fields add strings to it.
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
    # A pool of our own, because another library may have registered the same messages in the default pool.
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Profile"))
