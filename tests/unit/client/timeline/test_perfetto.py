"""A timeline as a Perfetto trace, read back by Perfetto's own classes and compared with SQL over the same rows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from perfetto_reader import Event, Read, read
from timeline_scene import (
    BEGIN,
    MS,
    SECOND,
    RowsOfTables,
    Tables,
    communication,
    counters,
    finding,
    loss,
    operation,
    sample,
    stack,
    step,
    timeline_of,
)

from probing.client.timeline.perfetto import write_perfetto
from probing.federation.execution.clocks import Offset


def written(tables: Tables, **more: Any) -> Read:
    sink = io.BytesIO()
    write_perfetto(timeline_of(tables, **more), sink)
    return read(sink.getvalue())


def rows() -> RowsOfTables:
    return {
        "comm.ops": communication(),
        "train.steps": [step(rank, n, n * SECOND, (n + 1) * SECOND) for rank in range(5) for n in range(13)],
        "python.samples": [sample(rank, 77 + rank % 2, n * 300 * MS) for rank in (1, 4) for n in range(17)],
        "python.stacks": [stack(77, ("inner", "/a.py", 3), ("outer", "/b.py", 9)), stack(78, ("wait", "/a.py", 7))],
        **counters(),
    }


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables(rows(), {"alpha": Offset(0, 0), "beta": Offset(0, 0)})


@pytest.fixture(scope="module")
def trace(tables: Tables) -> Read:
    return written(tables)


def test_each_operation_is_a_slice_of_its_rank_and_communicator(trace: Read, tables: Tables) -> None:
    wanted = tables.db.sql(
        "SELECT node, rank, comm_name, op, epoch_ns(t_call), epoch_ns(t_done_hi), seq, bytes, state FROM comm.ops"
    ).fetchall()
    shown = [
        (
            event.path[0].removeprefix("node "),
            int(event.path[1].split()[1]),
            event.path[2].split()[0],
            event.name,
            event.begin,
            event.end,
            event.args["seq"],
            event.args["bytes"],
            event.args["state"],
        )
        for event in trace.of("operation")
    ]
    assert sorted(shown) == sorted(wanted)
    assert len(shown) == 5 * 23 + 2 * 11


def test_a_flow_joins_the_ranks_of_one_operation(trace: Read, tables: Tables) -> None:
    wanted = tables.db.sql("SELECT comm, seq, list(rank ORDER BY rank) FROM comm.ops GROUP BY comm, seq").fetchall()
    flows = trace.by_flow()
    shown = [(ranks_of(events)) for events in flows.values()]
    assert sorted(shown) == sorted(ranks for _, _, ranks in wanted)
    assert len(flows) == 23 + 11
    for events in flows.values():
        assert len({(event.path[2], event.args["seq"]) for event in events}) == 1


def ranks_of(events: list[Event]) -> list[int]:
    return sorted(int(event.path[1].split()[1]) for event in events)


def test_who_waited_for_whom_and_how_long(trace: Read, tables: Tables) -> None:
    wanted = tables.db.sql("""
        SELECT rank, epoch_ns(t_call), least(last, epoch_ns(t_done_hi)), who FROM (
          SELECT *, max(epoch_ns(t_call)) OVER w AS last, arg_max(rank, epoch_ns(t_call)) OVER w AS who
          FROM comm.ops WINDOW w AS (PARTITION BY comm, seq)) WHERE epoch_ns(t_call) < last
    """).fetchall()
    shown = [(ranks_of([event])[0], event.begin, event.end, int(event.name.split()[3])) for event in trace.of("wait")]
    assert sorted(shown) == sorted(wanted)
    assert all(event.depth == 1 for event in trace.of("wait"))


def test_counters(trace: Read, tables: Tables) -> None:
    wanted = tables.db.sql("""
        SELECT node, 'GPU 0 power_w', epoch_ns(ts), power_w FROM gpu.utilization WHERE power_w IS NOT NULL
        UNION ALL SELECT node, 'GPU 0 gpu_util_pct', epoch_ns(ts), gpu_util_pct FROM gpu.utilization
        UNION ALL SELECT node, interface || ' rx_gbps', epoch_ns(ts), rx_gbps FROM net.interfaces
        WHERE kind = 'physical' AND isfinite(rx_gbps) AND node <> 'gamma'
    """).fetchall()
    shown = [(event.path[0].removeprefix("node "), event.path[1], event.begin, event.value) for event in trace.values]
    assert sorted(shown) == sorted(wanted)
    assert trace.tracks["node alpha", "GPU 0 power_w"].counter.unit_name == "W"


def test_steps_and_samples_with_their_stacks(trace: Read) -> None:
    steps = trace.of("step")
    assert sorted((ranks_of([e])[0], e.name, e.begin, e.end) for e in steps) == sorted(
        (rank, f"step {n}", BEGIN + n * SECOND, BEGIN + (n + 1) * SECOND) for rank in range(5) for n in range(13)
    )
    assert {event.depth for event in steps} == {0}
    samples = trace.of("sample")
    assert len(samples) == 2 * 17
    assert {event.name for event in samples} == {"inner", "wait"}
    first = next(event for event in samples if event.name == "wait")
    assert (first.path[1], first.stack) == ("rank 1 (pid 1001)", [("wait", "/a.py", 7)])
    deep = next(event for event in samples if event.name == "inner")
    assert deep.stack == [("outer", "/b.py", 9), ("inner", "/a.py", 3)]
    assert (deep.args["samples"], deep.weight) == (11, 110 * MS)


def test_operations_say_in_which_step_they_were_called(trace: Read) -> None:
    for event in trace.of("operation"):
        assert event.args["step"] == (event.begin - BEGIN) // SECOND


def test_operations_that_overlap_are_drawn_in_lanes_that_nest() -> None:
    # Seven operations of one communicator are in flight at a time.
    ops = [operation(0, n, n * MS, took=7 * MS - 1) for n in range(101)]
    trace = written(Tables({"comm.ops": ops}))
    assert len(trace.of("operation")) == 101
    assert {event.depth for event in trace.of("operation")} == {0}
    assert {event.end - event.begin for event in trace.of("operation") if event.end} == {7 * MS - 1}
    # Lanes have one name, by which Perfetto shows them as one track.
    assert len([path for path in trace.tracks if path[-1].startswith("default_pg")]) == 1


def test_more_operations_at_once_than_lanes_are_points() -> None:
    ops = [operation(0, n, n, took=SECOND) for n in range(37)]
    trace = written(Tables({"comm.ops": ops}))
    assert (len(trace.slices), len(trace.points)) == (32, 5)


def test_an_end_that_is_known_between_two_times_is_drawn_so() -> None:
    ops = [
        operation(0, 1, 0, t_done_lo=BEGIN + 3 * MS, t_done_hi=BEGIN + 5 * MS, timing_source="watchdog"),
        operation(1, 2, 0, t_done_lo=None, t_done_hi=BEGIN + 5 * MS, t_start=BEGIN + MS, timing_source="sync"),
        operation(2, 3, 0, t_done_lo=BEGIN + 3 * MS, t_done_hi=None, timing_source=None, state="abandoned"),
        operation(3, 4, 0, t_done_lo=None, t_done_hi=None, timing_source="enqueue_only", state=None),
    ]
    trace = written(Tables({"comm.ops": ops}))
    doubt = {event.path[1].split()[1]: (event.begin - BEGIN, event.end) for event in trace.of("doubt")}
    assert doubt == {"0": (3 * MS, BEGIN + 5 * MS), "1": (MS, BEGIN + 5 * MS)}
    ends = {event.path[1].split()[1]: event.end for event in trace.of("operation")}
    assert ends == {"0": BEGIN + 5 * MS, "1": BEGIN + 5 * MS, "2": BEGIN + 3 * MS, "3": BEGIN}
    states = {event.path[1].split()[1]: event.args["state"] for event in trace.of("operation")}
    assert states["3"] == "not known"


def test_operations_in_flight_have_no_end() -> None:
    flying = {key: value for key, value in operation(0, 5, 70 * MS).items() if not key.startswith("t_")}
    flying = {key: value for key, value in flying.items() if key != "timing_source"} | {"state": "started", "age_ns": 7}
    # This one ended meanwhile.
    other = {**flying, "seq": 6}
    tables = Tables({"comm.ops": [operation(0, 6, 80 * MS)], "comm.inflight": [flying, other]})
    trace = written(tables, present=True)
    assert {(event.args["seq"], event.end is None) for event in trace.of("operation")} == {(5, True), (6, False)}
    assert len(written(tables).of("operation")) == 1


def test_a_rank_that_calls_nothing_has_a_track() -> None:
    silent = {"node": "beta", "ts": BEGIN, "job": "4711.0", "run": "r1", "pid": 1004, "start_ns": 7 * SECOND, "rank": 4}
    tables = Tables({"comm.ops": [operation(0, 1, 0)], "process.processes": [silent, {**silent, "rank": None}]})
    assert ("node beta", "rank 4 (pid 1004)") in written(tables, present=True).tracks
    assert ("node beta",) not in written(tables).tracks


def test_findings_are_slices_and_points_at_the_ranks_that_they_blame(trace: Read) -> None:
    del trace
    found = [finding(3 * SECOND, 5 * SECOND), finding(4 * SECOND, None, ranks="1,3"), finding(-9 * SECOND, -SECOND)]
    trace = written(Tables({**rows(), "diagnosis.findings": found}))
    slices = [event for event in trace.of("finding") if event.path == ("findings",)]
    assert [(event.begin - BEGIN, event.end - BEGIN) for event in slices if event.end] == [
        (3 * SECOND, 5 * SECOND),
        (4 * SECOND, 60 * SECOND),
    ]
    marks = [(event.path[1], event.name) for event in trace.points if event.category == "finding"]
    assert sorted(marks) == [
        ("rank 1 (pid 1001)", "slow_rank"),
        ("rank 3 (pid 1003)", "slow_rank"),
        ("rank 3 (pid 1003)", "slow_rank"),
    ]
    assert slices[0].args["sentence"] == "rank 3 is slow"


def test_lost_rows_are_drawn_at_their_node_or_process() -> None:
    lost = [
        loss(SECOND, 2 * SECOND),
        loss(3 * SECOND, 4 * SECOND, pid=1003, count=None, reason="over its budget"),
        loss(5 * SECOND, 6 * SECOND, pid=999, reason="of another job"),
        loss(5 * SECOND, 6 * SECOND, node="gamma", reason="of another node"),
    ]
    trace = written(Tables({**rows(), "probing.losses": lost}))
    shown = [(e.path, e.name, e.begin - BEGIN, e.args["rows"]) for e in trace.of("loss")]
    assert shown == [
        (("node beta", "rows may be missing"), "ring full", SECOND, "19"),
        (("node beta", "rank 3 (pid 1003)", "rows may be missing"), "over its budget", 3 * SECOND, "not known"),
    ]


def test_clocks_of_nodes_line_up_and_their_bound_is_told() -> None:
    ahead = 5 * SECOND
    ops = [operation(rank, 1, 10 * SECOND, node_ahead=ahead if rank > 2 else 0) for rank in range(5)]
    clocks = {"alpha": Offset(0, 1000), "beta": Offset(ahead, 40_000)}
    trace = written(Tables({"comm.ops": ops}, clocks))
    assert {event.begin for event in trace.of("operation")} == {BEGIN + 10 * SECOND}
    assert trace.attributes["clock_offset_ns/beta"] == ahead
    assert 40_000 <= trace.attributes["clock_error_ns/beta"] < 10 * MS
    assert "5 s ahead of ours" in trace.tracks[("node beta",)].description
    assert "not compared" in written(Tables({"comm.ops": ops})).tracks[("node beta",)].description


def test_a_wait_that_the_clocks_cannot_show_is_not_drawn() -> None:
    ops = [operation(rank, 1, 2 * MS if rank == 4 else 0, took=9 * MS) for rank in range(5)]
    close = written(Tables({"comm.ops": ops}, {"alpha": Offset(0, 0), "beta": Offset(0, 100_000)}))
    apart = written(Tables({"comm.ops": ops}, {"alpha": Offset(0, 0), "beta": Offset(0, 900 * MS)}))
    assert ranks_of(close.of("wait")) == [0, 1, 2, 3]
    # Rank 3 is on the node of rank 4.
    assert ranks_of(apart.of("wait")) == [3]


def test_no_wait_is_drawn_between_clocks_that_were_not_compared() -> None:
    ops = [operation(rank, 1, 2 * SECOND if rank == 4 else 0, took=3 * SECOND) for rank in range(5)]
    assert ranks_of(written(Tables({"comm.ops": ops})).of("wait")) == [3]


def test_facts_about_the_trace(trace: Read) -> None:
    assert trace.realtime == BEGIN
    assert trace.attributes["job"] == "4711.0"
    assert trace.attributes["from"].startswith("2026-11-18T11:30:00")
    assert "outside" in trace.attributes["evidence"]
