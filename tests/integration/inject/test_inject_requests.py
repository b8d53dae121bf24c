"""Requests of the collector, through readers, parsers and injectors that are processes with their own rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import Sink
from inject_helpers import beats, busy, regions
from processes_helpers import Listener, listening
from python_stack_helpers import each_interpreter

from probing.api.errors import NotFound, UsageError
from probing.daemon.clock import SystemClock
from probing.daemon.config import Config, InjectConfig
from probing.daemon.inject.requests import Evaluations
from probing.daemon.processes.liveness import OwnProcesses
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.walk.threads import read_start_ns
from probing.daemon.source import Identity
from probing.daemon.supervisor.rights import INJECTOR, Account, Rights

_OTHER = 65533
ALL = InjectConfig(enabled=True, users=("root", "*"))
Make = Callable[..., Evaluations]


@pytest.fixture
def injectors(open_tmp_path: Path) -> Iterator[Listener]:
    """Starts injectors of an ordinary user, as the supervisor does."""
    path = open_tmp_path / "injector.sock"
    prefix = tuple(Rights(Account(_OTHER, _OTHER, ()), INJECTOR).command())
    with listening(path, "probing.daemon.confined.injector", prefix) as made:
        path.chmod(0o666)
        yield made


@pytest.fixture
def make(listener: Listener, parser_pool: ParserPool, injectors: Listener) -> Iterator[Make]:
    readers, undo = ReaderPool(listener.path), []

    def made(config: InjectConfig, *found: Identity, sink: Sink | None = None) -> Evaluations:
        def chosen(pids: Sequence[int], job: str) -> list[Identity]:
            some = [who for who in found if (not pids or who.pid in pids) and (not job or who.job == job)]
            if not some:
                raise NotFound("no such process")
            return some

        own = OwnProcesses(frozenset())
        evaluations = Evaluations(
            config, injectors.path, readers, parser_pool, chosen, own, "n0", sink or Sink(), SystemClock()
        )
        undo.append(evaluations.close)
        return evaluations

    yield made
    for close in undo:
        close()
    readers.close()


def identity(process: subprocess.Popen[str], rank: int | None = None, job: str = "llama") -> Identity:
    role = "trainer" if rank is not None else "other"
    return Identity(process.pid, read_start_ns(process.pid), job, "r1", role, rank)


def asked(evaluations: Evaluations, code: str, **more: Any) -> dict[str, Any]:
    request = {"op": "eval", "code": code, "seconds": 20.0, "caller": "unix: uid 0, pid 7", **more}
    answer: dict[str, Any] = json.loads(evaluations.answer(request)[1])
    return answer


def test_all_ranks_of_a_job_are_asked_at_once_and_each_use_is_recorded(make: Make) -> None:
    with busy(sys.executable) as first, busy(sys.executable) as second, busy(sys.executable) as third:
        sink = Sink()
        ranks = [identity(first, 0), identity(second, 1), identity(third)]
        code = "print('hello') or 6 * 7"
        found = asked(make(ALL, *ranks, sink=sink), code, job="llama")
        pids = [(0, first.pid, "42"), (1, second.pid, "42")]
        assert [(r["rank"], r["pid"], r["value"]) for r in found["results"]] == pids
        assert [r["output"] for r in found["results"]] == ["hello\n", "hello\n"]
        assert found["failures"] == []
        rows = sink.of("probing.audit")
        assert sorted((row["rank"], row["state"]) for row in rows) == [
            (0, "begun"),
            (0, "ended"),
            (1, "begun"),
            (1, "ended"),
        ]
        for row in rows:
            assert (row["caller"], row["action"], row["job"]) == ("unix: uid 0, pid 7", "eval", "llama")
            assert row["code"] == code
            assert row["result"] == ""
        for process in (first, second):
            beats(process)


@each_interpreter
def test_clients_at_the_same_time(python: str, make: Make) -> None:
    """Each client gets its own answer: the code of a request ends before the code of the next request begins."""
    with busy(python, "threads") as process, ThreadPoolExecutor(3) as clients:
        evaluations = make(ALL, identity(process, 0))

        def ask(number: int) -> str:
            [result] = asked(evaluations, f"{number} * 7", pids=[process.pid], seconds=60.0)["results"]
            return str(result["value"])

        assert list(clients.map(ask, range(11))) == [str(number * 7) for number in range(11)]
        beats(process)
        assert regions(process.pid) == []


def test_one_rank_and_one_pid(make: Make) -> None:
    with busy(sys.executable) as first, busy(sys.executable) as second:
        evaluations = make(ALL, identity(first, 0), identity(second, 1))
        here = "__import__('os').getpid()"
        assert [r["value"] for r in asked(evaluations, here, job="llama", rank=1)["results"]] == [str(second.pid)]
        assert [r["value"] for r in asked(evaluations, here, rank=0)["results"]] == [str(first.pid)]
        assert [r["value"] for r in asked(evaluations, here, pids=[first.pid])["results"]] == [str(first.pid)]
        with pytest.raises(NotFound):
            asked(evaluations, here, job="llama", rank=2)
        with pytest.raises(UsageError, match="names no processes"):
            asked(evaluations, here)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (InjectConfig(enabled=True), False),
        (InjectConfig(enabled=True, users=("*",)), False),
        (InjectConfig(enabled=True, users=("nobody", "1000")), False),
        (InjectConfig(enabled=True, jobs=("other",)), False),
        (InjectConfig(enabled=True, users=("root",)), True),
        (InjectConfig(enabled=True, users=("0",)), True),
        (InjectConfig(enabled=True, jobs=("llama",)), True),
        (InjectConfig(enabled=True, jobs=("*",)), True),
    ],
)
def test_the_lists_say_where(make: Make, config: InjectConfig, allowed: bool) -> None:
    with busy(sys.executable) as process:
        sink = Sink()
        found = asked(make(config, identity(process, 0), sink=sink), "1", pids=[process.pid])
        states = [row["state"] for row in sink.of("probing.audit")]
        if allowed:
            assert [r["value"] for r in found["results"]] == ["1"]
            assert states == ["begun", "ended"]
        else:
            [failed] = found["failures"]
            assert failed["error"]["kind"] == "PrivilegeError"
            assert "the job to inject.jobs, or the user to inject.users" in failed["error"]["hint"]
            assert states == ["begun", "refused"]


def test_a_process_without_a_job_needs_its_user(make: Make) -> None:
    with busy(sys.executable) as process:
        lone = identity(process, job="")
        config = InjectConfig(enabled=True, jobs=("*",))
        assert asked(make(config, lone), "1", pids=[process.pid])["results"] == []
        assert asked(make(ALL, lone), "1", pids=[process.pid])["results"]


def test_the_daemon_itself_is_no_target(make: Make) -> None:
    mine = Identity(os.getpid(), read_start_ns(os.getpid()), "llama", "r1", "trainer", 0)
    [failed] = asked(make(ALL, mine), "1", pids=[os.getpid()])["failures"]
    assert "the daemon's own" in failed["error"]["message"]


def test_what_runs_no_python_is_named(make: Make) -> None:
    with subprocess.Popen(["/bin/sleep", "60"], text=True) as process:
        [failed] = asked(make(ALL, identity(process)), "1", pids=[process.pid])["failures"]
        assert failed["error"]["kind"] == "NotPython"
        process.kill()


def test_an_exception_of_the_code_is_a_result(make: Make) -> None:
    with busy(sys.executable) as process:
        sink = Sink()
        [found] = asked(make(ALL, identity(process), sink=sink), "1 // 0", pids=[process.pid])["results"]
        assert found["error"]["type"] == "ZeroDivisionError"
        rows = sink.of("probing.audit")
        assert rows[-1]["result"] == "the code raised ZeroDivisionError"


def test_too_large_answers_are_refused_and_others_shown(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probing.daemon.inject.requests.MAX_ANSWERS", 2000)
    with busy(sys.executable) as first, busy(sys.executable) as second:
        code = f"'x' * (2000 if __import__('os').getpid() == {first.pid} else 2)"
        found = asked(make(ALL, identity(first, 0), identity(second, 1)), code, job="llama")
        assert [r["value"] for r in found["results"]] == ["'xx'"]
        assert [f["pid"] for f in found["failures"]] == [first.pid]
        assert "answers too much" in found["failures"][0]["error"]["message"]


def test_requests_out_of_bounds(make: Make) -> None:
    evaluations = make(ALL)
    for more in ({"code": ""}, {"code": " \n"}, {"code": "x" * (1 << 17)}, {"seconds": 0}, {"seconds": 1e9}):
        with pytest.raises(UsageError):
            evaluations.answer({"op": "eval", "code": "1", "seconds": 1.0, "pids": [1], **more})


def test_nothing_is_enabled_by_default() -> None:
    assert Config.from_args([]).inject == InjectConfig(enabled=False, jobs=(), users=())
