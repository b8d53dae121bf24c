"""Hooks: real processes, started with the configured command, fed with the finding, ended in time."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from query_helpers import Inetd
from waiting import until

from probing.daemon import backoff
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.finding_row import finding_row
from probing.daemon.diagnose.hooks import Hooks, job_itself
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict

VERDICT = Verdict("not_joined", "hang", "t", "", "", "", "", ())
CULPRITS = (Culprit(1, "b", 4711, "sleeps", "sleeping"),)
FOUND = Finding(
    VERDICT,
    ERROR,
    0.9,
    "rank 1 (node b) holds up 2 ranks\x1b[31m",
    CULPRITS,
    (0, 2),
    since_ns=0,
    evidence=("e",),
    about="comm 0 seq 17",
)
ROW = finding_row("job\n4711", "r", FOUND, 1_700_000_000_000_000_007)
Start = Callable[..., Hooks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts hooks with a listener as the supervisor is one."""
    listeners = []

    def starting(owner_of: Callable[[str, str], Hashable] = job_itself, **config: Any) -> Hooks:
        args = [f"--diagnose.{name}={value}" for name, value in config.items()]
        listeners.append(Inetd(tmp_path / "hook.sock", args, ("-m", "probing.daemon.confined.hook")))
        hooks = Hooks(str(tmp_path / "hook.sock"), "n1", DiagnoseConfig(**config), owner_of)
        hooks.start()
        return hooks

    yield starting
    for listener in listeners:
        listener.close()


def script(folder: Path, text: str) -> str:
    path = folder / "hook.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def done(hooks: Hooks, number: int = 1) -> None:
    until(lambda: hooks.started == number and hooks.idle)


def test_a_command_gets_the_finding_and_variables(tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    hooks = start(hook=f"{script(tmp_path, f'cat >{out}; env >>{out}.env; echo $1 >{out}.arg')} 'a b'")
    hooks.post(ROW)
    done(hooks)
    assert (hooks.failed, list(hooks.problems)) == (0, [])
    found = json.loads(out.read_text())
    wanted = {"node": "n1", "job": "job\n4711", "run": "r", "state": "open", "verdict": "not_joined", "victims": [0, 2]}
    assert {name: found[name] for name in wanted} == wanted
    assert found["culprits"] == [{"rank": 1, "node": "b", "pid": 4711, "why": "sleeps", "activity": "sleeping"}]
    assert found["opened"] == "2023-11-14T22:13:20.000000007Z"
    lines = (tmp_path / "out.env").read_text().splitlines()
    assert "PROBING_JOB=job\\n4711" in lines
    assert "PROBING_RANKS=1" in lines
    assert "PROBING_SENTENCE=rank 1 (node b) holds up 2 ranks\\x1b[31m" in lines
    assert (tmp_path / "out.arg").read_text() == "a b\n"


def test_each_finding_has_a_process_of_its_own(tmp_path: Path, start: Start) -> None:
    hooks = start(hook=script(tmp_path, f"echo $$ >>{tmp_path}/pids"))
    for number in range(3):
        hooks.post({**ROW, "finding_id": str(number)})
    done(hooks, 3)
    assert len(set((tmp_path / "pids").read_text().split())) == 3


def test_a_command_that_fails_is_named(tmp_path: Path, start: Start) -> None:
    hooks = start(hook=script(tmp_path, "exit 17"))
    hooks.post(ROW)
    done(hooks)
    assert (hooks.failed, list(hooks.problems)) == (1, ["hook: the command ended with exit status 17"])


def test_a_command_that_is_not_there_is_named(start: Start) -> None:
    hooks = start(hook="/nonexistent/hook")
    hooks.post(ROW)
    done(hooks)
    assert list(hooks.problems) == ["hook: the command cannot be started: No such file or directory"]


def test_a_command_that_hangs_ends_with_its_children(tmp_path: Path, start: Start) -> None:
    pids = tmp_path / "pids"
    hooks = start(hook=script(tmp_path, f"sleep 1000 & echo $! $$ >{pids}; wait"), hook_timeout_s=0.5)
    hooks.post(ROW)
    done(hooks)
    assert list(hooks.problems) == ["hook: the command did not end within 0.5 s and was killed"]
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: gone(pid))


LEFT = {
    "a session of its own": "setsid sleep 1000 & echo $! >>{pids}",
    "a double fork": "(setsid sh -c 'sleep 1000 & echo $! >>{pids}' &)",
    "many that ignore signals": "for i in 1 2 3 4 5 6 7 8; do "
    "(setsid sh -c 'trap \"\" TERM HUP INT; echo $$ >>{pids}; setsid sleep 1000 & echo $! >>{pids}; wait' &) ; done",
    "a chain of sessions": "setsid sh -c 'echo $$ >>{pids}; setsid sh -c \"echo \\$\\$ >>{pids}; "
    "setsid sleep 1000; :\"; :' &",
}


@pytest.mark.parametrize("ends", ["exit 0", "exec sleep 1000"], ids=["ends", "hangs"])
@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_a_command_leaves_in_sessions_of_its_own_ends(tmp_path: Path, start: Start, left: str, ends: str) -> None:
    pids = tmp_path / "pids"
    text = f"{left.format(pids=pids)}\nwhile [ ! -s {pids} ]; do sleep 0.01; done\n{ends}"
    hooks = start(hook=script(tmp_path, text), hook_timeout_s=2.0)
    hooks.post(ROW)
    done(hooks)
    assert hooks.failed == (ends != "exit 0")
    found = [int(pid) for pid in pids.read_text().split()]
    assert found
    for pid in found:
        assert gone(pid)


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_hook_outlives_the_service_and_ends_with_the_daemon(tmp_path: Path, start: Start) -> None:
    pids = tmp_path / "pids"
    hooks = start(hook=script(tmp_path, f"echo $$ $PPID >{pids}; exec sleep 1000"), hook_timeout_s=300.0)
    hooks.post(ROW)
    command, parent = until(lambda: pids.exists() and [int(pid) for pid in pids.read_text().split()])
    os.kill(parent, signal.SIGTERM)
    until(lambda: gone(command))


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_a_command_left_ends_with_the_daemon(tmp_path: Path, start: Start, left: str) -> None:
    pids, parents = tmp_path / "pids", tmp_path / "parent"
    ready = f"while [ ! -s {pids} ]; do sleep 0.01; done; echo $PPID >{parents}; exec sleep 1000"
    hooks = start(hook=script(tmp_path, f"{left.format(pids=pids)}\n{ready}"), hook_timeout_s=300.0)
    hooks.post(ROW)
    parent = until(lambda: parents.exists() and parents.read_text().strip())
    found = [int(pid) for pid in pids.read_text().split()]
    os.kill(int(parent), signal.SIGTERM)
    until(lambda: gone(int(parent)))
    assert found
    assert all(gone(pid) for pid in found)


class _Web(HTTPServer):
    def __init__(self, status: int, headers: dict[str, str] | None = None, silent: bool = False) -> None:
        self.status, self.headers, self.silent = status, headers or {}, silent
        self.bodies: list[bytes] = []
        self.release = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/path?a=b"


class _Handler(BaseHTTPRequestHandler):
    server: _Web

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.silent:
            self.server.release.wait(60)
        with suppress(OSError):
            self.send_response(self.server.status)
            for name, value in self.server.headers.items():
                self.send_header(name, value)
            self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def web() -> Iterator[Callable[..., _Web]]:
    servers: list[_Web] = []

    def starting(*args: Any, **fields: Any) -> _Web:
        servers.append(_Web(*args, **fields))
        return servers[-1]

    yield starting
    for server in servers:
        server.release.set()
        server.shutdown()
        server.server_close()


def test_a_webhook_gets_the_finding(start: Start, web: Callable[..., _Web]) -> None:
    server = web(204)
    hooks = start(webhook=server.url)
    hooks.post(ROW)
    done(hooks)
    assert list(hooks.problems) == []
    assert json.loads(server.bodies[0])["sentence"] == ROW["sentence"]


def test_a_webhook_that_moved_is_not_followed(start: Start, web: Callable[..., _Web]) -> None:
    elsewhere = web(204)
    hooks = start(webhook=web(302, {"Location": elsewhere.url}).url)
    hooks.post(ROW)
    done(hooks)
    assert list(hooks.problems) == ["hook: the webhook answered 302"]
    assert elsewhere.bodies == []


def test_a_webhook_that_is_silent_is_given_up(start: Start, web: Callable[..., _Web]) -> None:
    hooks = start(webhook=web(204, silent=True).url, hook_timeout_s=0.3)
    hooks.post(ROW)
    done(hooks)
    assert list(hooks.problems) == ["hook: the webhook did not answer within 0.3 s"]


def test_a_hook_that_failed_is_tried_again(
    tmp_path: Path, start: Start, web: Callable[..., _Web], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 0.05)
    server = web(503)
    # Its second run succeeds.
    text = f"echo >>{tmp_path}/runs; [ $(wc -l <{tmp_path}/runs) -gt 1 ]"
    hooks = start(hook=script(tmp_path, text), webhook=server.url)
    hooks.post(ROW)
    until(lambda: len(server.bodies) > 3)
    server.status = 204
    until(lambda: list(hooks.problems) == [])
    until(lambda: hooks.idle)
    # The command has succeeded, and was not started again for the webhook.
    assert (tmp_path / "runs").read_text() == "\n\n"
    assert (hooks.failed, hooks.lost) == (len(server.bodies) - 1, 0)
    assert hooks.counts == {"started": hooks.started, "failed": hooks.failed, "lost": 0}


@pytest.mark.parametrize(
    "crowd",
    [
        [{"job": f"s{number}"} for number in range(200)],
        [{"job": "s1", "finding_id": str(number)} for number in range(200)],
        [{"job": f"s{number % 3}", "finding_id": str(number)} for number in range(200)],
    ],
    ids=["many jobs", "many findings of a job", "many findings of three jobs"],
)
def test_a_page_of_another_owner_is_the_next_whatever_one_owner_has(
    tmp_path: Path, start: Start, crowd: list[dict[str, str]]
) -> None:
    owner_of = lambda job, run: job[0]  # noqa: E731
    gate = tmp_path / "gate"
    text = f"echo $PROBING_JOB >>{tmp_path}/jobs; while [ ! -e {gate} ]; do sleep 0.01; done"
    hooks = start(owner_of, hook=script(tmp_path, text), hook_timeout_s=60.0)
    for one in crowd:
        hooks.post({**ROW, **one})
    hooks.post({**ROW, "job": "victim"})
    for one in crowd:
        hooks.post({**ROW, **one, "run": "second"})
    assert hooks.lost >= 400 - 64 - 1
    assert "without one" in hooks.detail
    gate.touch()
    file = tmp_path / "jobs"
    jobs = until(lambda: file.exists() and len(lines := file.read_text().split()) > 2 and lines)
    assert "victim" in jobs[:3]


def test_nobody_waits_for_a_hook(tmp_path: Path, start: Start) -> None:
    hooks = start(hook=script(tmp_path, "sleep 1000"), hook_timeout_s=0.2)
    for number in range(200):
        hooks.post({**ROW, "finding_id": str(number)})
    # Of more than can wait the newest are dropped, and counted.
    assert hooks.lost >= 200 - 64 - 1


def test_without_a_hook_nothing_is_started() -> None:
    hooks = Hooks("/nonexistent", "n1", DiagnoseConfig())
    hooks.start()
    hooks.post(ROW)
    assert (hooks.started, hooks.detail) == (0, "")
