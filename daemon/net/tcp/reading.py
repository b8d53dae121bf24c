"""Reads, in a reader, the open sockets of processes, and the totals and sockets of their network namespaces."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from probing.api.errors import ProbingError
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.target import Target

if TYPE_CHECKING:
    # Imported only for types: the module needs threads, and a reader starts without them.
    from probing.daemon.processes.namespaces import ListedSocket

__all__ = ("TOTALS", "handlers", "held_sockets", "namespace_sockets", "namespace_totals")

MAX_TARGETS = 4_096
MAX_FDS = 16_384
MAX_SOCKETS = 131_072
MAX_SNMP = 64 << 10
# The maximum number of sockets that are listed for a namespace. Each socket is a line of 150 bytes in
# /proc/PID/net/tcp, or of 180 bytes in /proc/PID/net/tcp6.
MAX_LISTED = 8_192
MAX_LIST = MAX_LISTED * 180
# Counters of /proc/PID/net/snmp.
TOTALS = ("CurrEstab", "OutSegs", "InSegs", "RetransSegs")
_SOCKET = re.compile(rb"socket:\[(\d{1,20})\]")
_LISTED = re.compile(
    rb" *\d+: ([0-9A-F]{8}(?:[0-9A-F]{24})?):([0-9A-F]{4}) ([0-9A-F]{8}(?:[0-9A-F]{24})?):([0-9A-F]{4}) ([0-9A-F]{2})"
    rb"(?: +\S+){3} +(\d{1,10}) +\d+ +(\d{1,10}) "
)
_NAMESPACE = re.compile(rb"net:\[(\d{1,20})\]")


def handlers() -> dict[str, Callable[[Header], Message]]:
    return {"sockets": _answer_sockets, "tcp_totals": _answer_totals, "tcp_sockets": _answer_listed}


def _answer_sockets(request: Header) -> Message:
    """Answers the reader's request ``sockets`` {targets [[pid, start_ns], ...], timeout_ms} with {cpu_s}, and the JSON
    of ``held_sockets`` as payload."""
    deadline = time.monotonic() + min(float(request.get("timeout_ms") or 500), 5_000) / 1000
    began = time.thread_time()
    held = json.dumps(held_sockets(request.get("targets", []), deadline)).encode()
    return Message({"cpu_s": time.thread_time() - began}, held)


def held_sockets(targets: list[Any], deadline: float) -> list[list[Any] | None]:
    """Returns [network namespace, [inode of each socket]] of each process; None for a process that ended, cannot be
    read, or was not reached by ``deadline`` (time.monotonic())."""
    found: list[list[Any] | None] = []
    left = MAX_SOCKETS
    for pid, start_ns in targets[:MAX_TARGETS]:
        seen = _of_process(int(pid), int(start_ns), left) if time.monotonic() < deadline else None
        left -= len(seen[1]) if seen else 0
        found.append(seen)
    return found


def namespace_totals(targets: list[Any]) -> list[list[int | None] | None]:
    """Returns the TOTALS of the network namespace of each process; None for a process that cannot be read."""
    found: list[list[int | None] | None] = []
    for pid, start_ns in targets[:MAX_TARGETS]:
        try:
            with Target(int(pid), int(start_ns)) as target:
                values = _tcp_values(target.read("net/snmp", MAX_SNMP))
                found.append([values.get(name) for name in TOTALS])
        except ProbingError:
            found.append(None)
    return found


def namespace_sockets(targets: list[Any]) -> list[list[ListedSocket] | None]:
    """Returns the sockets of the network namespace of each process; None for a process that cannot be read."""
    found: list[list[ListedSocket] | None] = []
    left = MAX_SOCKETS // 4
    for pid, start_ns in targets[:MAX_TARGETS]:
        try:
            with Target(int(pid), int(start_ns)) as target:
                parts = [
                    _listed(family, target.read(name, MAX_LIST))
                    for family, name in ((socket.AF_INET, "net/tcp"), (socket.AF_INET6, "net/tcp6"))
                ]
            listed = [one for part in parts for one in part][: min(MAX_LISTED, left)]
            left -= len(listed)
            found.append(listed)
        except ProbingError:
            found.append(None)
    return found


def _listed(family: int, text: bytes) -> list[ListedSocket]:
    matches = (_LISTED.match(line) for line in text.split(b"\n"))
    return [
        (family, int(m[5], 16), m[1].decode(), int(m[2], 16), m[3].decode(), int(m[4], 16), int(m[7]), int(m[6]))
        for m in matches
        if m is not None
    ]


def _tcp_values(text: bytes) -> dict[str, int]:
    """Returns the values of the two lines that begin with ``Tcp:``, by name: names are in the first, values in the
    second.
    """
    lines = [line.split()[1:] for line in text.split(b"\n") if line.startswith(b"Tcp:")]
    if len(lines) != 2:
        return {}
    pairs = zip(*lines, strict=False)
    return {name.decode("ascii", "replace"): int(value) for name, value in pairs if value.isdigit() and len(value) < 19}


def _answer_totals(request: Header) -> Message:
    return Message({}, json.dumps(namespace_totals(request.get("targets", []))).encode())


def _answer_listed(request: Header) -> Message:
    return Message({}, json.dumps(namespace_sockets(request.get("targets", []))).encode())


def _of_process(pid: int, start_ns: int, most: int) -> list[Any] | None:
    try:
        with Target(pid, start_ns) as target:
            namespace = _NAMESPACE.fullmatch(target.link("ns/net"))
            directory = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=target.dir_fd)
            try:
                inodes = _sockets(directory)
            finally:
                os.close(directory)
    except (OSError, ProbingError):
        return None
    return [int(namespace[1]), inodes[:most]] if namespace else None


def _sockets(directory: int) -> list[int]:
    found = []
    for name in os.listdir(directory)[:MAX_FDS]:
        try:
            match = _SOCKET.fullmatch(os.readlink(name.encode(), dir_fd=directory))
        except OSError:
            continue  # the descriptor was closed
        if match:
            found.append(int(match[1]))
    return found
