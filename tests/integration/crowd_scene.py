"""A crowd on one service, and root beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from authority import Authority
from crowd_clients import Doors, Figures, crowd_at
from query_helpers import operations
from service_helpers import TOKEN, serving

from probing.api.proto.probing.v1 import node_pb2 as pb

GROUP = 65534
DEADLINE_S = 5.0


@dataclass
class Root:
    """``seconds`` of answers to root beside the crowd, sorted; ``failed``: why there was none."""

    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def crowd(root: Path, seconds: float, *, asking: int, idle: int) -> tuple[Figures, Root]:
    """Returns the figures of ``crowd_at`` a service in the directory ``root``, by TLS, and those of root beside it."""
    authority = Authority(root / "tls")
    cert, key = authority.node("n0")
    beside = Root()
    options = (f"--users.group={GROUP}", f"--tls.cert={cert}", f"--tls.key={key}", "--query.timeout_s=30")
    with serving(root, *options, log=root / "log") as service:
        service.collector.files.segment("comm.ops", operations(100))
        doors = Doors(service.tcp, f"unix:{root}/s.sock", TOKEN, GROUP, authority.file)
        found = crowd_at(doors, seconds, asking=asking, idle=idle, meanwhile=lambda: _ask(service.node, beside))
    beside.seconds.sort()
    return found, beside


def _ask(node: Any, beside: Root) -> None:
    begun = time.monotonic()
    try:
        node.Status(pb.StatusRequest(), timeout=DEADLINE_S)
        beside.seconds.append(time.monotonic() - begun)
    except grpc.RpcError as e:
        beside.failed.append(f"{e.code().name}: {e.details()}")
    time.sleep(0.1)
