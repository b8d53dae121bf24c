"""Jobs that call NCCL without a GPU, beside a daemon: each call is known, so that each row can be checked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from doubles.doubles import Call, DoubleJob, Doubles
from doubles.watching import expected
from e2e_support import Daemon
from ports import free_port
from waiting import until

SIZE = 3
# Columns that the arguments of a call say, but those that name the process.
SAID = ("op", "dtype", "count", "bytes", "redop", "root", "peer", "stream", "comm", "comm_rank", "comm_size")
Row = dict[str, Any]


class Job:
    """A job of the doubles with a name that the daemon knows it by."""

    def __init__(self, doubles: Doubles, folder: Path, **environ: str) -> None:
        port = str(free_port())
        self.name = f"n1/127.0.0.1:{port}"
        self.ranks = DoubleJob(doubles, folder / port, SIZE, MASTER_PORT=port, WATCHDOG_MS="10", **environ)

    def operations(self, daemon: Daemon, where: str = "true") -> list[Row]:
        """Rows of comm.ops; the ends as ns after the call."""
        ends = ", ".join(f"epoch_ns({name}) - epoch_ns(t_call) AS {name}" for name in ("t_done_lo", "t_done_hi"))
        columns = f"pid, tid, rank, seq, state, timing_source, error, {', '.join(SAID)}, {ends}"
        order = "ORDER BY pid, t_call"
        return daemon.rows(f"SELECT {columns} FROM comm.ops WHERE job = '{self.name}' AND {where} {order}")

    def wait_for_operations(self, daemon: Daemon, count: int, where: str = "true") -> list[Row]:
        def enough() -> list[Row]:
            rows = self.operations(daemon, where)
            return rows if len(rows) >= count else []

        return until(enough, what=f"{count} operations")


def ready(daemon: Daemon, job: Job) -> None:
    """Wait until the daemon sees the job's calls: it comes to libraries that were mapped before it looked."""
    job.ranks.do("init first plain")
    job.ranks.do("duration 2000000")

    def seen() -> bool:
        job.ranks.do("do 1 all_reduce 1 7")
        job.ranks.do("drain")
        where = "count = 1 AND state = 'done'"
        return {row["rank"] for row in job.operations(daemon, where)} == set(range(SIZE))

    until(seen, what="operations of every rank")
    job.ranks.do("init world config")


def check(rows: list[Row], calls: list[Call]) -> None:
    """Each call has one row, with its arguments, and an interval that holds its end."""
    calls = sorted(calls, key=lambda call: (call.pid, call.before))
    of_rows, of_calls = [(row["pid"], row["seq"]) for row in rows], [(call.pid, call.seq) for call in calls]
    assert sorted(set(of_calls) - set(of_rows)) == sorted(set(of_rows) - set(of_calls)) == []
    more = Counter(of_rows) - Counter(of_calls)
    assert not more, f"more rows than calls: {more}"
    astray = next(((i, row) for i, (row, call) in enumerate(zip(of_rows, of_calls, strict=True)) if row != call), None)
    assert astray is None, f"not in the order of the calls: row {astray}"
    for row, call in zip(rows, calls, strict=True):
        wanted = expected(call)
        assert {name: row[name] for name in SAID} == {name: wanted[name] for name in SAID}
        assert row["rank"] == call.rank
        ((_, end),) = call.ends
        # The call was somewhere between `before` and `inside`; the bounds are counted from it.
        assert row["t_done_hi"] >= end - call.inside
        assert (row["t_done_lo"] or 0) <= end - call.before
        assert row["state"] == "done"


def is_replaced(daemon: Daemon, pid: int) -> bool:
    now = daemon.children().get("probing.daemon.collector", [pid])
    done = daemon.ctl("-f", "json", "status", check=None)
    return now != [pid] and done.returncode == 0 and json.loads(done.stdout)["state"] == "running"
