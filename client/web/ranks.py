"""One rank on the page: its process, its last operations, findings, log lines, and its figures over ten minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from probing.api.errors import NotFound, ProbingError
from probing.api.text import sql_text
from probing.client.diagnosis.findings import OPEN_COLUMNS, newest_sql, numbers, order
from probing.client.render.rows import Row, rows_of
from probing.client.web.panels import Question

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("rank",)

_MOST_OPS, _MOST_LINES, _MOST_POINTS = 100, 50, 2_000
_OF = "node = {node} AND pid = {pid}"
_PROCESS = f"SELECT * FROM process.processes WHERE {_OF} ORDER BY start_ns DESC LIMIT 1"
_OPS = f"""
SELECT ts, comm, comm_name, comm_size, backend, op, seq, bytes, duration_ns, busbw_gbps, state, error FROM comm.ops
WHERE {_OF} AND ts > now() - INTERVAL 1 HOUR ORDER BY ts DESC LIMIT {_MOST_OPS}
"""
_IN_FLIGHT = f"""
SELECT comm, comm_name, comm_size, backend, op, seq, bytes, state, age_ns FROM comm.inflight WHERE {_OF}
ORDER BY age_ns DESC LIMIT {_MOST_OPS}
"""
_LOGS = f"""
SELECT ts, stream, kind, line, suppressed FROM process.logs WHERE {_OF} AND ts > now() - INTERVAL 1 DAY
ORDER BY ts DESC LIMIT {_MOST_LINES}
"""
_LATELY = "ts > now() - INTERVAL 10 MINUTE"
_SECOND = "epoch_ns(ts) // 1000000000"
_CPU = f"""
SELECT {_SECOND} AS t, max(cpu_total_pct) AS cpu_pct, max(rss_kb) * 1024 AS rss_bytes FROM cpu.utilization
WHERE scope = 'process' AND {_OF} AND {_LATELY} GROUP BY t ORDER BY t LIMIT {_MOST_POINTS}
"""
_GPU = f"""
SELECT {_SECOND} AS t, avg(coalesce(gpu_util_pct, sm_active_pct)) AS gpu_pct, sum(used_bytes) AS gpu_used_bytes,
  sum(power_w) AS power_w, max(temperature_c) AS temperature_c
FROM gpu.utilization WHERE node = {{node}} AND {_LATELY}
  AND uuid IN (SELECT DISTINCT uuid FROM gpu.processes WHERE {_OF} AND {_LATELY})
GROUP BY t ORDER BY t LIMIT {_MOST_POINTS}
"""
_NET = f"""
SELECT {_SECOND} AS t, sum(rx_gbps) AS net_rx_gbps, sum(tx_gbps) AS net_tx_gbps FROM net.interfaces
WHERE node = {{node}} AND job IS NULL AND kind <> 'loopback' AND {_LATELY} GROUP BY t ORDER BY t LIMIT {_MOST_POINTS}
"""
_SERIES = {"cpu": _CPU, "gpu": _GPU, "net": _NET}
_UNITS = {"pct": "%", "bytes": "bytes", "w": "W", "c": "°C", "gbps": "Gb/s"}


def rank(question: Question) -> dict[str, object]:
    """Returns ``process`` (null if it is not known), ``ops`` and ``in_flight``, open ``findings`` that name the rank,
    ``logs``, and ``series`` by name: ``t`` (UTC, s), ``v`` and ``unit``. Raises NotFound if there are no rows."""
    parameters, node, pid = question.parameters, question.parameters.text("node"), question.parameters.pid()
    cluster = question.of_node(node)
    names = {"node": sql_text(node), "pid": pid}
    main = {"process": _PROCESS, "ops": _OPS, "in_flight": _IN_FLIGHT, "logs": _LOGS}
    found = _rows(cluster, main, names)
    if not any(found.values()):
        raise NotFound(f"nothing is known of process {pid} on {node}", hint="`probingctl ps` lists running processes")
    process = next(iter(found["process"]), None)
    series: dict[str, object] = {}
    for name, sql in _SERIES.items():
        try:
            series |= _series(_rows(cluster, {name: sql}, names)[name])
        except ProbingError as e:
            question.lacking.append({"node": node, "error": e.message})
    return {
        "process": process,
        **{name: found[name] for name in ("ops", "in_flight", "logs")},
        "findings": [] if process is None else _findings(question.cluster, process),
        "series": series,
        "run": parameters.text("run", "") or (process or {}).get("run"),
    }


def _rows(cluster: Cluster, statements: Mapping[str, str], names: Mapping[str, object]) -> dict[str, list[Row]]:
    """Returns the rows of each statement. Each node answers a statement from its own rows."""
    asked = {name: sql.format(**names) for name, sql in statements.items()}
    tables = cluster.query_all(asked, each=asked)
    return {name: rows_of(tables[name]) for name in asked}


def _series(rows: list[Row]) -> dict[str, object]:
    columns = [name for name in (rows[0] if rows else {}) if name != "t" and any(r[name] is not None for r in rows)]
    times = [row["t"] for row in rows]
    return {
        name: {"t": times, "v": [row[name] for row in rows], "unit": _UNITS[name.rpartition("_")[2]]}
        for name in columns
    }


def _findings(cluster: Cluster, process: Row) -> list[Row]:
    """Returns the open findings that blame the rank of ``process`` or name it as waiting, the worst first."""
    where = f"ts > now() - INTERVAL 7 DAY AND job = {sql_text(process['job'])} AND run = {sql_text(process['run'])}"
    rows = rows_of(cluster.query(newest_sql(where, OPEN_COLUMNS) + " HAVING arg_max(state, ts) = 'open'"))
    own = [row for row in rows if process["rank"] in (*numbers(row["ranks"]), *numbers(row["victims"]))]
    return sorted(own, key=order)
