"""Reads the TCP sockets of network namespaces that sock_diag cannot reach, from /proc/PID/net/tcp and tcp6 of a process
in each namespace.

Formats: Documentation/networking/proc_net_tcp.rst; get_tcp4_sock of net/ipv4/tcp_ipv4.c, which writes an address as
32-bit words in the machine's byte order. The files have no figures of connections, but the inodes by which the owners
of sockets are found.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.net.tcp.sock_diag import LISTEN, SOCKET
from probing.daemon.processes.namespaces import ListedSocket
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import ProcessKey

__all__ = ("ProcSockets", "as_sockets")

TIMEOUT_S = 1.0
_STATES = frozenset((1, 2, 4, 8, 9, LISTEN, 11))
_ORDER = "<" if sys.byteorder == "little" else ">"


class ProcSockets:
    """Reads sockets through a reader. Not thread-safe."""

    def __init__(self, readers: ReaderPool) -> None:
        self._readers = readers

    def read(self, namespaces: Mapping[int, ProcessKey]) -> dict[int, npt.NDArray[Any]]:
        """Returns the sockets of each namespace, as SOCKET. ``namespaces`` has a process in each namespace.

        Raises ProbingError if the reader does not answer.
        """
        if not namespaces:
            return {}
        targets = [list(key) for key in namespaces.values()]
        answer = self._readers.call("tcp_sockets", timeout=TIMEOUT_S, targets=targets)
        parts = zip(namespaces, payload_of(list[list[ListedSocket] | None], answer), strict=True)
        return {netns: as_sockets(part) for netns, part in parts if part is not None}


def as_sockets(listed: Sequence[ListedSocket]) -> npt.NDArray[Any]:
    """Returns ``listed`` in the form of sock_diag's sockets, without figures."""
    kept = [one for one in listed if one[1] in _STATES]
    found = np.zeros(len(kept), SOCKET)
    for row, (family, state, local, local_port, peer, peer_port, inode, _) in zip(found, kept, strict=True):
        row["family"], row["state"], row["inode"], row["cookie"] = family, state, inode, inode
        row["local_port"], row["peer_port"] = local_port, peer_port
        row["local"], row["peer"] = _address(family, local), _address(family, peer)
    return found


def _address(family: int, text: str) -> np.void:
    words = [int(text[at : at + 8], 16) for at in range(0, 8 if family == socket.AF_INET else 32, 8)]
    # The kernel prints each 32-bit word of the address as a native-endian integer; packing it in native order restores
    # the bytes.
    return np.void(struct.pack(f"{_ORDER}{len(words)}I", *words).ljust(16, b"\0"))
