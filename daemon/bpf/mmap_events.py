"""Reports new executable mappings of all processes, from MMAP2 records of perf, as soon as a library is mapped.

Each CPU has an event (PERF_COUNT_SW_DUMMY, which counts nothing) with a buffer. This needs only CAP_PERFMON. Layout:
include/uapi/linux/perf_event.h. Records differ in size, so they are walked one by one; they are few.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from probing.daemon.bpf.attach import refused
from probing.daemon.bpf.perf_events import ATTR_SIZE, online_cpus, perf_event_open

__all__ = ("Mapping", "MmapWatch")

_TYPE_SOFTWARE, _COUNT_DUMMY = 1, 9
# Bits of the flags in perf_event_attr, the field after read_format.
_MMAP, _WATERMARK, _EXCLUDE_KERNEL, _MMAP2, _BUILD_ID = 1 << 8, 1 << 14, 1 << 5, 1 << 23, 1 << 34
_FORMAT_LOST = 1 << 4
_FLAGS = _MMAP | _WATERMARK | _EXCLUDE_KERNEL | _MMAP2
_RECORD_LOST, _RECORD_MMAP2 = 2, 10
_MISC_BUILD_ID = 1 << 14
_DATA_HEAD = 1024
_DATA_PAGES = 32
_HEADER = struct.Struct("<IHH")
_MMAP2_BODY = struct.Struct("<IIQQQ")
_PROT_EXEC = 4


class Mapping(NamedTuple):
    """Process ``pid`` mapped ``length`` bytes at ``start``, from ``offset`` of the file.

    ``build_id`` identifies the file; a file without build id is identified by ``device`` (major, minor) and ``inode``.
    ``path`` is as the process sees it.
    """

    pid: int
    start: int
    length: int
    offset: int
    path: bytes
    build_id: bytes | None
    device: tuple[int, int] | None
    inode: int | None


@dataclass(slots=True)
class _Buffer:
    """The buffer of one CPU. ``ends``: the offsets where the kernel writes next and where we read next, as an array, so
    that each is read and written in one access.
    """

    cpu: int
    fd: int
    ends: np.ndarray[Any, Any]
    data: memoryview
    says_lost: bool
    lost: int = 0
    size: int = field(default=_DATA_PAGES * mmap.PAGESIZE)


class MmapWatch:
    """Reports executable mappings whose path ``interesting`` accepts. ``interesting`` is called for every mapping, with
    hostile bytes.
    """

    def __init__(self, interesting: Callable[[bytes], bool]) -> None:
        """Opens an event for each CPU. Raises PrivilegeError, AttachError."""
        self._interesting = interesting
        self._buffers: list[_Buffer] = []
        # Records that were dropped on CPUs that are offline now.
        self._lost_before = 0
        try:
            for cpu in online_cpus():
                self._open(cpu)
        except OSError as e:
            self.close()
            raise refused(e, "new mappings cannot be watched") from e

    def __enter__(self) -> MmapWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for buffer in self._buffers:
            os.close(buffer.fd)
        self._buffers.clear()

    @property
    def lost(self) -> int:
        """Returns the number of records that the kernel dropped from the start until the last ``read``. /proc/PID/maps
        has their mappings.

        Linux before 6.0 counts dropped records only when the next record arrives.
        """
        return self._lost_before + sum(buffer.lost for buffer in self._buffers)

    def filenos(self) -> list[int]:
        """Returns descriptors for epoll, one for each CPU, readable when there are records."""
        return [buffer.fd for buffer in self._buffers]

    def refresh(self) -> bool:
        """Opens events for CPUs that came online, and closes the events of CPUs that went offline. Returns whether
        there are new CPUs: what processes mapped there until now was not seen. Raises PrivilegeError, AttachError.
        """
        online = set(online_cpus())
        for buffer in [buffer for buffer in self._buffers if buffer.cpu not in online]:
            self._buffers.remove(buffer)
            self._lost_before += buffer.lost
            os.close(buffer.fd)
        fresh = sorted(online - {buffer.cpu for buffer in self._buffers})
        try:
            for cpu in fresh:
                self._open(cpu)
        except OSError as e:
            raise refused(e, f"new mappings on CPU {cpu} cannot be watched") from e
        return bool(fresh)

    def read(self) -> list[Mapping]:
        """Returns the mappings since the last call. Only mappings of the same CPU are in order of time."""
        mappings: list[Mapping] = []
        for buffer in self._buffers:
            records = self._records(buffer)
            if records and buffer.says_lost:
                buffer.lost = struct.unpack("<QQ", os.read(buffer.fd, 16))[1]
            for kind, misc, body in records:
                if kind == _RECORD_LOST and not buffer.says_lost and len(body) >= 16:
                    buffer.lost += struct.unpack_from("<QQ", body)[1]
                elif kind == _RECORD_MMAP2 and (mapping := self._mapping(misc, body)):
                    mappings.append(mapping)
        return mappings

    def _open(self, cpu: int) -> None:
        # Kernels before 5.12 report no build ids, kernels before 6.0 no count of dropped records.
        for build_id, read_format in ((_BUILD_ID, _FORMAT_LOST), (_BUILD_ID, 0), (0, 0)):
            try:
                fd = _open_event(cpu, _FLAGS | build_id, read_format)
                break
            except OSError as e:
                if e.errno == errno.ENODEV:
                    # The CPU went offline meanwhile.
                    return
                if e.errno != errno.EINVAL or not build_id:
                    raise
        try:
            length = (1 + _DATA_PAGES) * mmap.PAGESIZE
            memory = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(fd)
            raise
        ends = np.frombuffer(memory, "<u8", 2, _DATA_HEAD)
        self._buffers.append(_Buffer(cpu, fd, ends, memoryview(memory)[mmap.PAGESIZE :], bool(read_format)))

    def _records(self, buffer: _Buffer) -> list[tuple[int, int, bytes]]:
        head, tail = (int(end) for end in buffer.ends)
        waiting = min(head - tail, buffer.size)
        at = tail % buffer.size
        data = bytes(buffer.data[at : at + waiting])
        data += bytes(buffer.data[: waiting - len(data)])
        buffer.ends[1] = head
        records, at = [], 0
        while at + _HEADER.size <= len(data):
            kind, misc, size = _HEADER.unpack_from(data, at)
            if size < _HEADER.size:
                break
            records.append((kind, misc, data[at + _HEADER.size : at + size]))
            at += size
        return records

    def _mapping(self, misc: int, body: bytes) -> Mapping | None:
        if len(body) < 64:
            return None
        pid, _, start, length, offset = _MMAP2_BODY.unpack_from(body)
        path = body[64:].split(b"\0", 1)[0]
        protection = struct.unpack_from("<I", body, 56)[0]
        if not protection & _PROT_EXEC or not self._interesting(path):
            return None
        if misc & _MISC_BUILD_ID:
            size = min(body[32], 20)
            return Mapping(pid, start, length, offset, path, body[36 : 36 + size], None, None)
        major, minor, inode = struct.unpack_from("<IIQ", body, 32)
        return Mapping(pid, start, length, offset, path, None, (major, minor), inode)


def _open_event(cpu: int, flags: int, read_format: int) -> int:
    fields = (_TYPE_SOFTWARE, ATTR_SIZE, _COUNT_DUMMY, 0, 0, read_format, flags, 1, 0)
    return perf_event_open(struct.pack("<IIQQQQQII", *fields), cpu)
