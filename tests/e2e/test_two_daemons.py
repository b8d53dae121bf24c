"""Several nodes answer one query; a node that does not is named."""

from __future__ import annotations

import json
from collections.abc import Callable

from e2e_support import Daemon
from waiting import until


def test_one_query_over_two_nodes(daemon: Daemon, training: str, make_daemon: Callable[..., Daemon]) -> None:
    # GIVEN two daemons that share nothing but the machine, and a job that both see
    one, two = daemon, make_daemon("n2").start()
    # Each node has its own name for a job that is local to it.
    of_job = f"job LIKE '%:{training.rpartition(':')[2]}'"
    (last,) = until(lambda: two.rows(f"SELECT max(seq) AS seq FROM comm.ops WHERE {of_job} HAVING max(seq) > 0"))
    # Both saw the 23 operations that come now, of two ranks.
    these = f"{of_job} AND seq > {last['seq']} AND seq <= {last['seq'] + 23}"
    sql = f"SELECT node, count(*) AS n FROM comm.ops WHERE {these} GROUP BY node ORDER BY node"
    for node in (one, two):
        expected = [{"node": node.name, "n": 2 * 23}]
        until(lambda node=node, rows=expected: node.rows(sql) == rows, what=node.tail)  # type: ignore[misc]
    counts = one.rows(sql), two.rows(sql)

    # WHEN both are asked at once
    nodes = f"{one.target},{two.target}"
    rows = one.json("--nodes", nodes, "query", "--all-nodes", sql)
    # THEN the answer is the union
    assert rows == [*counts[0], *counts[1]]

    # AND with one of them gone, the rest answers and the missing one is named
    two.stop()
    done = one.ctl("--nodes", nodes, "-f", "json", "--report", str(one.base / "report.json"), "query", sql)
    assert json.loads(done.stdout) == counts[0]
    assert "n2.sock" in done.stderr
    report = json.loads((one.base / "report.json").read_text())
    assert [f["address"] for f in report["failed"]] == [two.target]
    assert report["failed"][0]["reason"]

    strict = one.ctl("--nodes", nodes, "--strict", "-f", "json", "query", sql, check=4)
    assert strict.stderr.startswith("error: ")
    assert "n2.sock" in strict.stderr
    assert "\nhint: " in strict.stderr
