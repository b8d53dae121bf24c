"""The gloo collectives of real jobs: what the daemon's side says equals what the job itself wrote down."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collectives_support import Job, Known, Watcher, both_ways, torch_library
from long import long, long_unless
from waiting import until

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.nccl_uprobes.operations.source import OBJECTS

ROUND = {"all_reduce": 23, "broadcast": 7, "barrier": 5}
Open = Callable[..., Session]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


@pytest.fixture
def job(jobs: list[Job], tmp_path: Path) -> Job:
    jobs.append(Job(tmp_path))
    return jobs[0]


@pytest.fixture
def watch(open_session: Open, jobs: list[Job]) -> Callable[[], Watcher]:
    return lambda: Watcher(open_session(*OBJECTS), Known(jobs))


KEY = ("rank", "comm", "seq", "op", "bytes", "dtype")


def keys(rows: list[dict[str, Any]], *more: str) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row[name] for name in (*KEY, *more)) for row in rows)


def check_times(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["state"] == "done"
        assert row["timing_source"] == "exact"
        assert 0 <= row["start_ns_after"] <= row["done_hi_ns"]
        assert row["done_lo_ns"] is None


@both_ways
def test_attached_before_the_job_makes_calls(watch: Callable[[], Watcher], job: Job) -> None:
    job.hear("ready")
    watcher = watch()
    watcher.attach(torch_library())
    job.do("rounds 2")
    rows = watcher.rows()
    assert keys(rows, "async_op", "tid") == keys(job.calls(), "async_op", "tid")
    for comm in ("0", "1"):
        for rank in range(2):
            ops = Counter(row["op"] for row in rows if (row["comm"], row["rank"]) == (comm, rank))
            assert ops == {op: 2 * count for op, count in ROUND.items()}
    check_times(rows)
    assert {(row["comm_rank"], row["comm_size"]) for row in rows} == {(0, 2), (1, 2)}
    assert {row["redop"] for row in rows} == {None, "sum"}
    assert {row["root"] for row in rows if row["op"] == "broadcast"} == {0, 1}
    found = {(row["comm"], row["name"], row["rank"], row["size"]) for row in watcher.communicators}
    assert found == {("0", "default_pg", 0, 2), ("0", "default_pg", 1, 2), ("1", None, 0, 2), ("1", None, 1, 2)}
    assert watcher.session.counters()["collectives"]["lost"] == 0
    assert watcher.inflight() == []


def check_from(watcher: Watcher, job: Job, before: int, ready: int) -> None:
    """Exactly the calls since ``ready``; of those made while the probes were being placed, some."""
    rows = watcher.rows()
    offset = SystemClock().pair().mono_to_utc_ns
    written, possible = keys(job.calls(ready)), keys(job.calls(before - 1_000_000_000))
    found = keys(rows)
    assert not written - found
    assert not found - possible
    # The clocks are read apart from each other; what was called a second before is not claimed.
    assert all(row["ts"] - offset > before - 1_000_000_000 for row in rows)
    check_times(rows)


def test_attached_in_the_middle_of_the_job(watch: Callable[[], Watcher], job: Job) -> None:
    job.hear("ready")
    job.tell("stream")
    until(lambda: len(job.calls()) > 500)
    watcher = watch()
    before, ready = watcher.attach(torch_library())
    until(lambda: len(job.calls(ready)) > 500)
    job.do("rounds 1")
    job.hear("done")
    check_from(watcher, job, before, ready)


@long
def test_attached_while_the_job_starts(watch: Callable[[], Watcher], job: Job) -> None:
    library = torch_library()
    mapped = os.fsencode(library)
    until(lambda: all(mapped in Path(f"/proc/{rank.pid}/maps").read_bytes() for rank in job.ranks))
    watcher = watch()
    watcher.attach(library)
    job.hear("ready")
    job.do("rounds 1")
    assert keys(watcher.rows()) == keys(job.calls())


@long
def test_a_copy_of_torch_never_seen_before(watch: Callable[[], Watcher], jobs: list[Job], tmp_path: Path) -> None:
    """Its own files all through: a probe belongs to an inode."""
    original = torch_library().parents[1]
    copy = tmp_path / "elsewhere" / "torch"
    shutil.copytree(original, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "test", "*.a"))
    jobs.append(Job(tmp_path, PYTHONPATH=str(copy.parent)))
    job = jobs[0]
    job.hear("ready")
    for rank in job.ranks:
        assert os.fsencode(copy / "lib" / "libtorch_cpu.so") in Path(f"/proc/{rank.pid}/maps").read_bytes()
    watcher = watch()
    watcher.attach(torch_library())
    watcher.attach(copy / "lib" / "libtorch_cpu.so")
    job.do("rounds 1")
    assert keys(watcher.rows()) == keys(job.calls())
    shutil.rmtree(copy.parent)


def test_a_stalled_operation_is_in_flight_and_its_end_is_reported_once(watch: Callable[[], Watcher], job: Job) -> None:
    job.hear("ready")
    watcher = watch()
    watcher.attach(torch_library())
    job.do("rounds 1")
    job.do("stall")
    (stalled,) = watcher.wait_for_open(1)
    assert (stalled["rank"], stalled["comm"], stalled["op"], stalled["seq"]) == (0, "0", "all_reduce", 36)
    assert stalled["age_ns"] >= 0
    until(lambda: watcher.inflight()[0]["state"] == "started")
    job.ranks[0].kill()
    job.ranks[0].wait()
    assert watcher.source.close_process(job.ranks[0].pid, stalled["start_ns"]) == 1
    assert watcher.source.close_process(job.ranks[0].pid, stalled["start_ns"]) == 0
    assert watcher.inflight() == []
    rows = watcher.rows()
    assert keys(rows) == keys(job.calls())
    (last,) = [row for row in rows if row["state"] == "abandoned"]
    assert (last["seq"], last["done_hi_ns"], last["done_hi"], last["timing_source"]) == (36, None, None, None)
    assert last["start_ns_after"] >= 0


def test_what_ends_while_paused_is_closed_as_unseen(watch: Callable[[], Watcher], job: Job) -> None:
    job.hear("ready")
    watcher = watch()
    watcher.attach(torch_library())
    job.do("stall")
    watcher.wait_for_open(1)
    watcher.session.pause(True)
    job.do("answer")
    job.do("rounds 1")
    watcher.session.pause(False)
    # Other jobs of this machine may be open, too.
    assert watcher.source.ends_missed(SystemClock().pair().mono_ns) >= 1
    (row,) = watcher.rows()
    assert (row["rank"], row["seq"], row["state"], row["done_hi_ns"]) == (0, 1, "abandoned", None)
    job.do("rounds 1")
    rows = watcher.rows()[1:]
    assert Counter(row["op"] for row in rows) == {op: 4 * count for op, count in ROUND.items()}
    assert {row["seq"] for row in rows if row["comm"] == "0"} == set(range(37, 72))
    check_times(rows)


def test_a_peer_that_dies_fails_the_operation(watch: Callable[[], Watcher], job: Job) -> None:
    job.hear("ready")
    watcher = watch()
    watcher.attach(torch_library())
    job.do("rounds 1")
    job.do("stall")
    watcher.wait_for_open(1)
    job.ranks[1].send_signal(signal.SIGKILL)
    until(lambda: not watcher.inflight())
    (failed,) = [row for row in watcher.rows() if row["state"] == "failed"]
    assert (failed["rank"], failed["seq"], failed["op"]) == (0, 36, "all_reduce")
    assert "Connection closed by peer" in failed["error"] or "reset" in failed["error"]
    assert failed["done_hi_ns"] >= failed["start_ns_after"]


@pytest.fixture
def waits(jobs: list[Job], tmp_path: Path) -> Job:
    jobs.append(Job(tmp_path, "gloo_waits.py"))
    jobs[0].hear("ready")
    return jobs[0]


@pytest.mark.parametrize(
    ("what", "op", "peer"),
    [("recv", "recv", 1), long_unless(False, "any", "recv", None), long_unless(False, "barrier", "barrier", None)],
)
def test_an_operation_that_times_out_has_failed(
    watch: Callable[[], Watcher], waits: Job, what: str, op: str, peer: int | None
) -> None:
    watcher = watch()
    watcher.attach(torch_library())
    waits.tell(f"{what} short")
    (open_one,) = watcher.wait_for_open(1)
    assert (open_one["op"], open_one["comm_name"], open_one["peer"]) == (op, "impatient", peer)
    waits.hear("done")
    (row,) = watcher.rows()
    assert (row["rank"], row["op"], row["state"], row["comm_name"]) == (0, op, "failed", "impatient")
    assert "timed out" in row["error"].lower()
    # A message's end is when somebody waited for it.
    after = row["done_hi_ns"] if what == "barrier" else int(row["done_hi"]) - int(row["ts"])
    assert after >= 1_900_000_000
    assert watcher.inflight() == []


def test_a_message_from_a_rank_that_dies_has_failed(watch: Callable[[], Watcher], waits: Job) -> None:
    watcher = watch()
    watcher.attach(torch_library())
    waits.tell("recv patient")
    watcher.wait_for_open(1)
    waits.ranks[1].kill()
    until(lambda: not watcher.inflight())
    (row,) = watcher.rows()
    assert (row["op"], row["peer"], row["state"], row["comm_name"]) == ("recv", 1, "failed", "patient")
    assert row["error"]


def test_a_rank_that_receives_very_many_messages_leaves_room_to_others(
    watch: Callable[[], Watcher], waits: Job
) -> None:
    watcher = watch()
    watcher.attach(torch_library())
    waits.do("many patient")
    assert len(watcher.inflight()) == 4096
    assert list(watcher.session.refusals().values()) == [5000 - 4096]
    waits.do("send patient")
    rows = watcher.rows()
    assert Counter((row["rank"], row["op"], row["state"]) for row in rows) == {
        (0, "recv", "done"): 4096,
        (1, "send", "done"): 5000,
    }
    assert watcher.inflight() == []


GROUPS_IN_TURN = """
import json, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(5)
print("ready", flush=True)
sys.stdin.readline()
for number in range(23):
    # Some lie in the string itself, some do not.
    description = f"{number}" if number % 3 else f"the group with the number {number}"
    group = dist.new_group([0], group_desc=description)
    for _ in range(1 + number % 2):
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor)
    print(json.dumps([group.group_name, description, 1 + number % 2]), flush=True)
    dist.destroy_process_group(group)
    del group
print("null", flush=True)
"""


class Alone:
    """A job of one process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rank_of(self, pid: int) -> int | None:
        return 0 if pid == self._process.pid else None


def test_a_group_made_where_another_was_has_its_own_name(open_session: Open) -> None:
    command = [sys.executable, "-c", GROUPS_IN_TURN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            assert process.stdout.readline() == "ready\n"
            watcher = Watcher(open_session(*OBJECTS), Known([Alone(process)]))  # type: ignore[list-item]
            watcher.attach(torch_library())
            process.stdin.write("\n")
            process.stdin.flush()
            groups = list(iter(lambda: json.loads(process.stdout.readline()), None))  # type: ignore[union-attr]
        finally:
            process.kill()
    calls = Counter({(name, description): count for name, description, count in groups})
    calls["0", "default_pg"] = sum(calls.values())
    rows = [row for row in watcher.rows() if row["op"] == "all_reduce"]
    assert Counter((row["comm"], row["comm_name"]) for row in rows) == calls


LOADER = """
import os, sys, time
from pathlib import Path
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.operations.source import OBJECTS, CollectivesSource

class Nobody:
    def identity(self, pid, start_ns):
        return None

library, root, fallback = sys.argv[1:]
session = Session.open("test", OBJECTS, Path(root), fallback == "True")
source = CollectivesSource(session, Nobody(), "node", find_symbols)
source.start()
source.attach(os.open(library, os.O_RDONLY), os.fsencode(library))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_daemon_killed_with_operations_in_flight_loses_none(
    watch: Callable[[], Watcher], job: Job, pin_root: Path, fallback: bool
) -> None:
    command = [sys.executable, "-c", LOADER, str(torch_library()), str(pin_root), str(fallback)]
    job.hear("ready")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loader:
        assert loader.stdout
        assert loader.stdout.readline() == "ready\n"
        job.tell("stream")
        until(lambda: len(job.calls()) > 500)
        loader.kill()
    made = len(job.calls())
    until(lambda: len(job.calls()) > made + 500)
    watcher = watch()
    assert watcher.session.adopted
    watcher.attach(torch_library())
    job.do("rounds 1")
    job.hear("done")
    rows = watcher.rows()
    assert keys(rows) == keys(job.calls())
    check_times(rows)


def test_every_operation_of_the_backend(watch: Callable[[], Watcher], jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(Job(tmp_path, "all_operations.py"))
    job = jobs[0]
    job.hear("ready")
    watcher = watch()
    watcher.attach(torch_library())
    job.do("go")
    rows = watcher.rows()
    more = ("count", "root", "peer", "redop")
    assert keys(rows, *more) == keys(job.calls(), *more)
    assert {row["timing_source"] for row in rows if row["op"] in ("send", "recv")} == {"sync"}
    assert {row["state"] for row in rows} == {"done"}
