"""Progress: counts, newest times, usual gaps, ends; by process and communicator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest
from operation_support import operations_of

from probing.api.tables import table_named
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair, FakeClock
from probing.daemon.labels.source import Label
from probing.daemon.nccl_uprobes import progress
from probing.daemon.nccl_uprobes.progress import JobProgress
from probing.daemon.source import Identity, Loss

SECOND = 1_000_000_000
# Monotonic time and UTC differ.
UTC = 1_000 * SECOND
PAIR = ClockPair(0, 0, UTC)
STARTED = 701 * SECOND


def identity(rank: int, role: str = "trainer") -> Identity:
    return Identity(100 + rank, 7, "j", "r", role, rank if role == "trainer" else None, rank, 2)


def op(rank: int, called: int, *, comm: str = "first", seq: int = 0, lasts: int = 5, name: str = "all_reduce") -> Any:
    return {
        "pid": 100 + rank,
        "start_ns": 7,
        "comm": comm,
        "comm_name": f"pg {comm}",
        "comm_rank": rank,
        "comm_size": 2,
        "ts": UTC + called,
        "seq": seq,
        "op": name,
        "done_hi_ns": lasts,
    }


class Scene:
    def __init__(self, ranks: Iterable[int] = (0, 1)) -> None:
        self.clock = FakeClock(mono_ns=0, real_ns=UTC)
        self.progress = JobProgress("n1", self.clock)
        for rank in ranks:
            self.progress.process_identified(identity(rank))

    def drain(self, *rows: Any) -> None:
        self.progress.observe(operations_of(rows, PAIR), PAIR)

    def rows(self) -> list[dict[str, Any]]:
        batch = self.progress.rows(self.clock.pair())
        assert batch.schema == table_named("comm.progress").logical
        times = [name for name in batch.schema.names if name != "ts" and pa.types.is_timestamp(batch[name].type)]
        found = batch.drop_columns(["ts", *times]).to_pylist()
        for name in times:
            for row, value in zip(found, batch[name].cast(pa.int64()).to_pylist(), strict=True):
                row[name] = None if value is None else value - UTC
        return found


def test_a_rank_without_operations_has_a_row() -> None:
    (row,) = Scene([1]).rows()
    assert (row["node"], row["job"], row["run"], row["pid"], row["rank"]) == ("n1", "j", "r", 101, 1)
    assert [row[name] for name in ("comm", "last_call", "last_done", "ended", "attached")] == [None] * 5
    assert row["calls"] == 0


def test_only_trainers_have_rows() -> None:
    scene = Scene([])
    scene.progress.process_identified(identity(0, "launcher"))
    assert scene.rows() == []


def test_each_communicator_of_each_rank_has_its_newest_operation() -> None:
    scene = Scene()
    scene.drain(
        op(0, 30, seq=3, name="barrier"), op(1, 11, seq=1), op(0, 10, seq=1, lasts=90), op(0, 20, comm="second", seq=7)
    )
    scene.drain(op(1, 41, seq=4, name="broadcast"))
    found = {(row["rank"], row["comm"]): row for row in scene.rows()}
    assert {key: (row["calls"], row["seq"], row["op"]) for key, row in found.items()} == {
        (0, "first"): (2, 3, "barrier"),
        (0, "second"): (1, 7, "all_reduce"),
        (1, "first"): (2, 4, "broadcast"),
    }
    assert {key: (row["last_call"], row["last_done"]) for key, row in found.items()} == {
        (0, "first"): (30, 100),
        (0, "second"): (20, 25),
        (1, "first"): (41, 46),
    }
    assert found[0, "second"]["comm_name"] == "pg second"
    assert found[0, "second"]["backend"] == "gloo"


def test_an_operation_that_ends_late_does_not_replace_a_newer_one() -> None:
    scene = Scene([0])
    scene.drain(op(0, 50, seq=5, name="barrier"))
    scene.drain(op(0, 10, seq=1, lasts=200))
    (row,) = scene.rows()
    assert (row["op"], row["seq"], row["last_call"], row["last_done"], row["calls"]) == ("barrier", 5, 50, 210, 2)


def test_communicators_that_come_and_go_do_not_displace_the_one_in_use() -> None:
    scene = Scene([0])
    # GIVEN a rank that makes a communicator for each evaluation, beside the one of its training
    for n in range(300):
        scene.drain(op(0, 10 * n, seq=n), op(0, 10 * n + 5, comm=f"evaluation {n}"))
    # THEN that one is still counted from its begin
    assert [row["calls"] for row in scene.rows() if row["comm"] == "first"] == [300]


def test_a_process_group_that_is_made_again_counts_from_its_begin() -> None:
    # GIVEN a rank that destroys its process group after a fault, and makes one of the same name
    scene = Scene([0])
    scene.drain(*(op(0, 10 * seq, seq=seq) for seq in range(1, 900)))
    scene.drain(op(0, 10_000, seq=1), op(0, 10_010, seq=2), op(0, 10_020, seq=-1, name="send"))
    # THEN it is where the newest operations say, not where the earlier group was
    assert [row["seq"] for row in scene.rows()] == [2]
    # and an operation of the earlier group that ended late changes nothing.
    scene.drain(op(0, 9_000, seq=900, lasts=2_000))
    assert [row["seq"] for row in scene.rows()] == [2]


def started(*ranks: int) -> Scene:
    """Returns a scene whose ranks have made eight calls, as in a start: 100 s apart, the last one at STARTED."""
    scene = Scene([*ranks])
    for seq in range(8):
        scene.drain(*(op(rank, STARTED - (7 - seq) * 100 * SECOND, seq=seq) for rank in ranks))
    return scene


def test_the_usual_gap_is_not_the_one_long_pause() -> None:
    scene = started(0)
    now = STARTED
    for step, pause in enumerate((3, 3, 7, 3, 900, 3, 3, 3)):
        now += pause * SECOND
        # Two operations a step on two communicators: the gap is that of the process.
        scene.drain(op(0, now, seq=step), op(0, now + SECOND, comm="second", seq=step))
        now += SECOND
    assert {row["longest_gap_ns"] for row in scene.rows()} == {7 * SECOND}


def test_gaps_within_one_drain_count() -> None:
    scene = started(0, 1)
    calls = [(rank, at * (rank + 1)) for rank in (0, 1) for at in range(1, 18)]
    scene.drain(*(op(rank, STARTED + at * SECOND, seq=at) for rank, at in calls))
    assert {row["rank"]: row["longest_gap_ns"] for row in scene.rows()} == {0: SECOND, 1: 2 * SECOND}


def test_the_pauses_of_a_start_are_not_usual() -> None:
    scene = started(0)
    assert scene.rows()[0]["longest_gap_ns"] is None
    scene.drain(op(0, STARTED + SECOND, seq=8))
    assert scene.rows()[0]["longest_gap_ns"] == SECOND


def test_the_end_of_a_process_stays_for_ten_minutes() -> None:
    scene = Scene()
    scene.drain(op(1, 1))
    event = {"event": "exit", "pid": 101, "start_ns": 7, "ts": UTC + 4, "signal": 9}
    scene.progress.observed_tables["process.events"](batch_of("process.events", [event]), PAIR)
    scene.clock.advance(5)
    scene.progress.process_exited(identity(1))
    row = scene.rows()[1]
    assert (row["ended"], row["signal"], row["exit_code"], row["calls"]) == (4, 9, None, 1)
    scene.clock.advance(600 * SECOND)
    assert [row["rank"] for row in scene.rows()] == [0]


def test_an_exit_without_an_event_has_a_time() -> None:
    scene = Scene([0])
    scene.clock.advance(13)
    scene.progress.process_exited(identity(0))
    (row,) = scene.rows()
    assert (row["ended"], row["signal"], row["exit_code"]) == (13, None, None)


def test_a_process_that_ended_before_its_operations_were_drained_does_not_live() -> None:
    scene = Scene([])
    scene.clock.advance(13)
    scene.progress.process_exited(identity(0))
    scene.drain(op(0, 5))
    (row,) = scene.rows()
    assert (row["ended"], row["calls"]) == (13, 1)


def test_processes_that_ended_make_room_for_new_ones() -> None:
    scene = Scene(range(4096))
    scene.progress.process_exited(identity(17))
    scene.progress.process_identified(identity(5000))
    ranks = {row["rank"] for row in scene.rows()}
    assert (len(ranks), 0 in ranks, 17 in ranks, 5000 in ranks) == (4096, True, False, True)


def test_a_user_with_very_many_communicators_loses_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_MAX_ROWS", 64, raising=False)
    # GIVEN a rank with some communicators
    scene = Scene([0])
    scene.drain(*(op(0, n, comm=f"c{n}") for n in range(9)))
    # WHEN the processes of another user have very many
    for rank in range(1, 21):
        scene.progress.process_identified(identity(rank)._replace(owner=1000))
        scene.drain(*(op(rank, n, comm=f"c{n}") for n in range(30)))
    # THEN the rows are limited, each process has one at least, and the rank keeps its own.
    rows = scene.rows()
    assert len(rows) <= 64
    assert {row["rank"] for row in rows} == {*range(21)}
    assert sum(row["rank"] == 0 for row in rows) == 9


def test_probes_that_came_late_are_known() -> None:
    scene = Scene()
    scene.progress.rows_lost(Loss("collectives", "comm.ops", "attach", "late", 0, UTC + 6, None, 101))
    scene.progress.rows_lost(Loss("collectives", "comm.ops", "ring", "full", 0, UTC + 9, None, 100))
    scene.progress.rows_lost(Loss("cuda", "cuda.syncs", "attach", "late", 0, UTC + 9, None, 100))
    assert [row["attached"] for row in scene.rows()] == [None, 6]


def test_a_process_is_known_by_its_newest_identity() -> None:
    scene = Scene([0])
    scene.progress.process_identified(Identity(100, 7, "j", "r2", "trainer", 3))
    assert [(row["run"], row["rank"]) for row in scene.rows()] == [("r2", 3)]


def test_a_rank_with_the_label_phase_shows_it_in_each_row() -> None:
    scene = Scene()
    phases = {(101, 7): Label("eval", UTC + 5, "datagram")}
    scene.progress = JobProgress("n1", scene.clock, phases.get)
    for rank in (0, 1):
        scene.progress.process_identified(identity(rank))
    scene.drain(op(1, 3), op(1, 7, comm="second"), op(0, 3))
    assert [(row["rank"], row["comm"], row["phase"], row["phase_since"]) for row in scene.rows()] == [
        (0, "first", None, None),
        (1, "first", "eval", 5),
        (1, "second", "eval", 5),
    ]


def test_exec_ends_the_communicators_of_the_program() -> None:
    scene = Scene()
    scene.drain(op(0, 10), op(1, 10))
    scene.progress.program_ended(100, 7, 15)
    assert [(row["rank"], row["comm"]) for row in scene.rows()] == [(0, None), (1, "first")]
    scene.drain(op(0, 20, comm="second"), op(0, 40, comm="third"))
    # The event may come late: what the new program called stays.
    scene.progress.program_ended(100, 7, 30)
    assert [(row["rank"], row["comm"]) for row in scene.rows()] == [(0, "third"), (1, "first")]
