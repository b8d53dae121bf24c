"""Lists the TCP connections of a network namespace with their figures, by the kernel's sock_diag.

Formats: sock_diag(7); include/uapi/linux/{sock_diag,inet_diag,tcp}.h. sock_diag needs no privileges in the namespace of
the socket. The messages of a list have the same layout, so they are read as rows of one array: this takes 1 us for a
connection, including the kernel.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.api.errors import CorruptTarget, TargetError
from probing.daemon.net.netlink import HEADER, attributes, messages, received

__all__ = ("LISTEN", "NETLINK_SOCK_DIAG", "SOCKET", "SYN_SENT", "address_text", "parse", "read_sockets")

NETLINK_SOCK_DIAG = 4
SYN_SENT = 2
LISTEN = 10
_BY_FAMILY = 20
_INFO = 2
# States that are listed: established, SYN sent, closing with data left to send (4, 8, 9, 11), and listening.
_STATES = sum(1 << state for state in (1, SYN_SENT, 4, 8, 9, LISTEN, 11))
_REQUEST = struct.Struct("=BBBBI48x")
# All sockets in the first MAX_BYTES of a list are kept: 32 MiB are 70,000 connections. Any user can make more.
MAX_BYTES = 32 << 20
# In the rest of the list, at most MAX_RESTS groups of REST_BYTES are searched for watched sockets. Together the limits
# allow 1.2 million connections.
REST_BYTES, MAX_RESTS = 1 << 20, 512

# struct inet_diag_msg; ports and addresses are in network order.
_MESSAGE = np.dtype(
    [
        ("family", "u1"),
        ("state", "u1"),
        ("timer", "u1"),
        ("timeouts", "u1"),
        ("local_port", ">u2"),
        ("peer_port", ">u2"),
        ("local", "V16"),
        ("peer", "V16"),
        ("device", "u4"),
        ("cookie", "u8"),
        ("expires", "u4"),
        ("unread", "u4"),
        ("unacked_bytes", "u4"),
        ("uid", "u4"),
        ("inode", "u4"),
    ]
)
# struct tcp_info of Linux 5.4, without its last members; later kernels have more members after them.
_TCP_INFO = np.dtype(
    [
        ("info_state", "u1"),
        ("ca_state", "u1"),
        ("retransmits", "u1"),
        ("probes", "u1"),
        ("backoff", "u1"),
        ("options", "u1"),
        ("scales", "u1"),
        ("flags", "u1"),
        *(
            (name, "u4")
            for name in (
                "rto",
                "ato",
                "snd_mss",
                "rcv_mss",
                "unacked",
                "sacked",
                "lost",
                "retrans_now",
                "fackets",
                "last_data_sent",
                "last_ack_sent",
                "last_data_recv",
                "last_ack_recv",
                "pmtu",
                "rcv_ssthresh",
                "rtt",
                "rttvar",
                "snd_ssthresh",
                "cwnd",
                "advmss",
                "reordering",
                "rcv_rtt",
                "rcv_space",
                "retrans",
            )
        ),
        *((name, "u8") for name in ("pacing_rate", "max_pacing_rate", "bytes_acked", "bytes_received")),
        *((name, "u4") for name in ("segs_out", "segs_in", "unsent", "min_rtt", "data_segs_in", "data_segs_out")),
        *((name, "u8") for name in ("delivery_rate", "busy", "rwnd_limited", "sndbuf_limited")),
        *((name, "u4") for name in ("delivered", "ecn_marked")),
        *((name, "u8") for name in ("bytes_sent", "bytes_retrans")),
    ]
)
SOCKET = np.dtype([*_MESSAGE.descr, *_TCP_INFO.descr])
_Sockets = npt.NDArray[Any]
_Integers = npt.NDArray[np.int64]
# The offsets of the messages, by message length.
_Begins = dict[int, npt.NDArray[np.intp]]


def read_sockets(sock: socket.socket, watched: Callable[[_Integers], npt.NDArray[np.bool_]]) -> _Sockets:
    """Returns the connections and listening sockets of the namespace of ``sock`` (NETLINK_SOCK_DIAG), as SOCKET.

    IPv4 and IPv6 sockets are listed separately. After some 70,000 sockets of a list, only sockets whose inodes are
    ``watched`` are returned. Times are as in tcp_info: us, but ms for the time since the last data. Raises TargetError,
    also if the namespace has too many sockets, and TargetTimeout. After an error ``sock`` must not be used again.
    """
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _STATES)
        for number, pieces in enumerate(_parts(received(sock, _BY_FAMILY, request))):
            if number > MAX_RESTS:
                raise TargetError("a network namespace has more connections than can be listed")
            sockets = parse(pieces)
            found.append(sockets if number == 0 else sockets[watched(sockets["inode"].astype(np.int64))])
    return np.concatenate([part.view(np.uint8).reshape(-1, SOCKET.itemsize) for part in found]).view(SOCKET)[:, 0]


def _parts(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the pieces of a list in groups: first a group of MAX_BYTES, and then groups of REST_BYTES."""
    part: list[bytes] = []
    size, most = 0, MAX_BYTES
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= most:
            yield part
            part, size, most = [], 0, REST_BYTES
    if part:
        yield part


def parse(pieces: Sequence[bytes]) -> _Sockets:
    """Returns the connections in the pieces of an answer; connections without tcp_info are left out.

    Raises CorruptTarget for messages that are cut short, TargetError if the kernel refused the request.
    """
    data = b"".join(pieces)
    # Nearly always all messages of a list have the same length, except the last message, which only ends the list.
    whole = _uniform(b"".join(pieces[:-1]))
    parts_of = [(0, whole), (len(data) - len(pieces[-1]), _begins(pieces[-1]))] if whole else _by_piece(pieces)
    by_length: dict[int, list[npt.NDArray[np.intp]]] = {}
    for base, found in parts_of:
        for length, begins in found.items():
            by_length.setdefault(length, []).append(begins + base)
    alike = {length: np.concatenate(begins) for length, begins in by_length.items()}
    parts = [part for length, begins in alike.items() for part in _parse_alike(data, begins, length)]
    return np.concatenate(parts).view(SOCKET)[:, 0] if parts else np.zeros(0, SOCKET)


def _by_piece(pieces: Sequence[bytes]) -> list[tuple[int, _Begins]]:
    base, found = 0, []
    for piece in pieces:
        found.append((base, _begins(piece)))
        base += len(piece)
    return found


def _begins(piece: bytes) -> _Begins:
    """Returns the offsets of the connections in a piece, by length of their message."""
    if uniform := _uniform(piece):
        return uniform
    found: dict[int, list[int]] = {}
    for kind, begin, end in messages(piece):
        if kind == _BY_FAMILY:
            found.setdefault(end - begin, []).append(begin)
    return {length: np.array(begins, np.intp) for length, begins in found.items()}


def _uniform(piece: bytes) -> _Begins:
    """Returns the result of ``_begins`` without reading message after message if all messages have the same length,
    else an empty dict."""
    if len(piece) < HEADER.size:
        return {}
    length, kind = HEADER.unpack_from(piece)[:2]
    if kind == _BY_FAMILY and length > HEADER.size and length % 4 == 0 and len(piece) % length == 0:
        heads = np.frombuffer(piece, np.uint32).reshape(-1, length // 4)[:, :2]
        if (heads[:, 0] == length).all() and (heads[:, 1] & 0xFFFF == kind).all():
            return {length - HEADER.size: np.arange(HEADER.size, len(piece), length)}
    return {}


def _parse_alike(data: bytes, begins: npt.NDArray[np.intp], length: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields, as bytes, the connections in messages of equal length, grouped by the offset of their tcp_info. This
    offset is nearly always the same.
    """
    if length < _MESSAGE.itemsize:
        raise CorruptTarget("a message of sock_diag is cut short")
    whole = np.frombuffer(data, np.uint8)
    while len(begins):
        at = _info_at(data, int(begins[0]), length)
        if at is None:
            begins = begins[1:]
            continue
        heads = _slices(whole, begins + at - 4, 4)
        same = (heads == heads[0]).all(axis=1)
        raw = np.empty((int(same.sum()), SOCKET.itemsize), np.uint8)
        raw[:, : _MESSAGE.itemsize] = _slices(whole, begins[same], _MESSAGE.itemsize)
        raw[:, _MESSAGE.itemsize :] = _slices(whole, begins[same] + at, _TCP_INFO.itemsize)
        yield raw
        begins = begins[~same]


def _slices(data: npt.NDArray[np.uint8], begins: npt.NDArray[np.intp], length: int) -> npt.NDArray[np.uint8]:
    return np.lib.stride_tricks.sliding_window_view(data, length)[begins]


def _info_at(data: bytes, begin: int, length: int) -> int | None:
    """Returns the offset of tcp_info from ``begin``, where the message begins; None if the message has no tcp_info."""
    for kind, at, end in attributes(data, begin + _MESSAGE.itemsize, begin + length):
        if kind == _INFO and end - at >= _TCP_INFO.itemsize:
            return at - begin
    return None


@lru_cache(maxsize=4096)
def address_text(family: int, raw: bytes) -> str:
    """Returns an address as text. An IPv4 address that is mapped into IPv6 is shown as IPv4."""
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[:4]))
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)
