"""Reads the queue pairs of RDMA devices with their processes, by netlink (RDMA_NLDEV), in a parser.

Formats: include/uapi/rdma/rdma_netlink.h and drivers/infiniband/core/nldev.c of the kernel. The kernel asks the card
about each queue pair, so it may never answer. Pids are as in the parser's PID namespace.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import TypedDict

from probing.api.errors import ProbingError, TargetError, UsageError
from probing.daemon.ipc import Message
from probing.daemon.net.netlink import attribute, attributes, dump, messages, text_of
from probing.daemon.processes.procfs import clean_text

__all__ = ("NETLINK_RDMA", "QueuePair", "QueuePairsRead", "handlers", "read_qps")

NETLINK_RDMA = 20
_CLIENT = 5 << 10
_GET, _QP_GET, _CM_ID_GET = _CLIENT + 1, _CLIENT + 10, _CLIENT + 11
_INDEX, _NAME, _PORT, _QPS, _LQPN, _RQPN, _RQ_PSN, _SQ_PSN, _TYPE, _STATE, _PID, _CM_IDS, _DST = (
    1, 2, 3, 19, 21, 22, 23, 24, 26, 27, 28, 30, 34
)  # fmt: skip
# enum ib_qp_type and enum ib_qp_state, include/rdma/ib_verbs.h.
_TYPES = {
    0: "SMI",
    1: "GSI",
    2: "RC",
    3: "UC",
    4: "UD",
    5: "RAW_IPV6",
    6: "RAW_ETHERTYPE",
    8: "RAW_PACKET",
    9: "XRC_INI",
    10: "XRC_TGT",
    255: "DRIVER",
}
_STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
MAX_BYTES = 16 << 20
MAX_DEVICES = 256
MAX_QPS = 65_536
TIMEOUT_S = 2.0


def handlers() -> dict[str, Callable[[Message], bytes]]:
    return {"rdma_qps": _answer}


class _QueuePair(TypedDict):
    port: int | None
    qpn: int
    peer_qpn: int | None
    type: str | None
    state: str | None
    sq_psn: int | None
    rq_psn: int | None
    pid: int


class QueuePair(_QueuePair):
    """A queue pair of a process; a value is None if the kernel leaves it out."""

    hca: str
    peer_address: str | None


class QueuePairsRead(TypedDict):
    """The queue pairs, and the ``problems``: why queue pairs of a device are missing."""

    qps: list[QueuePair]
    problems: list[str]


def read_qps(sock: socket.socket) -> QueuePairsRead:
    """Returns the queue pairs of processes. Raises TargetError if the kernel lists no devices."""
    found: list[QueuePair] = []
    problems: list[str] = []
    for index, name in list(_devices(sock))[:MAX_DEVICES]:
        try:
            peers = _peers(sock, index)
            found += [{"hca": name, **qp, "peer_address": peers.get(qp["qpn"])} for qp in _qps(sock, index)]
        except ProbingError as e:
            problems.append(f"{name}: {e.message}")
    return {"qps": found[:MAX_QPS], "problems": problems[:MAX_DEVICES]}


def _devices(sock: socket.socket) -> Iterator[tuple[int, str]]:
    for piece in dump(sock, _GET, b"", most_bytes=MAX_BYTES):
        for kind, begin, end in messages(piece):
            values = _values(piece, begin, end)
            if kind == _GET and _INDEX in values and _NAME in values:
                yield _number(values[_INDEX]), clean_text(text_of(values[_NAME]), 64)


def _qps(sock: socket.socket, device: int) -> Iterator[_QueuePair]:
    for values in _entries(sock, _QP_GET, device, _QPS):
        pid = _optional(values, _PID)
        if pid and _LQPN in values:
            kind, state = _optional(values, _TYPE), _optional(values, _STATE)
            yield {
                "port": _optional(values, _PORT),
                "qpn": _number(values[_LQPN]),
                "peer_qpn": _optional(values, _RQPN),
                "type": None if kind is None else _TYPES.get(kind, f"type {kind}"),
                "state": None if state is None else _STATES[state] if state < len(_STATES) else f"state {state}",
                "sq_psn": _optional(values, _SQ_PSN),
                "rq_psn": _optional(values, _RQ_PSN),
                "pid": pid,
            }


def _peers(sock: socket.socket, device: int) -> dict[int, str]:
    """Returns the peer addresses of the queue pairs that the connection manager made, by queue pair number."""
    found = {}
    for values in _entries(sock, _CM_ID_GET, device, _CM_IDS):
        address = _address(values.get(_DST, b""))
        if _LQPN in values and address:
            found[_number(values[_LQPN])] = address
    return found


def _entries(sock: socket.socket, command: int, device: int, table: int) -> Iterator[dict[int, bytes]]:
    request = attribute(_INDEX, struct.pack("=I", device))
    for piece in dump(sock, command, request, most_bytes=MAX_BYTES):
        for kind, begin, end in messages(piece):
            if kind != command:
                continue
            for outer, first, last in attributes(piece, begin, end):
                if outer == table:
                    yield from (_values(piece, b, e) for _, b, e in attributes(piece, first, last))


def _values(piece: bytes, begin: int, end: int) -> dict[int, bytes]:
    return {kind: piece[b:e] for kind, b, e in attributes(piece, begin, end)}


def _optional(values: dict[int, bytes], kind: int) -> int | None:
    return _number(values[kind]) if kind in values else None


def _number(value: bytes) -> int:
    if len(value) not in (1, 2, 4, 8):
        raise TargetError(f"a number in a netlink message has {len(value)} bytes")
    return int.from_bytes(value, sys.byteorder)


def _address(raw: bytes) -> str | None:
    """Returns address and port of a struct sockaddr_storage as text; None if it is neither IPv4 nor IPv6."""
    if len(raw) < 28:
        return None
    (family,) = struct.unpack_from("=H", raw)
    (port,) = struct.unpack_from("!H", raw, 2)
    if family == socket.AF_INET:
        return f"{ipaddress.IPv4Address(raw[4:8])}:{port}"
    return f"[{ipaddress.IPv6Address(raw[8:24])}]:{port}" if family == socket.AF_INET6 else None


def _answer(request: Message) -> bytes:
    if len(request.fds) != 1:
        raise UsageError("the request rdma_qps takes one socket")
    try:
        with socket.socket(fileno=request.take_fd()) as sock:
            sock.settimeout(TIMEOUT_S)
            return json.dumps(read_qps(sock)).encode()
    except OSError as e:
        if isinstance(e, ProbingError):
            raise
        raise UsageError(f"the request rdma_qps takes a netlink socket: {e.strerror}") from e
