"""A service on sockets of its own, with SQL workers and a collector's control socket that answers from files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from ports import free_port
from query_helpers import Files, Inetd

from probing.api.errors import NotFound
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.collector.control import ControlServer
from probing.daemon.config import CONTROL
from probing.daemon.stack_wire import ProcessStacks, join_stacks

TOKEN = "0123456789abcdef-token"
BEARER = (("authorization", f"Bearer {TOKEN}"),)


@dataclass
class Collector:
    """Answers on a control socket as the collector does, from files and canned values."""

    path: Path
    files: Files
    threads: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    paused: bool = False
    released: list[int] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    user_tables: list[dict[str, Any]] = field(default_factory=list)
    block: threading.Event | None = None
    server: ControlServer | None = None

    def start(self) -> None:
        ops = (
            "snapshot",
            "release",
            "damaged",
            "live",
            "stacks",
            "vars",
            "config",
            "status",
            "pause",
            "tables",
            "eval",
        )
        self.server = ControlServer(self.path, {op: self._handler(op) for op in ops}, frozenset())
        self.server.start()

    def stop(self) -> None:
        if self.server:
            self.server.stop()

    def _handler(self, op: str) -> Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]:
        def handle(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
            self.requests.append(request)
            if self.block:
                self.block.wait(30)
            answer: tuple[dict[str, Any], bytes] = getattr(self, op)(request)
            return answer

        return handle

    def snapshot(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        tables = {
            name: [{"path": s.path, "rows": s.rows, "ts_min": s.first, "ts_max": s.last} for s in found]
            for name, found in self.files.segments.items()
        }
        return {"snapshot": {"tables": tables, "parts": []}, "generation": len(self.requests)}, b""

    def release(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        self.released.append(request["generation"])
        return {}, b""

    def damaged(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        self.files.reported_damaged.extend(request["paths"])
        return {}, b""

    def live(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if request["table"] not in self.files.live_rows:
            raise NotFound(f"no live table {request['table']}", hint="ask for another")
        return {}, self.files.live_rows[request["table"]]

    def stacks(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        names = ("job", "run", "rank", "pid", "start_ns", "pid")
        packed = [(t, json.dumps({"threads": [t]}).encode()) for t in self.threads]
        return join_stacks([ProcessStacks(*(t[n] for n in names), text) for t, text in packed], self.failures)

    def vars(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        return {"values": self.values, "failures": self.failures}, b""

    def eval(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        return {}, json.dumps({"results": self.evaluated, "failures": self.failures}).encode()

    def config(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        setting = {"key": request["key"], "value": request.get("value", "19"), "default": "19", "doc": "what it is"}
        return {"settings": [{**setting, "job": request["job"], "pid": request["pid"]}]}, b""

    def status(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        sources = [{"name": "gloo", "state": "running", "reason": "", "rows": 7, "lost": 0, "detail": "2 files"}]
        state = "paused" if self.paused else "running"
        return {"state": state, "sources": sources, "store_bytes": 1 << 33, "processes": 2, "boot_id": "b"}, b""

    def pause(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        self.paused = request["paused"]
        return {"paused": self.paused}, b""

    def tables(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        return {"tables": self.user_tables}, b""


@dataclass
class Service:
    root: Path
    process: subprocess.Popen[str]
    collector: Collector
    inetd: Inetd
    node: NodeStub
    tcp: str

    def query(self, sql: str, **fields: int) -> tuple[pa.Table, pb.QueryEnd]:
        parts = list(self.node.Query(pb.QueryRequest(sql=sql, **fields), timeout=60))
        assert parts[-1].WhichOneof("part") == "end"
        return pa.ipc.open_stream(b"".join(p.arrow for p in parts[:-1])).read_all(), parts[-1].end


def start(
    root: Path,
    *args: str,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Starts a service. It gets ``env`` and the descriptors ``fds`` as well; ``prefix`` runs its command."""
    argv = [*prefix, sys.executable, "-m", "probing.daemon.service", f"--socket={root}/s.sock", "--node_name=n0"]
    # What it does by itself would be among the requests that tests count.
    argv += ["--diagnose.enabled=false", *args]
    with contextlib.ExitStack() as files:
        stderr = subprocess.PIPE if log is None else files.enter_context(log.open("w"))
        return subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd="/",
            env={**os.environ, **(env or {})},
            pass_fds=fds,
        )


def token_file(root: Path) -> str:
    path = root / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o640)
    return f"--token_file={path}"


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, pb.Error]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    sent = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), pb.Error.FromString(sent["probing-error-bin"])


@contextlib.contextmanager
def serving(root: Path, *args: str, log: Path | None = None) -> Iterator[Service]:
    """A service in ``root``, with more ``args``; its end is clean. ``log``: the file of its stderr."""
    runtime = root / "s.sock.d"
    (runtime / CONTROL).mkdir(parents=True)
    files = Files(root / "state")
    files.root.mkdir()
    collector = Collector(runtime / CONTROL / "collector.sock", files)
    collector.start()
    inetd = Inetd(runtime / "sql.sock", [f"--state_dir={root}/state"])
    tcp = f"127.0.0.1:{free_port()}"
    process = start(
        root,
        f"--listen={tcp}",
        token_file(root),
        "--query.timeout_s=20",
        "--cluster.seeds=10.0.0.7:9000",
        *args,
        log=log,
    )
    with grpc.insecure_channel(f"unix:{root}/s.sock") as channel:
        grpc.channel_ready_future(channel).result(30)
        yield Service(root, process, collector, inetd, NodeStub(channel), tcp)
    process.terminate()
    out, err = process.communicate(timeout=30)
    collector.stop()
    inetd.close()
    text = err if log is None else log.read_text()
    assert process.returncode == 0, text
    assert out == ""
    assert "Traceback" not in text, text
