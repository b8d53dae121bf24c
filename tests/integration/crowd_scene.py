"""A crowd on one service: clients that ask, clients that do not read, and connections that are half open."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from authority import Authority
from query_helpers import operations
from service_helpers import TOKEN, serving

from probing.api.proto.probing.v1 import node_pb2 as pb

MEMBER = Path(__file__).with_name("crowd_member.py")
GROUP = 65534
FIRST_USER = 61000
ROOT_DEADLINE_S = 5.0


@dataclass
class Figures:
    """``seconds``: of each answer, sorted. ``limited``: calls that a documented bound refused. ``starved``: clients
    without an answer. ``root``: seconds of answers to root beside the crowd; ``root_failed``: why there was none."""

    clients: int
    seconds: list[float] = field(default_factory=list)
    limited: int = 0
    failed: list[str] = field(default_factory=list)
    starved: int = 0
    root: list[float] = field(default_factory=list)
    root_failed: list[str] = field(default_factory=list)


def crowd(root: Path, seconds: float, *, asking: int, idle: int) -> Figures:
    """Returns the figures of a crowd: of ``asking`` addresses and as many local users ten clients each ask, and of
    ``idle`` ten each do not read, or are half open. TCP speaks TLS."""
    authority = Authority(root / "tls")
    cert, key = authority.node("n0")
    figures = Figures(20 * (asking + idle))
    options = (f"--users.group={GROUP}", f"--tls.cert={cert}", f"--tls.key={key}", "--query.timeout_s=30")
    with serving(root, *options, log=root / "log") as service:
        service.collector.files.segment("comm.ops", operations(100))
        members = []
        for number, kind in enumerate(["ask"] * asking + ["idle"] * idle):
            far = (service.tcp, seconds, f"127.0.0.{number + 2}", authority.file, TOKEN)
            near = (f"unix:{root}/s.sock", seconds, "", "", "")
            members += [_member(0, kind, *far), _member(FIRST_USER + number, kind, *near)]
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n"
        for member in members:
            assert member.stdin is not None
            member.stdin.write("\n")
            member.stdin.flush()
        while any(member.poll() is None for member in members[:1]):
            _ask_as_root(service.node, figures)
        for member in members:
            found = json.loads(member.communicate(timeout=60)[0])
            figures.seconds += found["seconds"]
            figures.limited += found["limited"]
            figures.failed += found["failed"]
            figures.starved += found["starved"]
    figures.seconds.sort()
    figures.root.sort()
    return figures


def _member(uid: int, *args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, str(MEMBER), *map(str, args)]
    if uid:
        argv = ["setpriv", f"--reuid={uid}", f"--regid={GROUP}", "--clear-groups", *argv]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")


def _ask_as_root(node: Any, figures: Figures) -> None:
    begun = time.monotonic()
    try:
        node.Status(pb.StatusRequest(), timeout=ROOT_DEADLINE_S)
        figures.root.append(time.monotonic() - begun)
    except grpc.RpcError as e:
        figures.root_failed.append(f"{e.code().name}: {e.details()}")
    time.sleep(0.1)
