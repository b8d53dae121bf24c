"""The source of rows that jobs write: their tables, spans, metrics and steps; what it refuses, loses and resumes."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import Processes, Sink
from waiting import until

import probing
from probing.api.errors import ConfigError, TargetTimeout
from probing.api.tables import TABLES
from probing.api.tables.user import MAX_COLUMNS, job_columns, job_table, user_table_from, user_table_to
from probing.daemon.clock import SystemClock
from probing.daemon.context import Context
from probing.daemon.ipc import Message
from probing.daemon.job_rows import source as job_rows
from probing.daemon.job_rows.memory import RowMemory
from probing.daemon.job_rows.source import JobRows
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.source import Identity
from probing.daemon.user_tables import MAX_OF_USER, UserTables
from probing.spans import _metrics, _trace

RANK = Identity(4711, 10_000_000, "4711", "r1", "trainer", 3, 1, 8, owner=1000)


class Readers:
    """Gives the descriptors of this process, as a reader does."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    def call_each(self, op: str, asks: Mapping[Any, Any], *, timeout: float, patience: float) -> Iterator[Any]:
        assert op == "memory_files"
        for key, ask in asks.items():
            self.asked += 1
            if self.error is not None:
                yield key, self.error
                continue
            known = ask()["known"]
            rings = [table._ring for table in (*probing.ExternalTable._tables.values(), _trace, _metrics)]
            fds = {os.fstat(ring.fd).st_ino: ring.fd for ring in rings if ring is not None}
            new = {inode: os.dup(fd) for inode, fd in fds.items() if inode not in known}
            closed = [inode for inode in known if inode not in fds]
            yield key, Message({"inodes": list(new), "closed": closed}, fds=list(new.values()))


class Scene:
    def __init__(self, folder: Path, read: Mapping[str, int] | None = None) -> None:
        self.readers, self.sink, self.tables = Readers(), Sink(), UserTables(folder / "user_tables.json")
        self.source = JobRows(self.readers, self.tables, self.sink, SystemClock(), "n1", read or {})
        self.source.process_identified(RANK)

    def turn(self) -> None:
        """A turn that reads all that was written, new or not."""
        for process in self.source._processes.values():
            process.look_at_ns = 0
        self.source.turn()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(job_rows, "SETTLE_NS", 0)
    yield Scene(tmp_path)
    for name in list(probing.ExternalTable._tables):
        probing.ExternalTable.drop(name)
    type(_trace).forked()


def test_a_table_of_a_job_becomes_a_table(scene: Scene) -> None:
    table = probing.ExternalTable("losses", ["step", "loss", "where"])
    table.append([7, 0.5, "attention\x1b[31m"])
    table.append_ts(1_700_000_000_000_000, [None, None, None])
    scene.turn()
    first, second = scene.sink.of("python.losses")
    assert {k: first[k] for k in ("node", "job", "run", "pid", "start_ns", "rank")} == {
        "node": "n1",
        "job": "4711",
        "run": "r1",
        "pid": 4711,
        "start_ns": 10_000_000,
        "rank": 3,
    }
    assert [first[k] for k in ("step", "loss", "where")] == [7, 0.5, "attention\x1b[31m"]
    assert abs(first["timestamp"] * 1000 - first["ts"]) < 1_000_000
    assert [second[k] for k in ("step", "loss", "where", "timestamp")] == [None, None, None, 1_700_000_000_000_000]
    assert job_columns(scene.tables["python.losses"]) == {"step": ["i64"], "loss": ["f64"], "where": ["text"]}
    scene.turn()
    assert len(scene.sink.rows) == 2


def test_a_turn_reads_fewer_large_rows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_rows, "MAX_TURN_ROWS", 640)
    names = [f"text_{i}" for i in range(MAX_COLUMNS)]
    table = probing.ExternalTable("texts", names)
    for number in range(23):
        table.append([f"{number} {'x' * 200}"] * len(names))
    assert table._ring is not None
    a_turn = 640 // -(-RowMemory(table._ring.fd).row_bytes // job_rows.ROW_BYTES)
    assert a_turn < 11
    for turn in range(1, 4):
        scene.turn()
        rows = scene.sink.of("python.texts")
        assert [row["text_0"].split()[0] for row in rows] == [str(i) for i in range(min(turn * a_turn, 23))]


def test_a_table_that_is_dropped_takes_no_place_of_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_rows, "MAX_OF_PROCESS", 1)
    for number in range(4):
        table = probing.ExternalTable("losses", ["step"])
        table.append([number])
        scene.turn()
        # The last row comes after the last look.
        table.append([number + 100])
        probing.ExternalTable.drop("losses")
        scene.turn()
        scene.turn()
    assert [row["step"] for row in scene.sink.of("python.losses")] == [0, 100, 1, 101, 2, 102, 3, 103]
    assert scene.sink.losses == []
    (process,) = scene.source._processes.values()
    assert (process.memories, process.closed, scene.sink.read) == ({}, set(), {})


def test_a_column_that_changes_its_type_keeps_its_rows(scene: Scene) -> None:
    table = probing.ExternalTable("losses", ["loss"])
    table.append([1])
    scene.turn()
    table.append([0.5])
    scene.turn()
    rows = scene.sink.of("python.losses")
    assert [rows[0]["loss"], rows[1]["loss__f64"]] == [1, 0.5]
    defined = scene.tables["python.losses"]
    shown = next(column for column in defined.columns if column.name == "loss")
    assert (shown.type.sql, shown.sql) == ("DOUBLE", 'coalesce(CAST("loss" AS DOUBLE), CAST("loss__f64" AS DOUBLE))')
    assert user_table_from(user_table_to(defined)) == defined


def test_spans_events_and_metrics(scene: Scene) -> None:
    with probing.span("forward", tag=3) as outer:
        probing.event("batch", attributes=[{"loss": 0.5}])
        with probing.span("attention"):
            pass
    probing.metric("loss", 0.25, step=7)
    probing.metric("grad_norm", 1.5, step=7)
    scene.turn()
    rows = scene.sink.of("python.trace_event")
    assert [(row["record_type"], row["name"], row["phase"]) for row in rows] == [
        ("span_start", "forward", "forward"),
        ("event", "batch", "forward"),
        ("span_start", "attention", None),
        ("span_end", "attention", None),
        ("span_end", "forward", "forward"),
    ]
    assert [row["span_id"] == outer.span_id for row in rows] == [True, True, False, False, True]
    assert [row["parent_id"] for row in rows] == [None, None, outer.span_id, outer.span_id, None]
    assert {row["trace_id"] for row in rows} == {outer.trace_id}
    assert (rows[0]["attributes"], rows[1]["event_attributes"]) == ('{"tag": 3}', '[{"loss": 0.5}]')
    assert {row["thread_id"] for row in rows} == {threading.get_native_id()}
    assert all(abs(row["time"] - row["ts"]) < 10**9 and row["location"] is None for row in rows)
    metrics = [
        (row["step"], row["loss"], row["name"], row["value"]) for row in scene.sink.of("python.training_metrics")
    ]
    assert metrics == [(7, 0.25, "loss", 0.25), (7, None, "grad_norm", 1.5)]


def test_steps_of_a_job_are_steps(scene: Scene) -> None:
    out = Sink()
    steps = Steps("n1", Processes(RANK), out)
    for step in (7, 8, 11):
        probing.step(step)
    probing.metric("loss", 0.5)
    scene.turn()
    for batch in scene.sink.batches:
        steps.observe_metric(batch, SystemClock().pair())
    assert [(row["step"], row["source"], row["rank"]) for row in out.of("train.steps")] == [
        (7, "span", 3),
        (8, "span", 3),
    ]
    assert all(row["duration_ns"] > 0 and row["confidence"] == 1.0 for row in out.rows)


def test_what_was_read_before_is_not_read_again(scene: Scene, tmp_path: Path) -> None:
    table = probing.ExternalTable("losses", ["step"])
    for step in range(23):
        table.append([step])
    scene.turn()
    assert list(scene.sink.read.values()) == [24]
    for step in range(23, 28):
        table.append([step])
    again = Scene(tmp_path, dict(scene.sink.read))
    again.sink.read.update(scene.sink.read)
    again.turn()
    assert [row["step"] for row in again.sink.rows] == [23, 24, 25, 26, 27]
    # What is known of processes that ended meanwhile goes.
    again.source.started(lambda pid, start_ns: (pid, start_ns) != RANK.key)
    assert again.sink.read == {}


def test_the_last_rows_of_a_process_that_ended_are_read(scene: Scene) -> None:
    table = probing.ExternalTable("losses", ["step"])
    table.append([0])
    scene.turn()
    for step in range(1, 10_001):
        table.append([step])
    scene.source.process_exited(RANK)
    for _ in range(4):
        scene.turn()
    assert [row["step"] for row in scene.sink.rows] == list(range(10_001))
    assert scene.sink.read == {}
    assert scene.source._processes == {}


def test_lost_and_refused_rows_are_reported(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    table = probing.ExternalTable("losses", ["step"])
    table.append([0])
    scene.turn()
    for step in range(table._ring.count + 7):
        table.append([step])
    scene.turn()
    (loss,) = scene.sink.losses
    lost = table._ring.count + 7 - job_rows.MAX_ROWS
    assert (loss.table, loss.count, loss.pid) == ("python.losses", lost, RANK.pid)
    probing.ExternalTable("samples", ["step"]).append([0])
    scene.turn()
    assert scene.sink.losses[-1].reason == "python.samples is a table of the daemon"
    assert not scene.sink.of("python.samples")


def test_one_user_does_not_take_all_tables(tmp_path: Path) -> None:
    tables = UserTables(tmp_path / "user_tables.json")
    for number in range(MAX_OF_USER):
        tables.define_for_job(f"t{number}", {"a": "i64"}, 1000)
    with pytest.raises(ConfigError, match="too many"):
        tables.define_for_job("more", {"a": "i64"}, 1000)
    assert tables.define_for_job("more", {"a": "i64"}, 1001) == job_table("more", {"a": ["i64"]})
    assert set(UserTables(tmp_path / "user_tables.json")) == {
        *TABLES,
        *(f"python.t{n}" for n in range(32)),
        "python.more",
    }


def test_users_who_take_all_they_can_leave_others_a_table(tmp_path: Path) -> None:
    # GIVEN five users who make tables until they may make no more
    tables = UserTables(tmp_path / "user_tables.json")
    for owner, most in enumerate((MAX_OF_USER, MAX_OF_USER, MAX_OF_USER, 16, 8), 1000):
        for number in range(most):
            tables.define_for_job(f"t{owner}_{number}", {"a": "i64"}, owner)
        with pytest.raises(ConfigError, match="too many"):
            tables.define_for_job(f"t{owner}_{most}", {"a": "i64"}, owner)
    # THEN there is room for a sixth
    tables.define_for_job("more", {"a": "i64"}, 1005)
    # After a restart, tables without rows give their places back.
    again = UserTables(tmp_path / "user_tables.json")
    again.drop_empty(lambda: {"python.more", "python.t1000_7"})
    assert set(again) == {*TABLES, "python.more", "python.t1000_7"}
    again.drop_empty(lambda: ())
    assert set(again) == {*TABLES, "python.more", "python.t1000_7"}


def test_one_user_does_not_take_all_columns_of_a_table(tmp_path: Path) -> None:
    tables = UserTables(tmp_path / "user_tables.json")
    tables.define_for_job("losses", {f"a{number}": "i64" for number in range(64)}, 1000)
    with pytest.raises(ConfigError, match="fewer would be left for others"):
        tables.define_for_job("losses", {"b": "i64"}, 1000)
    table = tables.define_for_job("losses", {"a0": "f64", "loss": "f64"}, 1001)
    assert job_columns(table)["loss"] == ["f64"]
    # What is there already takes no room.
    assert tables.define_for_job("losses", {"loss": "f64"}, 1000) == table
    assert UserTables(tmp_path / "user_tables.json")["python.losses"] == table


def test_a_process_that_cannot_be_read_is_asked_less_and_less(scene: Scene) -> None:
    scene.readers.error = TargetTimeout("it does not answer")
    scene.turn()
    scene.source.turn()
    assert scene.readers.asked == 1
    scene.turn()
    assert scene.source._processes[RANK.key].pause_s == 4.0


def test_the_setting_switches_the_reading_off_for_a_job(scene: Scene) -> None:
    asked: list[tuple[str, Identity]] = []
    enabled = [False]

    def value(key: str, who: Identity) -> bool:
        asked.append((key, who))
        return enabled[0]

    context = SimpleNamespace(
        readers=scene.readers,
        find={UserTables: scene.tables}.__getitem__,
        sink=scene.sink,
        clock=SystemClock(),
        node="n1",
        rows_read={},
        settings=SimpleNamespace(value=value),
    )
    source = JobRows.make(cast(Context, context))
    source.process_identified(RANK)
    probing.ExternalTable("losses", ["step"]).append([0])
    source.turn()
    assert (scene.sink.rows, scene.readers.asked) == ([], 0)
    assert asked == [("job_rows.enabled", RANK)]
    enabled[0] = True
    source.turn()
    assert [row["step"] for row in scene.sink.rows] == [0]


def test_nothing_is_read_while_probes_are_paused(scene: Scene) -> None:
    probing.ExternalTable("losses", ["step"]).append([0])
    scene.source.pause(True)
    scene.turn()
    assert not scene.sink.rows
    scene.source.pause(False)
    scene.turn()
    assert len(scene.sink.rows) == 1


@pytest.mark.parametrize("step", [3.0, 2**63, "seven"])
def test_a_step_that_fits_no_row_does_not_end_the_training(scene: Scene, step: Any) -> None:
    probing.metric("loss", 0.25, step=step)
    assert _metrics.refused > 0
    probing.metric("loss", 0.5, step=8)
    # The number of the refused row stays free, for which a turn waits.
    scene.turn()
    scene.turn()
    rows = [(row["step"], row["value"]) for row in scene.sink.of("python.training_metrics")]
    assert rows[-1] == (8, 0.5)


def test_processes_of_the_users_are_read_in_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [RANK._replace(pid=pid, owner=owner) for pid, owner in ((4712, 1000), (4713, 1000), (5000, 1001))]
    for who in others:
        scene.source.process_identified(who)
    order: list[int] = []

    def call_each(_: str, asks: Mapping[Any, Any], **__: Any) -> Iterator[Any]:
        order.extend(pid for pid, _ in asks)
        return iter(())

    monkeypatch.setattr(scene.readers, "call_each", call_each)
    scene.turn()
    assert order == [4711, 5000, 4712, 4713]


def descriptors_of(inodes: set[int]) -> int:
    """The number of descriptors of this process for files with ``inodes``."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += path.stat().st_ino in inodes
    return count


@pytest.mark.parametrize("where", ["message", "process"])
def test_a_table_that_cannot_be_opened_costs_no_descriptor_and_no_rows_of_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # GIVEN two tables of a process, and a process of another user whose memory cannot be opened
    hostile = RANK._replace(pid=4712, owner=1001)
    scene.source.process_identified(hostile)
    tables = [probing.ExternalTable(name, ["step"]) for name in ("losses", "norms")]
    for table in tables:
        table.append([7])
    inodes = {os.fstat(table._ring.fd).st_ino for table in tables}
    opened, call_each, failing = RowMemory, scene.readers.call_each, [True]

    def open_memory(fd: int, position: int | None) -> RowMemory:
        if where == "process" and failing and failing.pop():
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(fd, position)

    def answers(*args: Any, **options: Any) -> Iterator[Any]:
        for key, answer in call_each(*args, **options):
            if where == "message" and failing and failing.pop():
                os.close(answer.fds.pop())
            yield key, answer

    monkeypatch.setattr(job_rows, "RowMemory", open_memory)
    monkeypatch.setattr(scene.readers, "call_each", answers)
    before = descriptors_of(inodes)
    # WHEN they are read
    scene.turn()
    # THEN the tables of the other process are, and each descriptor that is left is of a table that is read
    pids = [row["pid"] for row in scene.sink.rows]
    assert pids.count(4712) == 2
    assert descriptors_of(inodes) == before + len(pids)
    # AND the tables are read once that is possible
    scene.turn()
    assert sorted(row["pid"] for row in scene.sink.rows) == [4711, 4711, 4712, 4712]


def test_the_last_turn_reads_no_row_that_an_earlier_turn_still_reads(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a turn that waits for a reader, at the end of the collector
    probing.ExternalTable("losses", ["step"]).append([7])
    last, call_each = threading.Thread(target=scene.source.finish), scene.readers.call_each
    searching: list[int | None] = []

    def waits_for_its_turn() -> bool:
        frame = sys._current_frames().get(last.ident or 0)
        return frame is not None and frame.f_code.co_name == "turn"

    def late(*args: Any, **options: Any) -> Iterator[Any]:
        searching.append(threading.current_thread().ident)
        answers = list(call_each(*args, **options))
        if len(searching) == 1:
            last.start()
            until(lambda: len(searching) == 2 or waits_for_its_turn(), what="the last turn")
        yield from answers

    monkeypatch.setattr(scene.readers, "call_each", late)
    # WHEN the reader answers
    scene.turn()
    last.join()
    # THEN each row came once
    assert [row["step"] for row in scene.sink.of("python.losses")] == [7]


@pytest.mark.parametrize("ends", ["process", "table"])
def test_the_last_rows_after_a_row_that_was_never_written_are_read(scene: Scene, ends: str) -> None:
    table = probing.ExternalTable("losses", ["step"])
    table.append([0])
    scene.turn()
    # GIVEN a row that is refused, or whose thread was killed, and rows after it
    assert table._ring is not None
    assert next(table._ring.numbers) == 2
    table.append([2])
    table.append([3])
    # WHEN the process exits, or drops the table
    if ends == "process":
        scene.source.process_exited(RANK)
    else:
        probing.ExternalTable.drop("losses")
    for _ in range(3):
        scene.turn()
    # THEN the rows are stored, and the missing row is counted
    assert [row["step"] for row in scene.sink.rows] == [0, 2, 3]
    assert [(loss.table, loss.count) for loss in scene.sink.losses] == [("python.losses", 1)]
    assert scene.sink.read == {}
