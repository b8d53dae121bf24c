"""The scene of an attack: a job whose rows must all be there, and a daemon that must answer all the time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from double_jobs import Job, check
from e2e_support import Daemon
from long import LONG
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

__all__ = ("MEMBER", "STRANGER", "Scene", "as_user", "attacker", "beside", "under_way")

# Who may talk to the socket, and who may not; neither has a name.
MEMBER, STRANGER = 60021, 60022
# What DESIGN promises of `status`, s.
ANSWER_S = 1.0
ASK_EACH_S = 0.1
ROUNDS = 400 if LONG else 100
_INTEGRATION = Path(__file__).resolve().parents[1] / "integration"


class Scene:
    """A working job and a client that asks, both until ``end``."""

    def __init__(self, daemon: Daemon, job: Job) -> None:
        self._daemon, self._job = daemon, job
        self._ended = threading.Event()
        self._rounds = 0
        self.late: list[str] = []
        self._threads = [threading.Thread(target=target) for target in (self._work, self._ask)]
        for thread in self._threads:
            thread.start()

    def last(self) -> None:
        """Go on for a while: in so many rounds of what the job does an attack has its effect."""
        target = self._rounds + ROUNDS
        until(lambda: self._rounds >= target, 300, what="the job to go on")

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.02):
            self._job.ranks.do("do 7 all_reduce 5 7")
            self._rounds += 1

    def _ask(self) -> None:
        with grpc.insecure_channel(self._daemon.target) as channel:
            node = NodeStub(channel)
            while not self._ended.wait(ASK_EACH_S):
                try:
                    state = node.Status(pb.StatusRequest(), timeout=ANSWER_S).state
                except grpc.RpcError as e:
                    self.late.append(f"{e.code().name}: {e.details()}")
                else:
                    if state not in ("running", "degraded"):
                        self.late.append(state)


@contextmanager
def beside(daemon: Daemon, job: Job) -> Iterator[Scene]:
    """An attack runs in this context. Each operation of ``job`` has one row in the end, and each call of Status was
    answered in time."""
    scene = Scene(daemon, job)
    try:
        yield scene
    finally:
        scene.end()
    job.ranks.finish()
    world = next(made["comm"] for made in job.ranks.made() if made["name"] == "world")
    calls = [call for call in job.ranks.calls() if call.comm == world]
    assert calls
    check(job.wait_for_operations(daemon, len(calls), f"comm = '{world}'"), calls)
    assert scene.late == []


def attacker(*words: str | Path, user: int = STRANGER) -> subprocess.Popen[str]:
    """A program of attacker.py, or another, as an ordinary user."""
    program, *rest = map(str, words)
    script = Path(program) if program.endswith(".py") else Path(__file__).with_name("attacker.py")
    if not script.is_absolute():
        script = _INTEGRATION / script
    arguments = rest if program.endswith(".py") else [program, *rest]
    command = [*as_user(user), sys.executable, script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")


def as_user(user: int) -> list[str]:
    """Not Popen's own way: it forks, beside the threads of gRPC."""
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


@contextmanager
def under_way(*words: str | Path, user: int = STRANGER) -> Iterator[subprocess.Popen[str]]:
    """One that is under way, until the context ends."""
    with attacker(*words, user=user) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "open\n":
            assert line, f"{words[0]} ended: {process.wait()}"
        yield process
        process.kill()
