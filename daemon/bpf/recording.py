"""Records drained rings to a file, and replays them without BPF: for tests, fuzzing and bug reports.

A file is a series of blocks. A block begins with the length and the CRC32 (zlib's) of its content: the length of a JSON
header, the header (ring, clock pair, record type), and the bytes of the records. A killed recorder leaves half a block
at the end, which is ignored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from probing.api.errors import FormatError
from probing.daemon.bpf.btf import dtype_from_json, dtype_to_json
from probing.daemon.clock import ClockPair

__all__ = ("Recorded", "Recorder", "replay")

_MAGIC = b"probing ring 1\n\0"
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<I")
_MAX_BLOCK = 1 << 30
_log = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """The records of one drain of ``ring``, and the time of the drain."""

    ring: str
    clock: ClockPair
    records: np.ndarray[Any, Any]


class Recorder:
    """Writes recordings to a new file, which stays readable if the process is killed.

    A file that cannot be written, as on a full disk, ends there: whoever drains the rings goes on without it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115
        self._file.write(_MAGIC)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # Closing writes what is left, which fails where a write has failed.
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, ring: str, clock: ClockPair, records: np.ndarray[Any, Any]) -> None:
        times = [clock.mono_ns, clock.boot_ns, clock.real_ns]
        header = {"ring": ring, "clock": times, "record": dtype_to_json(records.dtype)}
        text = json.dumps(header, separators=(",", ":")).encode()
        block = _HEADER.pack(len(text)) + text + records.tobytes()
        if len(block) > _MAX_BLOCK:
            raise FormatError(f"a drain of {len(block)} bytes is too large for a recording")
        if self._file.closed:
            return
        try:
            self._file.write(_FRAME.pack(len(block), zlib.crc32(block)) + block)
            self._file.flush()
        except OSError as e:
            _log.warning("the recording %s ends here: %s", self._file.name, e.strerror)
            self.close()


def replay(path: Path) -> Iterator[Recorded]:
    """Yields the drains in order. Raises FormatError for a damaged file."""
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise FormatError(f"{path.name} is not a recording of a ring")
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, crc = _FRAME.unpack(frame)
            if length > _MAX_BLOCK:
                raise FormatError(f"{path.name} is damaged: a block claims to have {length} bytes")
            block = file.read(length)
            if len(block) < length:
                return
            if zlib.crc32(block) != crc:
                raise FormatError(f"{path.name} is damaged: a block has a wrong checksum")
            yield _decode(block, path.name)


def _decode(block: bytes, name: str) -> Recorded:
    try:
        (length,) = _HEADER.unpack_from(block)
        header = json.loads(block[_HEADER.size : _HEADER.size + length])
        clock = ClockPair(*(int(value) for value in header["clock"]))
        records = np.frombuffer(block, dtype_from_json(header["record"]), offset=_HEADER.size + length)
        return Recorded(str(header["ring"]), clock, records)
    except (struct.error, ValueError, KeyError, TypeError) as e:
        raise FormatError(f"{name} is damaged: a block cannot be decoded") from e
