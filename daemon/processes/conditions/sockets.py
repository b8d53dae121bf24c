"""Finds the two ends of a socket in the tables of a process's network namespace: /proc/PID/net/tcp and similar files
(proc(5)).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = ("SocketEnds", "SocketTables", "ends_of", "rows_by_inode")

MAX_TABLE = 1 << 20
_INODE = re.compile(r"socket:\[(\d{1,20})\]")
_TCP = ("tcp", "tcp6")
_LISTEN = b"0A"
# The flag __SO_ACCEPTCON of net/unix: include/uapi/linux/net.h.
_UNIX_LISTENS = b"00010000"


SocketRows = Mapping[bytes, Sequence[bytes]]
"""The rows of a socket table, each split into fields, by inode."""


class SocketEnds(NamedTuple):
    """The ends of a socket. ``text`` is, for example, ``tcp 10.0.0.1:29500 -> 10.0.0.2:41000``. ``listens``: the socket
    waits for connections.
    """

    text: str
    listens: bool = False


class SocketTables:
    """The sockets of a process's network namespace. The first MiB of each table is read and split once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tables: dict[str, SocketRows] = {}

    def described(self, link: str) -> SocketEnds:
        """Returns the ends of the socket ``link`` (socket:[INODE]): the addresses of a TCP socket, or the path of a
        Unix socket.

        If the socket is in no table, the text is ``link``.
        """
        match = _INODE.fullmatch(link)
        if match is None:
            return SocketEnds(link)
        for name in (*_TCP, "unix"):
            row = self._rows(name).get(match[1].encode())
            if row is not None:
                ends = ends_of(row, tcp=name in _TCP)
                return SocketEnds(f"{link} {ends.text}".rstrip(), ends.listens)
        return SocketEnds(link)

    def _rows(self, name: str) -> SocketRows:
        if name not in self._tables:
            try:
                table = self._target.read(f"net/{name}", MAX_TABLE)
            except ProbingError:
                table = b""  # the namespace has no such table
            self._tables[name] = rows_by_inode(table, tcp=name in _TCP)
        return self._tables[name]


def rows_by_inode(table: bytes, *, tcp: bool) -> SocketRows:
    """Returns the rows of net/tcp, net/tcp6 or net/unix by inode."""
    at = 9 if tcp else 6
    rows = (line.split() for line in table.split(b"\n"))
    return {row[at]: row for row in rows if len(row) > at}


def ends_of(row: Sequence[bytes], *, tcp: bool) -> SocketEnds:
    """Returns the ends of the socket in ``row`` of a table."""
    if tcp:
        return _tcp(row[1], row[2], row[3] == _LISTEN)
    path = clean_text(row[7], 128) if len(row) > 7 else ""
    return SocketEnds(f"unix {path}", row[3] == _UNIX_LISTENS)


def _tcp(local: bytes, remote: bytes, listens: bool) -> SocketEnds:
    try:
        here = _address(local)
        return SocketEnds(f"tcp {here}" if listens else f"tcp {here} -> {_address(remote)}", listens)
    except ValueError:
        return SocketEnds("tcp", listens)


def _address(text: bytes) -> str:
    address, _, port = text.partition(b":")
    raw = bytes.fromhex(address.decode())
    # Each 32-bit word is written in the machine's byte order: little-endian on all machines that run here.
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    found = ipaddress.ip_address(words)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    shown = f"[{found}]" if isinstance(found, ipaddress.IPv6Address) and not mapped else str(mapped or found)
    return f"{shown}:{int(port, 16)}"
