"""Traces of real jobs: each row of the range is in them, and nodes whose clocks differ line up."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import BIN, Daemon
from network_namespaces import may_make_namespaces
from perfetto_reader import Event, Read, read
from site_of_nodes import Site, site_of
from waiting import until

from probing.api.text import utc

SECOND = 1_000_000_000
# Rows of operations are stored a second after these have ended, samples after two.
_LATE_S, _LONG_S = 7, 11
_AHEAD_S = 5.0


@pytest.fixture
def range_of_time(daemon: Daemon, stepping: str) -> tuple[int, int]:
    """Begin and end (UTC ns) of a range in which the job trains, and whose rows are stored."""
    sql = f"SELECT epoch_ns(min(ts)) AS first, epoch_ns(max(ts)) AS last FROM comm.ops WHERE job = '{stepping}'"

    def long_enough() -> bool:
        (row,) = daemon.rows(sql)
        return bool(row["first"]) and int(row["last"] - row["first"]) > (_LATE_S + _LONG_S + 1) * SECOND

    until(long_enough, what="operations")
    end = time.time_ns() - _LATE_S * SECOND
    return end - _LONG_S * SECOND, end


def rank_of(event: Event) -> int:
    return int(event.path[1].split()[1])


def test_each_row_of_the_range_is_in_the_traces(
    daemon: Daemon, stepping: str, range_of_time: tuple[int, int], tmp_path: Path
) -> None:
    begin, end = range_of_time
    words = ("timeline", "--job", stepping, "--from", utc(begin), "--to", utc(end), "-o")
    path = tmp_path / "job.pftrace"
    report = json.loads(daemon.ctl("-f", "json", *words, str(path)).stdout)
    trace = read(path.read_bytes())
    ahead = trace.attributes["clock_offset_ns/n1"]
    where = f"job = '{stepping}' AND ts >= make_timestamp_ns({begin}) AND ts < make_timestamp_ns({end})"

    ops = daemon.rows(
        "SELECT rank, comm_name, seq, op, bytes, epoch_ns(t_call) AS call, epoch_ns(t_done_hi) AS done "
        f"FROM comm.ops WHERE {where}"
    )
    assert len(ops) > 2 * _LONG_S
    wanted = [(r["rank"], r["seq"], r["op"], r["bytes"], r["call"] - ahead, r["done"] - ahead) for r in ops]
    shown = [(rank_of(e), e.args["seq"], e.name, e.args["bytes"], e.begin, e.end) for e in trace.of("operation")]
    assert sorted(shown) == sorted(wanted)
    assert report["operations"] == len(ops)

    keys = {(row["comm_name"], row["seq"]) for row in ops}
    flows = trace.by_flow()
    assert len(flows) == len(keys)
    assert all(len({rank_of(event) for event in events}) == len(events) for events in flows.values())

    steps = daemon.rows(
        f"SELECT rank, step, epoch_ns(t_start) AS begin, epoch_ns(t_end) AS end FROM train.steps WHERE {where}"
    )
    assert steps
    assert sorted((rank_of(e), e.name, e.begin, e.end) for e in trace.of("step")) == sorted(
        (r["rank"], f"step {r['step']}", r["begin"] - ahead, r["end"] - ahead) for r in steps
    )

    (samples,) = daemon.rows(f'SELECT count(*) AS n, sum("count") AS seen FROM python.samples WHERE {where}')
    assert len(trace.of("sample")) == samples["n"]
    assert sum(event.args["samples"] for event in trace.of("sample")) == samples["seen"]
    assert all(event.stack for event in trace.of("sample"))

    chrome, directory = tmp_path / "job.json", tmp_path / "hta"
    daemon.ctl(*words, str(chrome))
    events = json.loads(chrome.read_bytes())["traceEvents"]
    assert sum(1 for e in events if e.get("cat") == "operation" and e["ph"] == "X") == len(ops)
    daemon.ctl(*words, str(directory))
    for rank in (0, 1):
        kernels = json.loads((directory / f"rank-{rank}.json").read_bytes())["traceEvents"]
        own = [row for row in ops if row["rank"] == rank]
        assert sum(1 for event in kernels if event.get("cat") == "seen_from_host") == len(own)


@pytest.fixture
def site(base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Site]:
    if not may_make_namespaces():
        pytest.skip("network namespaces cannot be made here")
    with site_of(base, make_daemon, ("n1", "n2"), (0.0, _AHEAD_S), ((), ())) as made:
        yield made


@pytest.fixture
def job(site: Site) -> Iterator[Ranks]:
    with folder_of_job() as folder:
        ranks = Ranks("n1", folder, "hangs.py", "stopped", 2)
        try:
            site.start(ranks, (0, 1))
            site.await_steps(ranks, (0, 1))
            yield ranks
        finally:
            ranks.kill()
            ranks.wait()


def trace_of(site: Site, job: str, path: Path) -> Read:
    words: list[Any] = [*site.spaces[0].words, BIN / "probingctl", "-t", site.daemons[0].target, *site.shown]
    words += ["timeline", "--all-nodes", "--job", job, "--since", "1m", "-o", path]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read(path.read_bytes())


def test_nodes_whose_clocks_are_five_seconds_apart_line_up(site: Site, job: Ranks, tmp_path: Path) -> None:
    def flows() -> list[list[Event]]:
        trace = trace_of(site, job.job, tmp_path / "job.pftrace")
        pairs = (events for events in trace.by_flow().values() if len(events) == 2)
        return [pair for pair in pairs if all(event.end is not None for event in pair)]

    found = until(lambda: len(both := flows()) >= 11 and both, what=site.daemons[0].tail)
    trace = read((tmp_path / "job.pftrace").read_bytes())
    error = sum(trace.attributes[f"clock_error_ns/{node}"] for node in ("n1", "n2"))
    ahead = {node: trace.attributes[f"clock_offset_ns/{node}"] for node in ("n1", "n2")}
    assert abs(ahead["n2"] - ahead["n1"] - _AHEAD_S * SECOND) <= error + SECOND // 1000
    assert error < _AHEAD_S * SECOND / 5
    for one, other in found:
        # No rank leaves a collective before the other one has called it.
        assert one.end is not None
        assert other.end is not None
        assert one.begin <= other.end + error, (one, other)
        assert other.begin <= one.end + error, (one, other)
