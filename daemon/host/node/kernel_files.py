"""Parses files of the kernel about the whole node: bytes in, plain numbers out; what a kernel lacks is left out.

Formats: Documentation/filesystems/proc.rst (meminfo), accounting/psi.rst, admin-guide/iostats.rst.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from probing.daemon.processes.procfs import clean_text

__all__ = (
    "DISK_FIELDS",
    "Pressure",
    "parse_diskstats",
    "parse_io_counters",
    "parse_kilobytes",
    "parse_named",
    "parse_pressure",
)

Pressure = dict[str, list[float]]
"""By ``some`` and ``full``: the averages over 10, 60 and 300 s in %, and the total in us."""
DISK_FIELDS = (
    "reads",
    "reads_merged",
    "read_sectors",
    "read_ms",
    "writes",
    "writes_merged",
    "write_sectors",
    "write_ms",
    "in_flight",
    "busy_ms",
    "queue_ms",
    "discards",
    "discards_merged",
    "discard_sectors",
    "discard_ms",
    "flushes",
    "flush_ms",
)
"""Fields of a line of diskstats behind the name; the last six are there since Linux 4.18 and 5.5."""
_LEAST_DISK_FIELDS = 11
MAX_LINES = 4_096
_MOST = (1 << 63) - 1
_PRESSURE = re.compile(
    rb"^(some|full) avg10=(\d{1,3}\.\d\d) avg60=(\d{1,3}\.\d\d) avg300=(\d{1,3}\.\d\d) total=(\d{1,20})$", re.MULTILINE
)
_KILOBYTES = re.compile(rb"^([A-Za-z_()0-9]{1,32}):[ \t]*(\d{1,15}) kB$", re.MULTILINE)
_NAMED = re.compile(rb"^([a-z_0-9]{1,48})[ :][ \t]*(\d{1,20})$", re.MULTILINE)


def parse_kilobytes(data: bytes, names: Collection[str]) -> dict[str, int]:
    """Returns the values of meminfo with these names, bytes."""
    found = ((name.decode(), int(number) << 10) for name, number in _KILOBYTES.findall(data[: 64 << 10]))
    return {name: value for name, value in found if name in names}


def parse_named(data: bytes, names: Collection[str]) -> dict[str, int]:
    """Returns the numbers with these names of a file with a name and a number a line: vmstat, memory.stat."""
    found = ((name.decode(), min(int(number), _MOST)) for name, number in _NAMED.findall(data[: 64 << 10]))
    return {name: value for name, value in found if name in names}


def parse_io_counters(data: bytes) -> dict[str, int]:
    """Returns all counters of /proc/PID/io."""
    return {name.decode(): min(int(number), _MOST) for name, number in _NAMED.findall(data[:4_096])}


def parse_pressure(data: bytes) -> Pressure:
    """Returns the lines of a file of pressure stall information; none where the kernel does not measure it."""
    return {
        kind.decode(): [float(ten), float(sixty), float(most), float(min(int(total), _MOST))]
        for kind, ten, sixty, most, total in _PRESSURE.findall(data[:4_096])
    }


def parse_diskstats(data: bytes) -> dict[str, dict[str, int]]:
    """Returns the counters of each block device by its name; a line of another shape is left out."""
    found = {}
    for line in data.split(b"\n")[:MAX_LINES]:
        fields = line.split()
        numbers = fields[3 : 3 + len(DISK_FIELDS)]
        if len(numbers) < _LEAST_DISK_FIELDS or not all(word.isdigit() and len(word) <= 19 for word in numbers):
            continue
        values = (min(int(word), _MOST) for word in numbers)
        found[clean_text(fields[2], 64)] = dict(zip(DISK_FIELDS, values, strict=False))
    return found
