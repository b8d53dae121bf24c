"""Records of the kernel log as /dev/kmsg gives them (Documentation/ABI/testing/dev-kmsg).

A record is ``PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,more];TEXT`` and lines that begin with a blank: its properties. The
kernel writes bytes that cannot be printed as ``\\xNN``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from probing.daemon.processes.procfs import clean_text

__all__ = ("Chunk", "KernelLog", "Record", "parse_records")

# CONSOLE_EXT_LOG_MAX and PRINTK_MESSAGE_MAX, kernel/printk/printk.c and internal.h: a shorter buffer gets EINVAL.
_BYTES = 8_192
MAX_TEXT = 2_048
_HEAD = re.compile(rb"(\d{1,4}),(\d{1,20}),(\d{1,18}),[^;\n]{0,256};")
_FACILITIES = (
    "kern",
    "user",
    "mail",
    "daemon",
    "auth",
    "syslog",
    "lpr",
    "news",
    "uucp",
    "cron",
    "authpriv",
    "ftp",
)
_LEVELS = ("emerg", "alert", "crit", "err", "warn", "notice", "info", "debug")


class Record(NamedTuple):
    """``boot_us``: on the kernel's clock of the log, us since boot. ``facility`` is kern for the kernel alone: it gives
    what programs write another one."""

    seq: int
    boot_us: int
    facility: str
    level: str
    text: str


class Chunk(NamedTuple):
    """``lost``: records that were overwritten before they were read. ``more``: others wait already."""

    records: tuple[Record, ...]
    lost: int
    more: bool


class KernelLog:
    """The kernel log from its oldest record on. Raises OSError where it may not be read.

    ``path`` may also be a pipe or a file with the same lines.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._next: int | None = None
        self._tail = b""

    def close(self) -> None:
        os.close(self._fd)

    def read(self, most: int) -> Chunk:
        """Returns the next records, after at most ``most`` reads; never waits. Raises OSError."""
        found: list[Record] = []
        lost = 0
        for _ in range(most):
            try:
                data = os.read(self._fd, _BYTES)
            except BlockingIOError:
                return Chunk(tuple(found), lost, more=False)
            except OSError as e:
                # EPIPE: records were overwritten, and the position is at the oldest now; the numbers show how many.
                if e.errno in (errno.EPIPE, errno.EINVAL):
                    continue
                raise
            if not data:
                return Chunk(tuple(found), lost, more=False)
            # A pipe may end in the middle of a line.
            whole, _, self._tail = (self._tail + data).rpartition(b"\n")
            self._tail = self._tail[:_BYTES]
            for record in parse_records(whole):
                lost += self._gap(record.seq)
                found.append(record)
        return Chunk(tuple(found), lost, more=True)

    def _gap(self, seq: int) -> int:
        missing = seq - self._next if self._next is not None else 0
        self._next = seq + 1
        return max(0, missing)


def parse_records(data: bytes) -> Iterator[Record]:
    """Yields the records in ``data``; lines that are none, and the properties of records, are left out."""
    for line in data.split(b"\n"):
        match = _HEAD.match(line)
        if match is None:
            continue
        priority = int(match[1])
        facility = priority >> 3
        yield Record(
            int(match[2]),
            int(match[3]),
            _FACILITIES[facility] if facility < len(_FACILITIES) else f"local{facility - 16}",
            _LEVELS[priority & 7],
            clean_text(line[match.end() :], MAX_TEXT),
        )
