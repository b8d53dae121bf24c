"""Reads counters and state of network interfaces, in a reader.

Formats: proc_net(5), Documentation/ABI/testing/sysfs-class-net. A read of the speed may never return, because it waits
for a lock that a driver can hold forever. psutil is not used: it always reads the speed, lacks four of the twelve
counters, and reads only the network namespace of its caller.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from probing.api.errors import ProbingError
from probing.daemon.ipc import Header, Message
from probing.daemon.net.node_sysfs import node_sysfs
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = ("handlers", "read_details", "read_links")

MAX_NAMESPACES = 256
MAX_INTERFACES = 1_024
MAX_DEV = 256 << 10
MAX_NODE = 4
_NUMBERS = ("mtu", "speed", "carrier_changes", "ifindex")
_LOOPBACK = "772"
_NAMESPACE = re.compile(rb"net:\[(\d{1,20})\]")


def handlers() -> dict[str, Callable[[Header], Message]]:
    return {"links": _answer_links, "link_details": _answer_details}


def read_links(targets: list[Any], node: Sequence[int] = ()) -> list[list[Any] | None]:
    """Returns [network namespace, text of /proc/net/dev] of the node, then of each process ([pid, start_ns]) in
    ``targets``; None for a process that cannot be read. ``node``: pids of processes in the namespace of the node. The
    first of them that can be read stands for the node."""
    of_node = next(filter(None, (_links(pid, 0) for pid in (*node, os.getpid()))), None)
    return [of_node, *(_links(int(pid), int(start_ns)) for pid, start_ns in targets[:MAX_NAMESPACES])]


def _links(pid: int, start_ns: int) -> list[Any] | None:
    try:
        with Target(pid, start_ns) as target:
            namespace = _NAMESPACE.fullmatch(target.link("ns/net"))
            text = target.read("net/dev", MAX_DEV).decode("utf-8", "backslashreplace")
    except ProbingError:
        return None
    return [int(namespace[1]), text] if namespace else None


def read_details(root: Path | None = None, node: Sequence[int] = ()) -> dict[str, dict[str, object]]:
    """Returns kind, operstate, mtu, speed (Mb/s), carrier_changes and ifindex of each interface of the node, by name.

    A value is None if the kernel lacks it.
    """
    root = root or node_sysfs("net", node)
    return {clean_text(name, 32): _details(root / name) for name in _names(root)}


def _names(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root))[:MAX_INTERFACES]  # noqa: PTH208
    except OSError:
        return []


def _details(path: Path) -> dict[str, object]:
    kind = "loopback" if _text(path / "type") == _LOOPBACK else "physical" if _has_device(path) else "virtual"
    found: dict[str, object] = {"kind": kind, "operstate": _text(path / "operstate")}
    for name in _NUMBERS:
        text = _text(path / name)
        found[name] = int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
    return found


def _has_device(path: Path) -> bool:
    return os.path.lexists(path / "device")


def _text(path: Path) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            return clean_text((file.read(64) or b"").strip(), 32) or None
    except OSError:
        return None


def _answer_links(request: Header) -> Message:
    return Message({}, json.dumps(read_links(request.get("targets", []), _node(request))).encode())


def _answer_details(request: Header) -> Message:
    return Message({}, json.dumps(read_details(node=_node(request))).encode())


def _node(request: Header) -> list[int]:
    return [int(pid) for pid in request.get("node", [])[:MAX_NODE]]
