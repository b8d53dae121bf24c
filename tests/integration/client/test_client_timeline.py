"""The command `timeline` over nodes: each trace has all rows of the range, or there is no file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import FakeNode, operation, process
from perfetto_reader import read

from probing.api.errors import PeerError, QueryError

Run = Callable[..., tuple[int, str, str]]
SECOND = 1_000_000_000


def query(ctl: Run, sql: str) -> list[dict[str, Any]]:
    code, out, err = ctl("query", "--all-nodes", "-f", "json", sql)
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(out)
    return rows


def test_the_trace_of_a_hung_job(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.pftrace"
    code, out, err = ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(path))
    assert (code, err) == (0, "")
    assert "203 operations" in out
    trace = read(path.read_bytes())
    rows = query(ctl, "SELECT node, rank, seq, epoch_ns(t_call) AS call, epoch_ns(t_done_hi) AS done FROM comm.ops")
    clocks = {node: trace.attributes.get(f"clock_offset_ns/{node}", 0) for node in ("alpha", "beta")}
    ended = {
        (event.path[0], event.path[1].split()[1], event.args["seq"]): (event.begin, event.end)
        for event in trace.of("operation")
        if event.end is not None
    }
    assert ended == {
        (f"node {row['node']}", str(row["rank"]), row["seq"]): (
            row["call"] - clocks[row["node"]],
            row["done"] - clocks[row["node"]],
        )
        for row in rows
    }
    # Three ranks wait in an operation that rank 2 has not called.
    flying = [event for event in trace.of("operation") if event.end is None]
    assert sorted(event.path[1].split()[1] for event in flying) == ["0", "1", "3"]
    assert len({event.flows for event in flying}) == 1
    flows = trace.by_flow()
    assert sorted(map(len, flows.values())) == [3] + [4] * 50
    stacks = {event.stack[-1][0] for event in trace.of("sample")}
    assert {"all_reduce", "read_batch"} <= stacks


def test_chrome_and_hta_have_the_same_operations(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    path, directory = tmp_path / "job.json", tmp_path / "hta"
    assert ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(path))[0] == 0
    events = json.loads(path.read_bytes())["traceEvents"]
    assert sum(1 for event in events if event.get("cat") == "operation" and event["ph"] == "X") == 200
    assert sum(1 for event in events if event["ph"] == "B") == 3
    code, out, _ = ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(directory), "-f", "json")
    assert code == 0
    report = json.loads(out)
    assert sorted(Path(one["file"]).name for one in report["files"]) == [f"rank-{rank}.json" for rank in range(4)]
    assert (report["operations"], report["nodes"], report["gaps"]) == (203, 2, 0)
    for rank in range(4):
        text = (directory / f"rank-{rank}.json").read_text()
        kernels = [event for event in json.loads(text)["traceEvents"] if event.get("cat") == "seen_from_host"]
        assert len(kernels) == 50
        assert f'"rank": {rank}' in text


def test_a_job_that_ended(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    for node in pair:
        node.replace("process.processes", [])
        node.replace("comm.inflight", [])
    path = tmp_path / "job.pftrace"
    assert ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(path))[0] == 0
    assert len(read(path.read_bytes()).of("operation")) == 200


def test_a_range_without_rows_leaves_no_file(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.pftrace"
    words = ("timeline", "--all-nodes", "--job", "j1", "--from", "2026-01-01", "--to", "2026-01-02")
    code, _, err = ctl(*words, "-o", str(path))
    assert code != 0
    assert "no rows of job j1" in err
    assert ctl(*words, "-o", str(tmp_path / "dir"))[0] != 0
    assert list(tmp_path.glob("*job*")) + list(tmp_path.glob("*dir*")) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--job", "j1"), "timeline needs a file or a directory"),
        (("-o", "x.pftrace"), "timeline needs a job"),
        (("--job", "j1", "-o", "x.svg"), "unknown suffix of a trace file: .svg"),
        (("--job", "j1", "--since", "5m", "--until", "10m", "-o", "x.pftrace"), "is not after"),
        (("--job", "j1", "--since", "yesterday", "-o", "x.pftrace"), "is not a time"),
    ],
)
def test_wrong_options(words: tuple[str, ...], why: str, pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, _, err = ctl("timeline", *words)
    assert code == 2
    assert why in err


def test_a_node_that_stops_answering_is_a_gap(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    pair[1].broken = {"gpu.utilization": PeerError("the collector is gone")}
    path = tmp_path / "job.pftrace"
    code, out, err = ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(path))
    assert code == 0
    assert "beta" in err
    assert "in which rows may be missing" in out
    (lost, *_) = read(path.read_bytes()).of("loss")
    assert lost.path == ("node beta", "rows may be missing")
    assert "the collector is gone" in lost.args["reason"]
    assert ctl("timeline", "--all-nodes", "--strict", "--job", "j1", "--since", "1h", "-o", str(path))[0] == 4


def test_an_error_of_all_nodes_leaves_no_file(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    for node in pair:
        node.broken = {"python.samples": QueryError("out of memory")}
    path = tmp_path / "job.pftrace"
    code, _, err = ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(path))
    assert code != 0
    assert "out of memory" in err
    assert not path.exists()


def test_rows_are_read_in_slices_of_bounded_size(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.client.timeline.reading.ROWS_A_SLICE", 17)
    pair[0].timed = pair[1].timed = True
    pair[0].insert("comm.ops", [operation("alpha", 0, seq) for seq in range(50, 103)])
    # A wait that is shorter than the errors of clocks is not drawn, and a busy machine measures them badly.
    late_ns = {2: 400_000_000, 3: 0}
    pair[1].replace("comm.ops", [operation("beta", rank, seq, late_ns[rank]) for rank in late_ns for seq in range(50)])
    path = tmp_path / "job.pftrace"
    assert ctl("timeline", "--all-nodes", "--job", "j1", "--since", "1h", "-o", str(path))[0] == 0
    trace = read(path.read_bytes())
    operations = trace.of("operation")
    assert len(operations) == 255
    assert len({(event.path[1], event.args["seq"], event.end is None) for event in operations}) == 255
    assert sum("FROM comm.ops" in sql.replace('"', "") for sql in pair[0].asked) > 256 // 17
    # Rank 2 is late in each, also where its row lies in another slice than those of the others.
    waits = [event for event in trace.of("wait") if event.name.startswith("waits for rank 2")]
    assert len(waits) == 3 * 50


def test_nodes_whose_clocks_are_five_seconds_apart_line_up(ctl: Run, tmp_path: Path) -> None:
    ahead = 5 * SECOND
    times = ("ts", "t_call", "t_start", "t_done_hi")

    def rows(node: str, ranks: tuple[int, ...], shift: int) -> list[dict[str, Any]]:
        made = [operation(node, rank, seq) for rank in ranks for seq in range(13)]
        return [row | {name: row[name] + shift for name in times} for row in made]

    path = tmp_path / "job.pftrace"
    with (
        FakeNode(tmp_path, "alpha", {"comm.ops": rows("alpha", (0, 1), 0)}) as alpha,
        FakeNode(tmp_path, "beta", {"comm.ops": rows("beta", (2, 3), ahead)}) as beta,
    ):
        beta.ahead_ns = ahead
        alpha.timed = beta.timed = True
        for node in (alpha, beta):
            node.insert("process.processes", [process(node.name, 0, 1000)])
        words = ("--nodes", f"{alpha.address},{beta.address}", "timeline", "--job", "j1", "--since", "1h")
        code, _, err = ctl(*words, "-o", str(path))
    assert code == 0
    assert "the clock of beta is 5 s ahead" in err
    trace = read(path.read_bytes())
    error = sum(trace.attributes[f"clock_error_ns/{node}"] for node in ("alpha", "beta"))
    flows = trace.by_flow()
    assert len(flows) == 13
    for events in flows.values():
        assert len(events) == 4
        assert max(event.begin for event in events) - min(event.begin for event in events) <= error
    assert trace.of("wait") == []
