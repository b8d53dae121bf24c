"""Parses files of /proc/PID into plain values.

A process controls most of this text: its name, command line, environment, and the paths that it maps. So every parser
is a pure function with limits, and raises only CorruptTarget. Formats: proc(5).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from probing.api.errors import CorruptTarget
from probing.api.text import escape

__all__ = (
    "TICK_NS",
    "Mapping",
    "Stat",
    "clean_text",
    "parse_cgroup",
    "parse_cmdline",
    "parse_environ",
    "parse_maps",
    "parse_memory",
    "parse_stat",
    "parse_status",
)

# Times in /proc are in clock ticks, and USER_HZ is 100 on every Linux that runs here (include/asm-generic/param.h).
TICK_NS = 10_000_000
MAX_MAPPINGS = 65_536
MAX_ARGUMENTS = 4_096
MAX_CGROUPS = 64
MAX_TEXT = 4_096
_FIELDS_AFTER_NAME = 20
_MAPPING = re.compile(
    rb"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([r-][w-][x-][ps]) ([0-9a-f]{1,16}) ([0-9a-f]+:[0-9a-f]+) ([0-9]{1,20}) *(.*)",
    re.DOTALL,
)
_OCTAL = re.compile(rb"\\([0-7]{3})")
_MEMORY = re.compile(rb"^(VmHWM|VmRSS|RssAnon|RssShmem|VmSwap):[ \t]*(\d{1,12}) kB$", re.MULTILINE)
_MEMORY_NAMES = {
    b"VmRSS": "rss_bytes",
    b"VmHWM": "peak_rss_bytes",
    b"RssAnon": "anon_bytes",
    b"RssShmem": "shmem_bytes",
    b"VmSwap": "swap_bytes",
}


class Stat(NamedTuple):
    """The values of a stat file. ``state``: the kernel's letter (R, S, D, T, t, Z, X, I). ``start_ns``: ns since boot,
    in multiples of a tick.
    """

    pid: int
    comm: bytes
    state: str
    ppid: int
    flags: int
    threads: int
    start_ns: int

    @property
    def kernel_thread(self) -> bool:
        # PF_KTHREAD, include/linux/sched.h.
        return bool(self.flags & 0x0020_0000)


class Mapping(NamedTuple):
    """A line of maps. ``path`` is empty for anonymous memory; ``device`` is (major, minor).

    ``deleted``: the file was unlinked.
    """

    start: int
    end: int
    permissions: str
    offset: int
    device: tuple[int, int]
    inode: int
    path: bytes
    deleted: bool = False

    @property
    def executable(self) -> bool:
        return "x" in self.permissions


def parse_stat(data: bytes) -> Stat:
    """Parses /proc/PID/stat. The process name may contain blanks and parentheses, and ends at the last parenthesis."""
    head, bracket, rest = data.rpartition(b")")
    pid, opening, comm = head.partition(b" (")
    fields = rest.split()
    if not bracket or not opening or len(fields) < _FIELDS_AFTER_NAME:
        raise CorruptTarget("/proc/PID/stat of a process is cut short")
    try:
        return Stat(
            pid=_number(pid),
            comm=comm[:64],
            state=fields[0].decode("ascii")[:1],
            ppid=_number(fields[1]),
            flags=_number(fields[6]),
            threads=_number(fields[17]),
            start_ns=_number(fields[19]) * TICK_NS,
        )
    except ValueError as e:
        raise CorruptTarget("/proc/PID/stat of a process contains no numbers") from e


def parse_status(data: bytes) -> dict[str, list[int]]:
    """Returns the numbers of Uid (real, effective, saved, fs) and NSpid (outermost first) of /proc/PID/status.

    Raises CorruptTarget when there is no Uid.
    """
    found: dict[str, list[int]] = {}
    for line in data[: 64 * 1024].split(b"\n"):
        name, _, rest = line.partition(b":")
        if name in (b"Uid", b"NSpid"):
            try:
                found[name.decode()] = [_number(word) for word in rest.split()[:32]]
            except ValueError as e:
                raise CorruptTarget(f"/proc/PID/status of a process has no numbers after {name.decode()}") from e
    if not found.get("Uid"):
        raise CorruptTarget("/proc/PID/status of a process has no line Uid")
    return found


def parse_memory(data: bytes) -> dict[str, int | None]:
    """Returns rss_bytes, peak_rss_bytes, anon_bytes, shmem_bytes and swap_bytes of /proc/PID/status.

    A value is None if it is missing or not a number.
    """
    found = {name: int(number) * 1024 for name, number in _MEMORY.findall(data[: 64 * 1024])}
    return {column: found.get(name) for name, column in _MEMORY_NAMES.items()}


def parse_maps(data: bytes, limit: int = MAX_MAPPINGS) -> list[Mapping]:
    """Parses at most ``limit`` lines of /proc/PID/maps. An incomplete last line is ignored. Raises CorruptTarget."""
    mappings: list[Mapping] = []
    for line in data.split(b"\n", limit)[:limit]:
        if not line:
            continue
        match = _MAPPING.fullmatch(line)
        if match is None:
            # A read stops at the end of a buffer, so only the last line can be incomplete.
            if data.endswith(line):
                break
            raise CorruptTarget("a line of /proc/PID/maps of a process is malformed")
        mappings.append(_mapping(match))
    return mappings


def _mapping(match: re.Match[bytes]) -> Mapping:
    start, end, permissions, offset, device, inode, path = match.groups()
    major, _, minor = device.partition(b":")
    deleted = path.endswith(b" (deleted)")
    # Newline is the only character that the kernel writes in octal, as \012 (fs/proc/task_mmu.c, seq_path).
    path = _OCTAL.sub(lambda m: bytes([int(m[1], 8) & 0xFF]) if m[1] == b"012" else m[0], path[:MAX_TEXT])
    return Mapping(
        start=int(start, 16),
        end=int(end, 16),
        permissions=permissions.decode(),
        offset=int(offset, 16),
        device=(int(major[:16], 16), int(minor[:16], 16)),
        inode=int(inode),
        path=path.removesuffix(b" (deleted)") if deleted else path,
        deleted=deleted,
    )


def parse_cgroup(data: bytes) -> list[bytes]:
    """Returns the distinct paths of /proc/PID/cgroup (``hierarchy:controllers:path``), in the file's order."""
    paths: dict[bytes, None] = {}
    for line in data[: 64 * 1024].split(b"\n")[:MAX_CGROUPS]:
        parts = line.split(b":", 2)
        if len(parts) == 3 and parts[2].startswith(b"/"):
            paths[parts[2][:MAX_TEXT]] = None
    return list(paths)


def parse_environ(data: bytes, names: Collection[str], limit: int = 512) -> dict[str, str]:
    """Returns the variables in ``names``, with values cut at ``limit``. If a name is repeated, its first value counts,
    as with getenv.
    """
    wanted = {name.encode() for name in names}
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name in wanted:
            found.setdefault(name.decode(), clean_text(value, limit))
    return found


def parse_cmdline(data: bytes, limit: int = MAX_ARGUMENTS) -> list[bytes]:
    """Returns the arguments of /proc/PID/cmdline. A process that rewrote its title has one argument, the title."""
    parts = data.rstrip(b"\0").split(b"\0", limit)[:limit]
    return parts if parts != [b""] else []


def clean_text(data: bytes | str, limit: int = MAX_TEXT) -> str:
    """Returns a text from a target as one line of at most ``limit`` characters, escaped by ``escape``."""
    return escape(data, limit)


def _number(word: bytes) -> int:
    if len(word) > 20:
        raise ValueError("too many digits")
    return int(word)
