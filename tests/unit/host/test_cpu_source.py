"""The source of cpu.utilization: differences, who is read, and what the rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import Processes, Readers, Sink

from probing.api.errors import TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.host.cpu import reading
from probing.daemon.host.cpu import source as cpu_source
from probing.daemon.host.cpu.reading import PROCESS, THREAD, UsageReader
from probing.daemon.host.cpu.selection import (
    LEAST_GLANCES,
    MAX_ACTIVE,
    MAX_BUSY,
    MAX_OTHERS,
    MAX_WATCHED,
    MAX_WITH_THREADS,
    Selection,
)
from probing.daemon.host.cpu.source import CpuSource, Tasks
from probing.daemon.host.cpu.usage import ROW, Ledger, differences
from probing.daemon.ipc import Message
from probing.daemon.source import Identity
from probing.daemon.source_state import Totals
from tests.host_support import FakeProc, group_tree

START = 100 * 10_000_000
SECOND = 1_000_000_000


def trainer(pid: int = 11, role: str = "trainer") -> Identity:
    return Identity(pid, START, "j", "r", role, 3 if role == "trainer" else None)


class Watch:
    """A source over a tree of files, on a clock that the test moves."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *who: Identity) -> None:
        self.proc = FakeProc(root / "proc")
        self.rows = Sink()
        self.now = SECOND
        monkeypatch.setattr(reading.time, "monotonic_ns", lambda: self.now)
        self.known = Processes(*who)
        self.readers = Readers(usage=UsageReader(str(self.proc)).answer)
        self.source = CpuSource(self.readers, self.known, self.rows, FakeClock(real_ns=5_000), "n1", 1.0)

    def tick(self, seconds: int = 1) -> list[dict[str, Any]]:
        self.source.tick()
        self.now += seconds * SECOND
        return self.rows.take("cpu.utilization")


def test_rows_of_a_trainer_and_its_busy_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch, trainer())
    watch.proc.process(11, threads=3, user=100, sys=10, voluntary=5)
    for tid, spent in ((11, 1), (12, 2), (13, 3)):
        watch.proc.thread(11, tid, exec_ns=spent)
    assert watch.tick() == []
    watch.tick()
    watch.proc.process(11, threads=3, user=153, sys=17, voluntary=12, involuntary=3, major=2, rss=5)
    watch.proc.thread(11, 11, exec_ns=1 + 310_000_007, delay_ns=23_000_000, user=31)
    watch.proc.thread(11, 12, name=b"busy", exec_ns=2 + 190_000_000, delay_ns=71_000_000)
    rows = watch.tick()
    assert [(row["scope"], row["tid"]) for row in rows] == [("process", None), ("thread", 11)]
    process, main = rows
    assert (process["job"], process["run"], process["rank"], process["role"]) == ("j", "r", 3, "trainer")
    assert (process["wall_ns"], process["delta_user_ns"], process["delta_sys_ns"]) == (SECOND, 530_000_000, 70_000_000)
    assert (process["delta_total_ns"], process["run_delay_ns"]) == (600_000_000, 94_000_000)
    assert (process["delta_vol_ctxt"], process["delta_invol_ctxt"], process["major_faults"]) == (7, 3, 2)
    assert (process["state"], process["wchan"], process["thread_count"]) == ("sleeping", "do_wait", 3)
    assert (main["delta_total_ns"], main["run_delay_ns"], main["comm"]) == (310_000_007, 23_000_000, "python")
    watch.proc.thread(11, 12, name=b"busy", exec_ns=2 + 380_000_000, delay_ns=71_000_000, user=38)
    rows = watch.tick()
    assert [(row["scope"], row["tid"], row["comm"]) for row in rows] == [
        ("process", None, "python"),
        ("thread", 12, "busy"),
    ]
    assert (rows[1]["delta_total_ns"], rows[1]["delta_user_ns"]) == (190_000_000, None)


def test_a_group_with_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"cpu.max": "150000 100000\n", "cpu.stat": "nr_throttled 3\nthrottled_usec 17\n"}
    mountinfo, member = group_tree(tmp_path / "cgroup", 2, files)
    watch = Watch(tmp_path, monkeypatch, trainer())
    (watch.proc.root / "self" / "mountinfo").write_text(mountinfo)
    watch.proc.process(11, user=1, cgroup=member)
    watch.tick()
    watch.proc.process(11, user=90, cgroup=member)
    assert [row["cpu_quota"] for row in watch.tick() if row["scope"] == "process"] == [1.5]


def test_a_blocked_thread_has_a_row_though_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch, trainer())
    watch.proc.process(11, state="D", wchan="nfs_wait_on_request")
    watch.proc.thread(11, 11, state="D", wchan="nfs_wait_on_request")
    watch.tick()
    rows = watch.tick()
    assert [(row["scope"], row["state"], row["wchan"], row["delta_total_ns"]) for row in rows] == [
        ("process", "blocked", "nfs_wait_on_request", 0),
        ("thread", "blocked", "nfs_wait_on_request", 0),
    ]


def test_the_busiest_others_are_known_and_no_idle_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch, trainer())
    for turn in range(8):
        watch.proc.process(11, user=2 * turn)
        for pid in range(20, 60):
            spent = turn * pid if pid >= 40 else 0
            watch.proc.process(pid, name=b"hog", user=spent, flags=0x200000 if pid == 59 else 0)
        rows = [row for row in watch.tick() if row["pid"] != 11]
    assert sorted(row["pid"] for row in rows) == list(range(60 - MAX_OTHERS, 60))
    assert {(row["job"], row["rank"], row["cpu_list"], row["scope"]) for row in rows} == {(None, None, None, "process")}
    assert {row["pid"]: row["role"] for row in rows}[59] == "kernel"
    assert {row["role"] for row in rows if row["pid"] != 59} == {"other"}


def test_a_process_that_ends_and_comes_again_gives_no_rate_of_two_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, monkeypatch, trainer())
    watch.proc.process(11, user=5)
    watch.tick()
    watch.proc.ends(11)
    watch.proc.process(11, user=500, start=101)
    watch.known.who = [Identity(11, START + 10_000_000, "j", "r2", "trainer", 3)]
    assert watch.tick() == []
    assert [row["delta_user_ns"] for row in watch.tick()] == [0]


def test_counters_that_go_back_are_null_and_never_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch, trainer())
    watch.proc.process(11, user=500, sys=1, voluntary=9)
    watch.tick()
    watch.proc.process(11, user=400, sys=2, voluntary=3)
    row = watch.tick()[0]
    assert (row["delta_user_ns"], row["delta_total_ns"], row["delta_vol_ctxt"]) == (None, None, None)
    assert row["delta_sys_ns"] == 10_000_000


def test_a_reader_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch, trainer())
    watch.proc.process(11)
    watch.readers.failure = TargetTimeout("no reader was free in time")
    assert watch.tick() == []
    totals = Totals("running", {}, {})
    assert watch.source.states(totals)[0].reason == "no reader was free in time"
    every = watch.source.tick_s
    assert every is not None
    assert every() == 2.0
    for _ in range(9):
        watch.tick()
    assert every() == 64.0
    watch.readers.failure = None
    watch.tick()
    assert watch.source.states(totals)[0].reason == ""
    assert every() == 1.0


def test_nothing_is_read_where_nothing_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch)
    assert watch.tick() == []
    assert watch.readers.asked == []


def test_4096_watched_processes_are_bounded_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, monkeypatch, *(trainer(pid, "data_loader") for pid in range(1, 4_097)))
    watch.tick()
    assert len(watch.readers.asked[0][1]["targets"]) == MAX_WATCHED
    assert watch.source.states(Totals("running", {}, {}))[0].reason.startswith("3072 processes are not read")
    every = watch.source.tick_s
    assert every is not None
    assert every() == 16.0


def test_all_processes_get_a_glance_in_turn() -> None:
    selection = Selection()
    selection.request([trainer()])
    pids = list(range(1, 3 * LEAST_GLANCES))
    selection.listed(pids, {})
    seen = [pid for _ in range(3) for pid in selection.request([trainer()])["glances"]]
    assert seen == [pid for pid in pids if pid != 11]
    assert selection.request([trainer()])["glances"][0] == 1


def test_4096_processes_get_a_glance_in_half_a_minute() -> None:
    selection = Selection()
    selection.request([trainer()])
    selection.listed(range(100, 4_196), {})
    seen = [pid for _ in range(32) for pid in selection.request([trainer()])["glances"]]
    assert sorted(seen) == list(range(100, 4_196))


def test_active_threads_are_read_each_turn_and_idle_ones_in_turn() -> None:
    selection = Selection()
    selection.request([trainer()])
    tids = list(range(11, 11 + 200))
    selection.listed([], {"11": tids})
    wanted = {tid: 1.0 / tid for tid in range(20, 30)} | dict.fromkeys(range(30, 90), 0.002)
    selection.busiest({(11, START): wanted}, {(11, START): 0.5})
    seen: set[int] = set()
    for _ in range(6):
        ((*_, busy, rest),) = selection.request([trainer()])["targets"]
        assert busy == [11, 20, 21, 22, 23]
        assert rest[:MAX_ACTIVE] == list(range(24, 24 + MAX_ACTIVE))
        assert len(rest) == 2 * MAX_ACTIVE
        seen |= {*busy, *rest}
    assert len(busy) == MAX_BUSY + 1
    assert seen == set(tids)


def test_a_process_that_uses_next_to_no_cpu_is_read_ever_more_rarely_until_it_does() -> None:
    selection, read = Selection(), []
    for turn in range(1, 33):
        if selection.request([trainer()]):
            read.append(turn)
            selection.busiest({(11, START): {12: 0.009}}, {(11, START): 0.0199})
    assert read == [1, 2, 3, 4, 6, 8, 16, 24, 32]
    # WHEN a thread of it waits for a CPU
    selection.busiest({(11, START): {12: 0.01}}, {(11, START): 0.0})
    # THEN it is read each turn
    assert selection.request([trainer()])


def test_of_very_many_trainers_only_some_have_their_threads_read() -> None:
    selection = Selection()
    targets = selection.request([trainer(pid) for pid in range(1, 1_025)])["targets"]
    assert [bool(listed) for _, _, _, listed, _, _ in targets] == [True] * MAX_WITH_THREADS + [False] * 768
    assert len(json.dumps(targets)) < 1 << 20


def test_a_ledger_keeps_lives_apart_and_forgets() -> None:
    ledger = Ledger(most=3)

    def row(pid: int, start_ns: int, user_ns: int, mono_ns: int) -> Any:
        rows = np.zeros(1, ROW)
        rows["pid"], rows["start_ns"], rows["user_ns"], rows["mono_ns"] = pid, start_ns, user_ns, mono_ns
        return rows

    assert differences(row(1, 7, 5, 1), ledger.exchange(row(1, 7, 5, 1)))["user_ns"].tolist() == [-1]
    assert differences(row(1, 7, 9, 2), ledger.exchange(row(1, 7, 9, 2)))["user_ns"].tolist() == [4]
    assert differences(row(1, 8, 12, 3), ledger.exchange(row(1, 8, 12, 3)))["user_ns"].tolist() == [-1]
    for pid in range(5):
        ledger.exchange(row(10 + pid, 1, 1, 4))
    assert len(ledger) == 3
    ledger.exchange(row(99, 1, 1, 3_600 * SECOND))
    assert len(ledger) == 1


def test_very_many_threads_keep_no_new_process_out_of_a_ledger() -> None:
    ledger = Ledger(most=16)

    def read(scope: int, pid: int, tids: range, mono_ns: int) -> Any:
        rows = np.zeros(len(tids), ROW)
        rows["scope"], rows["pid"], rows["start_ns"], rows["mono_ns"] = scope, pid, 7, mono_ns
        rows["tid"], rows["user_ns"] = list(tids), mono_ns
        return differences(rows, ledger.exchange(rows))["user_ns"].tolist()

    # GIVEN a process whose idle threads are read in turn, and a process that was there before
    assert read(PROCESS, 11, range(1), 1) == [-1]
    for turn in range(2, 12):
        read(THREAD, 12, range(8 * turn, 8 * turn + 8), turn)
    # THEN a new process and its thread have differences, and the earlier process still has
    assert (read(PROCESS, 13, range(1), 12), read(THREAD, 13, range(1), 12)) == ([-1], [-1])
    read(THREAD, 12, range(96, 104), 12)
    assert (read(PROCESS, 13, range(1), 13), read(THREAD, 13, range(1), 13)) == ([1], [1])
    assert read(PROCESS, 11, range(1), 13) == [12]
    assert len(ledger) <= 16


def test_a_process_with_very_many_threads_leaves_room_for_the_threads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_source, "MAX_THREADS", 10)
    threads = {"11": list(range(100)), "12": [1, 2, 3], "13": [4]}
    asked: list[Any] = []

    def answer(request: dict[str, Any]) -> Message:
        asked.append(request["targets"])
        return Message({"threads": threads, "texts": []})

    Tasks(Readers(usage=answer), Processes(*map(trainer, (11, 12, 13))), "n1", apart_s=0).batch(
        FakeClock(real_ns=5_000).pair()
    )
    assert {target[0]: len(target[4]) for target in asked[-1]} == {11: 6, 12: 3, 13: 1}


def test_tasks_are_all_threads_with_differences_of_two_looks(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.process(11, threads=2)
    proc.thread(11, 11, exec_ns=5)
    proc.thread(11, 12, name=b"loader\n\x1b", state="D", wchan="io_schedule", exec_ns=7, cpus="0-1")
    reader = UsageReader(str(proc))
    looks = []

    def answer(request: dict[str, Any]) -> Any:
        looks.append(request)
        found = reader.answer(request)
        proc.thread(11, 12, name=b"loader\n\x1b", state="D", wchan="io_schedule", exec_ns=7 + 13 * len(looks), user=1)
        return found

    tasks = Tasks(Readers(usage=answer), Processes(trainer(), trainer(77)), "n1", apart_s=0)
    rows = tasks.batch(FakeClock(real_ns=5_000).pair()).to_pylist()
    assert [(row["tid"], row["state"], row["rank"]) for row in rows] == [(11, "sleeping", 3), (12, "blocked", 3)]
    assert (rows[1]["wchan"], rows[1]["delta_total_ns"], rows[1]["platform"]) == ("io_schedule", 13, "linux")
    assert rows[1]["comm"] == "loader\\n\\x1b"
    assert len(looks) == 3
