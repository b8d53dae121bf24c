"""Labels of a job by each of their three ways, under a real daemon: they are rows, `top` shows the phase, and a job
in a phase is no hang until its limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon, end_process, is_replaced, start_process
from ports import free_port
from waiting import until

STRANGER = 65_534


class Job:
    """Two ranks in a gloo group that stand still, outside of collectives, between their commands."""

    def __init__(self) -> None:
        port = free_port()
        self.name = f"n1/127.0.0.1:{port}"
        self.ranks: list[subprocess.Popen[Any]] = []
        for rank in range(2):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.ranks.append(start_process(sys.executable, JOBS / "labelled.py", env=env, **pipes))

    def tell(self, command: str, *ranks: int) -> None:
        chosen = [self.ranks[rank] for rank in ranks or range(2)]
        for rank in chosen:
            rank.stdin.write(command + "\n")
            rank.stdin.flush()
        for rank in chosen:
            assert rank.stdout.readline() == "done\n"


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for rank in made.ranks:
        end_process(rank)


def send_as(uid: int, path: Path, request: dict[str, Any]) -> None:
    program = (
        "import os, socket, sys; os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]));"
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[3].encode(), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", program, str(uid), str(path), json.dumps(request)], check=True, timeout=60)


def test_labels_of_each_way_and_the_limit_of_their_phase(make_daemon: Callable[..., Daemon], job: Job) -> None:
    # W and the limits of phases are its own.
    daemon = make_daemon("n1", "--diagnose.stall_s", "2", "--diagnose.checkpoint_s", "3")
    daemon.start()
    path = Path(f"{daemon.target.removeprefix('unix:')}.d/public/labels.sock")
    job.tell("steps 23")
    labels = f"SELECT rank, key, value, source, uid FROM train.labels WHERE job = '{job.name}' ORDER BY ts, rank, key"
    until(lambda: daemon.rows(f"SELECT 1 FROM comm.ops WHERE job = '{job.name}'"), what=daemon.tail)

    def findings() -> set[tuple[str, str]]:
        done = daemon.ctl("-f", "json", "diagnose", "--job", job.name, check=None)
        assert done.returncode in (0, 3), done.stderr
        worst = json.loads(done.stdout)
        return {(one["verdict"], one["severity"]) for one in (worst, *worst["others"])}

    # A datagram of the rank itself, and of a stranger.
    job.tell(f"send {path} {json.dumps({'labels': {'phase': 'eval'}})}", 1)
    send_as(STRANGER, path, {"labels": {"phase": "checkpoint"}, "job": job.name})
    until(lambda: daemon.rows(labels), what=daemon.tail)
    until(lambda: "has no right to label ranks of job" in daemon.ctl("status").stdout, what=daemon.tail)
    assert daemon.rows(labels) == [
        {"rank": 1, "key": "phase", "value": "eval", "source": "datagram", "uid": os.getuid()}
    ]
    until(lambda: ("phase", "note") in findings(), what=daemon.tail)
    assert not [verdict for verdict, severity in findings() if severity == "error"]
    assert "phase eval: rank 1" in daemon.ctl("top", "--once", "--job", job.name).stdout
    (row,) = (row for row in daemon.json("top", "--once", "--job", job.name) if row["rank"] == 1)
    assert row["phase"] == "eval"

    # An annotation, with a shorter limit; it replaces the datagram's.
    assert daemon.json("annotate", "--job", job.name, "phase=checkpoint") == [{"node": "n1", "ranks": 2}]
    until(lambda: any(severity == "error" for _, severity in findings()), what=daemon.tail)
    text = daemon.ctl("diagnose", "--job", job.name, check=None).stdout
    assert "has the label phase=checkpoint for" in text

    # The process context, which outlives the limit of the phase before.
    job.tell("publish phase=eval service.name=pretrain", 0)
    until(lambda: {"eval"} == {r["value"] for r in daemon.rows(labels)[-2:] if r["key"] == "phase"}, what=daemon.tail)
    assert daemon.rows(labels)[-2:] == [
        {"rank": 0, "key": "phase", "value": "eval", "source": "opentelemetry", "uid": None},
        {"rank": 0, "key": "service.name", "value": "pretrain", "source": "opentelemetry", "uid": None},
    ]
    until(lambda: not any(severity == "error" for _, severity in findings()), what=daemon.tail)

    # Labels outlive the collector.
    (collector,) = daemon.children()["probing.daemon.collector"]
    os.kill(collector, signal.SIGKILL)
    until(lambda: is_replaced(daemon, collector), what=daemon.tail)
    until(lambda: ("phase", "note") in findings(), what=daemon.tail)
    assert len(daemon.rows(labels)) == 5
