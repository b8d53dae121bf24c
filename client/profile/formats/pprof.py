"""pprof's profile.proto, gzipped (google/pprof, proto/profile.proto; the field numbers below are from there).

It is written by hand: only varints and length-delimited fields occur in it.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable

from probing.client.profile.model import Frame, Profile, Sample, merged

__all__ = ("pprof",)

# Profile
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRING, _TIME, _DURATION, _COMMENT = 1, 2, 4, 5, 6, 9, 10, 13
_DEFAULT_TYPE = 14
# Sample: locations innermost first, values in the order of the sample types.
_LOCATIONS, _VALUES, _LABEL = 1, 2, 3
# Label
_KEY, _TEXT = 1, 2
# ValueType
_TYPE, _UNIT = 1, 2
# Location, Line and Function
_ID, _LINES, _LINE_FUNCTION, _LINE_NUMBER, _NAME, _SYSTEM_NAME, _FILE = 1, 4, 1, 2, 2, 3, 4


def pprof(profile: Profile, comment: str) -> bytes:
    """Values: samples (count), and cpu, wall or off_cpu (nanoseconds). Labels: job, rank, node, pid, thread, state.

    All labels are texts: pprof takes a number 0, such as of rank 0, for no label.
    """
    return gzip.compress(_Encoder().encode(profile, comment), mtime=0)


class _Encoder:
    def __init__(self) -> None:
        # The string table begins with the empty string.
        self._strings: dict[str, int] = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._locations: dict[Frame, int] = {}

    def encode(self, profile: Profile, comment: str) -> bytes:
        kinds = [self._value_type("samples", "count"), self._value_type(profile.kind, "nanoseconds")]
        samples = [self._sample(sample) for sample in merged(profile.samples, labels=True)]
        locations = [self._location(frame, number) for frame, number in self._locations.items()]
        functions = [self._function(*key, number) for key, number in self._functions.items()]
        tail = [
            _integer(_TIME, profile.begin_ns), _integer(_DURATION, profile.length_ns),
            _integer(_COMMENT, self._string(comment)), _integer(_DEFAULT_TYPE, self._string(profile.kind)),
        ]  # fmt: skip
        # All strings are known only now.
        texts = [text.encode("utf-8", "backslashreplace") for text in self._strings]
        parts = [(_SAMPLE_TYPE, kinds), (_SAMPLE, samples), (_LOCATION, locations), (_FUNCTION, functions)]
        body = [_block(field, part) for field, found in [*parts, (_STRING, texts)] for part in found]
        return b"".join([*body, *tail])

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _value_type(self, kind: str, unit: str) -> bytes:
        return _integer(_TYPE, self._string(kind)) + _integer(_UNIT, self._string(unit))

    def _sample(self, sample: Sample) -> bytes:
        numbers = [self._locations.setdefault(f, len(self._locations) + 1) for f in reversed(sample.frames)]
        labels = [_block(_LABEL, self._label(key, value)) for key, value in sample.labels]
        return _packed(_LOCATIONS, numbers) + _packed(_VALUES, [sample.seen, sample.ns]) + b"".join(labels)

    def _label(self, key: str, value: str) -> bytes:
        return _integer(_KEY, self._string(key)) + _integer(_TEXT, self._string(value))

    def _location(self, frame: Frame, number: int) -> bytes:
        function = self._functions.setdefault((frame.func or "?", frame.file), len(self._functions) + 1)
        line = _integer(_LINE_FUNCTION, function) + _integer(_LINE_NUMBER, frame.lineno or 0)
        return _integer(_ID, number) + _block(_LINES, line)

    def _function(self, name: str, file: str, number: int) -> bytes:
        names = _integer(_NAME, self._string(name)) + _integer(_SYSTEM_NAME, self._string(name))
        return _integer(_ID, number) + names + _integer(_FILE, self._string(file))


def _varint(value: int) -> bytes:
    # Negative numbers are 64-bit two's complement.
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    """A varint field; 0 is what a missing one means."""
    return _varint(field << 3) + _varint(value) if value else b""


def _block(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _block(field, b"".join(map(_varint, values)))
