"""The two ends of a socket, from the tables of a process's network namespace: /proc/PID/net/tcp and kin (proc(5))."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = ("SocketEnds", "SocketTables", "parse_ends")

MAX_TABLE = 1 << 20
_INODE = re.compile(r"socket:\[(\d{1,20})\]")
_TCP = ("tcp", "tcp6")
_LISTEN = b"0A"
# __SO_ACCEPTCON of net/unix: include/uapi/linux/net.h.
_UNIX_LISTENS = b"00010000"


class SocketEnds(NamedTuple):
    """``text``: as ``tcp 10.0.0.1:29500 -> 10.0.0.2:41000``. ``listens``: it waits for connections."""

    text: str
    listens: bool = False


class SocketTables:
    """The sockets of a process's network namespace. Each table is read once, and of each the first MiB."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tables: dict[str, bytes] = {}

    def described(self, link: str) -> SocketEnds:
        """Returns ``link``, as socket:[INODE], with the addresses of a TCP socket or the path of a Unix socket.

        A socket that is not found stays without them.
        """
        match = _INODE.fullmatch(link)
        if match is None:
            return SocketEnds(link)
        for name in (*_TCP, "unix"):
            ends = parse_ends(self._table(name), match[1].encode(), tcp=name in _TCP)
            if ends is not None:
                return SocketEnds(f"{link} {ends.text}".rstrip(), ends.listens)
        return SocketEnds(link)

    def _table(self, name: str) -> bytes:
        if name not in self._tables:
            try:
                self._tables[name] = self._target.read(f"net/{name}", MAX_TABLE)
            except ProbingError:
                self._tables[name] = b""  # the namespace has no such table
        return self._tables[name]


def parse_ends(table: bytes, inode: bytes, *, tcp: bool) -> SocketEnds | None:
    """Returns the ends of the socket ``inode``; None: it is not in the table."""
    for line in table.split(b"\n"):
        fields = line.split() if inode in line else []
        if tcp and len(fields) > 9 and fields[9] == inode:
            return _tcp(fields[1], fields[2], fields[3] == _LISTEN)
        if not tcp and len(fields) > 6 and fields[6] == inode:
            path = clean_text(fields[7], 128) if len(fields) > 7 else ""
            return SocketEnds(f"unix {path}", fields[3] == _UNIX_LISTENS)
    return None


def _tcp(local: bytes, remote: bytes, listens: bool) -> SocketEnds:
    try:
        here = _address(local)
        return SocketEnds(f"tcp {here}" if listens else f"tcp {here} -> {_address(remote)}", listens)
    except ValueError:
        return SocketEnds("tcp", listens)


def _address(text: bytes) -> str:
    address, _, port = text.partition(b":")
    raw = bytes.fromhex(address.decode())
    # Each 32-bit word is written in the byte order of the machine: little-endian on those that run here.
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    found = ipaddress.ip_address(words)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    shown = f"[{found}]" if isinstance(found, ipaddress.IPv6Address) and not mapped else str(mapped or found)
    return f"{shown}:{int(port, 16)}"
