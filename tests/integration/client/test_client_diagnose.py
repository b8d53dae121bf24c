"""``diagnose`` over two nodes: one request, merged facts, nodes that are missing, jobs that have ended."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, process
from diagnosis_cases import comm, elsewhere, facts, history, in_collective, op, rank

from probing.api.errors import QueryTimeout
from probing.diagnosis.facts import Exit, Facts, Missing
from probing.diagnosis.facts_file import load, to_json

Run = Callable[..., tuple[int, str, str]]
_PROGRAM = "from probing.client.main import main; main()"
_SECONDS = 60.0


def hung(node: str, *numbers: int) -> Facts:
    """The part of a job of four ranks that ``node`` sees: rank 2 computes elsewhere, the others wait."""
    ranks = [
        rank(n, *history(50, ago=36), node=node, stack=elsewhere("read_batch train.py:31"))
        if n == 2
        else rank(n, *history(50, ago=36), op(51, ago=35), node=node, stack=in_collective())
        for n in numbers
    ]
    return replace(facts(*ranks, comms=[comm("0", range(4))]), job="j1", run="r1", world_size=4)


def healthy(node: str, job: str) -> Facts:
    return replace(facts(rank(0, *history(811, ago=0.2), node=node)), job=job, run="r1")


@pytest.fixture
def job(pair: tuple[FakeNode, FakeNode]) -> tuple[FakeNode, FakeNode]:
    pair[0].insert("process.processes", [process("alpha", 0, 1500, job="j2")])
    pair[0].facts = {"j1": [to_json(hung("alpha", 0, 1))], "j2": [to_json(healthy("alpha", "j2"))]}
    pair[1].facts = {"j1": [to_json(hung("beta", 2, 3))]}
    return pair


def test_the_facts_of_all_nodes_are_merged(ctl: Run, job: tuple[FakeNode, FakeNode], tmp_path: Path) -> None:
    code, out, err = ctl("diagnose", "--all-nodes", "--job", "j1", "--save", str(tmp_path / "f"), "-f", "json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    (saved,) = load(tmp_path / "f")
    assert [(r.rank, r.node) for r in saved.ranks] == [(0, "alpha"), (1, "alpha"), (2, "beta"), (3, "beta")]
    assert (code, found["job"]) == (3, "j1")
    assert [culprit["rank"] for culprit in found["culprits"]] == [2]
    assert sorted(found["victims"]) == [0, 1, 3]
    code, page, err = ctl("why", "--facts", str(tmp_path / "f"))
    assert (code, err) == (3, "")
    assert page.splitlines()[0].lower().startswith(found["sentence"].lower())


def test_nothing_is_said_to_be_well_while_probes_are_paused(ctl: Run, job: tuple[FakeNode, FakeNode]) -> None:
    paused = "PAUSED on alpha since 2026-11-22 03:12:07Z by `probingctl pause`: nothing newer is seen"
    gap = (Missing("pause", paused, node="alpha"),)
    seen = job[0].facts
    job[0].facts = {
        "j1": [to_json(replace(hung("alpha", 0, 1), missing=gap))],
        "j2": [to_json(replace(healthy("alpha", "j2"), missing=gap))],
    }
    code, page, _ = ctl("diagnose", "--job", "j2")
    assert (code, "nothing is wrong" in page) == (4, False)
    assert "job j2: cannot tell whether something is wrong, since not all of it could be read" in page
    assert paused in " ".join(page.split())
    # What was found stands.
    code, page, _ = ctl("diagnose", "--all-nodes", "--job", "j1")
    assert (code, page.startswith("Rank 2 ")) == (3, True)
    assert paused in " ".join(page.split())
    job[0].facts = seen
    assert ctl("diagnose", "--job", "j2")[0] == 0


def test_all_jobs_the_worst_first(ctl: Run, job: tuple[FakeNode, FakeNode]) -> None:
    code, out, _ = ctl("diagnose", "--all-nodes", "-f", "json")
    found = json.loads(out)
    assert (code, found["job"]) == (3, "j1")
    assert ("j2", "healthy") in [(other["job"], other["verdict"]) for other in found["others"]]


def test_a_job_that_is_well(ctl: Run, job: tuple[FakeNode, FakeNode]) -> None:
    code, out, err = ctl("diagnose", "--job", "j2")
    assert (code, err) == (0, "")
    assert out == "job j2: nothing is wrong: 1 rank, last operation 190 ms ago\n"


def test_a_node_that_does_not_answer_is_missing(ctl: Run, job: tuple[FakeNode, FakeNode]) -> None:
    job[1].stop()
    code, out, err = ctl("diagnose", "--all-nodes", "--job", "j2")
    assert code == 4
    assert "node unix:" in out
    assert "did not answer" in out
    assert "is missing" in err
    found = json.loads(ctl("diagnose", "--all-nodes", "--job", "j1", "-f", "json")[1])
    assert all(row["confidence"] <= 0.8 for row in (found, *found["others"]))
    assert any("did not answer" in text for text in found["missing"])
    assert ctl("diagnose", "--all-nodes", "--strict")[0] == 4


@pytest.mark.parametrize("sent", [b"", b"{}", b"\xff", b'{"version": 2}', b"[" * 99999])
def test_a_node_that_sends_garbage_is_missing(ctl: Run, job: tuple[FakeNode, FakeNode], sent: bytes) -> None:
    job[1].facts = {"j1": [sent]}
    code, out, _ = ctl("diagnose", "--all-nodes", "-f", "json")
    found = json.loads(out)
    assert code in (3, 4)
    assert any(text.startswith("node beta did not answer: ") for text in found["missing"])


def test_a_node_without_an_answer_may_have_the_only_job(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    # GIVEN a node that no job runs on, and one that sends garbage, then nothing
    pair[1].facts = {"j1": [b"{}"]}
    code, out, err = ctl("diagnose", "--all-nodes")
    assert (code, out) == (4, "")
    assert err.startswith("error: no training job was found on the nodes that answered\nhint: missing: beta (")
    pair[1].stop()
    assert ctl("diagnose", "--all-nodes")[0] == 4
    code, _, err = ctl("diagnose", "--all-nodes", "--job", "j1")
    assert (code, err.splitlines()[0]) == (4, "error: job j1 was not found on the nodes that answered")
    assert "there is no such socket" in err


def test_a_job_that_has_ended(ctl: Run, job: tuple[FakeNode, FakeNode]) -> None:
    well = healthy("alpha", "over")
    ended = replace(well, ranks=(replace(well.ranks[0], exit=Exit(1_700_000_000 * SECOND, code=0), state="exited"),))
    job[0].facts["over"] = [to_json(ended)]
    job[0].insert("process.events", [event("over")])
    code, out, _ = ctl("diagnose", "--job", "over")
    assert (code, out) == (
        0,
        "job over: it ended at 2023-11-14 22:13:20Z, healthy until then: 1 rank, rank 0 exited with code 0\n",
    )


def test_a_job_that_ended_long_ago_keeps_its_story(ctl: Run, job: tuple[FakeNode, FakeNode]) -> None:
    # No node gathers facts of these any more: their exits and their findings are stored.
    exits = [event(name, rank=n, signal=15, pid=1000 + n) for name in ("well", "hung", "slow") for n in (0, 1)]
    job[0].insert("process.events", [*exits, event("oom", rank=0, signal=9), {**event("oom"), "event": "oom_kill"}])
    job[0].insert(
        "diagnosis.findings",
        [stored("hung"), stored("slow", verdict="slow_rank", severity="warning", sentence="rank 1 is slow")],
    )
    code, out, err = ctl("diagnose", "--job", "well")
    assert (code, err) == (0, "")
    assert "healthy until then: 2 ranks, ranks 0-1 were killed by SIGTERM, a scheduler or a user ended it" in out
    code, out, _ = ctl("diagnose", "--job", "hung")
    assert code == 3
    assert out.startswith("Until it ended at ")
    assert ": rank 1 holds up 1 rank for 4 min: it runs in loop, train.py:7\n" in out
    assert "Stack of rank 1 (culprit), main thread:\n    loop (train.py:7)\n" in out
    assert "a scheduler or a user ended it" in out
    code, out, _ = ctl("diagnose", "--job", "slow")
    assert (code, "rank 1 is slow" in out) == (3, True)
    # AND the kernel is named where it ended the job
    code, out, _ = ctl("diagnose", "--job", "oom", "-f", "json")
    assert (code, json.loads(out)["verdict"]) == (3, "rank_died")
    assert ctl("diagnose", "--job", "nobody")[0] == 1


def test_what_cannot_be_read_of_an_ended_job_is_not_healthy(
    ctl: Run, job: tuple[FakeNode, FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    job[0].insert("process.events", [event("well", rank=0, code=0)])
    rows = FakeNode._rows

    def late(node: FakeNode, sql: str) -> Any:
        if "arg_max(sentence" in sql:
            raise QueryTimeout("the query did not end in time")
        return rows(node, sql)

    monkeypatch.setattr(FakeNode, "_rows", late)
    code, out, _ = ctl("diagnose", "--job", "well")
    assert code == 4
    assert "cannot tell whether something is wrong, since not all of it could be read; it ended at" in out
    assert "  - whether a finding is open: the query did not end in time\n" in out


def stored(job: str, **more: Any) -> dict[str, Any]:
    """A row of diagnosis.findings that was open when the job ended, an hour ago."""
    end = time.time_ns() - 3600 * SECOND
    frames = [{"func": "loop", "file": "train.py", "lineno": 7, "frame_type": "Python"}]
    where = {"node": "alpha", "rank": 1, "pid": 1001, "tid": 1001, "thread": "python"}
    stack = {"role": "culprit", "state": "R", "gil": True, "since": None, "moving": False, "native_missing": None}
    return {
        "node": "alpha",
        "ts": end + SECOND,
        "job": job,
        "run": "r",
        "finding_id": f"{job}-id",
        "verdict": "not_joined",
        "severity": "error",
        "state": "closed",
        "confidence": 0.75,
        "sentence": "rank 1 holds up 1 rank for 11 s: it runs in loop, train.py:7",
        "ranks": "1",
        "nodes": "alpha",
        "victims": "0",
        "about": "pg 7 all_reduce",
        "culprits": json.dumps([{"rank": 1, "node": "alpha", "pid": 1001, "why": "it runs", "activity": "python"}]),
        "evidence": json.dumps(["rank 0 waits in all_reduce"]),
        "missing": "[]",
        "refuted_by": "[]",
        "next_steps": "[]",
        "stacks": json.dumps([{**where, **stack, "frames": frames}]),
        "since": end - 240 * SECOND,
        "opened": end - 229 * SECOND,
        "closed": end + SECOND,
        "found_by": "alpha",
        **more,
    }


def event(job: str, *, code: int | None = None, **more: Any) -> dict[str, Any]:
    """A row of process.events: the exit of a trainer, an hour ago."""
    now = time.time_ns() - 3600 * SECOND
    row = {"node": "alpha", "ts": now, "job": job, "run": "r", "pid": 1, "event": "exit", "role": "trainer"}
    return {**row, "start_ns": 5, "exit_code": code, **more}


def test_no_job(ctl: Run, pair: tuple[FakeNode, FakeNode]) -> None:
    code, out, err = ctl("diagnose")
    assert (code, out[:26], err) == (0, "(no training job found; `p", "")
    assert json.loads(ctl("diagnose", "-f", "json")[1]) == {}
    code, _, err = ctl("diagnose", "--job", "nobody")
    assert (code, err.splitlines()[0]) == (1, "error: there is no job nobody")


class Terminal:
    """A command on a terminal of 24 lines with 80 columns."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self._seen = ""

    def until(self, text: str) -> str:
        """Returns the output up to the end of ``text``."""
        deadline = time.monotonic() + _SECONDS
        while text not in self._seen:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._ours], [], [], left)[0], f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._ours, 65536).decode()
        before, self._seen = self._seen.split(text, 1)
        return before + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def watched(job: tuple[FakeNode, FakeNode]) -> Iterator[Terminal]:
    """``diagnose --watch`` of a job that hangs, all of whose ranks are on the first node."""
    job[0].facts = {"j1": [to_json(hung("alpha", 0, 1, 2, 3))]}
    with contextlib.closing(Terminal("diagnose", "--watch", "--job", "j1")) as terminal:
        yield terminal


def test_watch_shows_each_answer_until_it_is_interrupted(job: tuple[FakeNode, FakeNode], watched: Terminal) -> None:
    assert "\x1b[?1049h" in watched.until("Rank 2 (node alpha, pid 4002) holds up 3 ranks for 35 s: ")
    # THEN the screen has room for what to do, and leaves the stacks out
    page = watched.until("Do next:")
    assert "Evidence:" in page
    assert "Stack of" not in page
    job[0].facts = {"j1": [to_json(healthy("alpha", "j1"))]}
    watched.until("job j1: nothing is wrong: 1 rank, last operation 190 ms ago")
    # AND a node that is gone is an error on the screen, and is asked again
    job[0].stop()
    watched.until("error: ")
    watched.until("error: ")
    watched.process.send_signal(signal.SIGINT)
    watched.until("\x1b[?1049l")
    assert watched.process.wait(_SECONDS) == 0


def test_watch_in_a_pipe_writes_an_object_each_time(job: tuple[FakeNode, FakeNode]) -> None:
    words = [sys.executable, "-c", _PROGRAM, "diagnose", "--watch", "--job", "j2", "-f", "jsonl"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert [json.loads(watch.stdout.readline())["verdict"] for _ in range(2)] == ["healthy"] * 2
        watch.send_signal(signal.SIGINT)
        assert watch.wait(_SECONDS) == 0


def test_a_diagnosis_as_a_file_of_html(ctl: Run, job: tuple[FakeNode, FakeNode], tmp_path: Path) -> None:
    target = tmp_path / "finding.html"
    code, out, err = ctl("diagnose", "--all-nodes", "--job", "j1", "-o", str(target))
    assert (code, out, err) == (3, "", "")
    page = target.read_text()
    assert page.startswith("<!doctype html>")
    assert "Rank 2 " in page
    assert "read_batch (train.py:31)" in page
    assert "they part here" in page
    # -f counts more than the name.
    assert ctl("diagnose", "--job", "j2", "-f", "json", "-o", str(target))[0] == 0
    assert json.loads(target.read_text())["job"] == "j2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--history", "-o", "x.html"), "--history writes no page"),
        (("--watch", "-o", "x.html"), "--watch writes no page"),
        (("-o", "x.pdf"), "unknown suffix .pdf"),
    ],
)
def test_what_has_no_page_is_refused(ctl: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = ctl("diagnose", *arguments)
    assert code == 2
    assert message in err
