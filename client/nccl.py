"""``nccl``: what the communicators do, whatever library is behind them."""

from __future__ import annotations

from probing.client.cluster import Cluster
from probing.client.nccl_text import people
from probing.client.output import write_objects
from probing.client.render import terminal_width
from probing.client.rows import rows_of
from probing.client.session import opened, require_job, sql_text
from probing.client.settings import Settings

__all__ = ("RANKS_SQL", "Row", "collect", "run")

Row = dict[str, object]
_KEY = ("job", "run", "comm")

_COMMUNICATORS = """
SELECT job, run, comm, any_value(name) AS name, any_value(backend) AS backend, max(size) AS size,
  list(DISTINCT job_rank) AS members, count(DISTINCT node) AS nodes, bool_or(aborted) AS aborted,
  any_value(async_error) AS async_error
FROM comm.communicators WHERE {where} GROUP BY job, run, comm
"""
_OPS = """
SELECT job, run, comm, any_value(comm_name) AS name, any_value(backend) AS backend, max(comm_size) AS size, op,
  count(*) AS calls, sum(bytes) AS bytes, avg(duration_ns) AS avg_ns, quantile_cont(duration_ns, 0.5) AS p50_ns,
  quantile_cont(duration_ns, 0.99) AS p99_ns, max(duration_ns) AS max_ns, min(algbw_gbps) AS algbw_min_gbps,
  avg(algbw_gbps) AS algbw_avg_gbps, min(busbw_gbps) AS busbw_min_gbps, avg(busbw_gbps) AS busbw_avg_gbps,
  count(*) FILTER (WHERE state <> 'done') AS not_done, min(seq) AS first_seq, max(seq) AS last_seq
FROM comm.ops WHERE ts > now() - INTERVAL {since} SECOND AND {where} GROUP BY job, run, comm, op
"""
# The rank that came in the middle is the measure: half of the ranks were there before it.
RANKS_SQL = """
WITH arrivals AS (
  SELECT job, run, comm, rank, comm_rank, node, pid, seq, epoch_ns(ts) AS t FROM comm.ops
  WHERE ts > now() - INTERVAL {since} SECOND AND op <> 'send' AND op <> 'recv' AND {where}
), late AS (
  SELECT *, t - quantile_disc(t, 0.5) OVER (PARTITION BY job, run, comm, seq) AS lag FROM arrivals
)
SELECT job, run, comm, rank, comm_rank, node, pid, count(*) AS calls, max(seq) AS last_seq,
  quantile_disc(lag, 0.5) AS lag_ns, max(lag) AS max_lag_ns
FROM late GROUP BY job, run, comm, rank, comm_rank, node, pid
"""
_INFLIGHT = """
SELECT job, run, comm, comm_name AS name, backend, comm_size AS size, op, seq, rank, comm_rank, node, pid, tid, bytes,
  state, age_ns
FROM comm.inflight WHERE {where}
"""


def run(settings: Settings, job: str | None, comm: str | None, since: float) -> None:
    with opened(settings) as cluster:
        found = collect(cluster, job, comm, since)
        if not found and job is not None:
            require_job(cluster, job)
        width = terminal_width() if settings.output is None else None
        write_objects(settings, found, people(found, since, width), _flat(found))


def collect(cluster: Cluster, job: str | None, comm: str | None, since: float) -> list[Row]:
    """Communicators with ``ops``, ``ranks`` and ``inflight``, as docs/json.md describes; ``since`` in seconds."""
    where = " AND ".join(
        [f"{name} = {sql_text(value)}" for name, value in (("job", job), ("comm", comm)) if value is not None]
        or ["true"]
    )
    seconds = max(1, round(since))
    results = {
        name: rows_of(cluster.query(sql.format(where=where, since=seconds)))
        for name, sql in (("ops", _OPS), ("ranks", RANKS_SQL), ("inflight", _INFLIGHT), ("known", _COMMUNICATORS))
    }
    found: dict[tuple[object, ...], Row] = {}
    active = {_key(row) for name in ("ops", "inflight") for row in results[name]}
    for row in results["known"]:
        # Communicators that did nothing in the interval and do nothing now would bury the others.
        if _key(row) in active or comm is not None:
            own = _communicator(found, row)
            own["members"] = sorted(rank for rank in row["members"] or [] if rank is not None)
            own["nodes"], own["aborted"], own["async_error"] = row["nodes"], row["aborted"], row["async_error"]
    for name in ("ops", "ranks", "inflight"):
        for row in results[name]:
            listed = _communicator(found, row)[name]
            assert isinstance(listed, list)
            listed.append({k: v for k, v in row.items() if k not in (*_KEY, "name", "backend", "size")})
    for own in found.values():
        _sort(own)
    return [found[key] for key in sorted(found, key=str)]


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in _KEY)


def _communicator(found: dict[tuple[object, ...], Row], row: Row) -> Row:
    fresh: Row = {
        **{name: row[name] for name in _KEY},
        **{name: row.get(name) for name in ("name", "backend", "size")},
        "members": [], "nodes": None, "aborted": None, "async_error": None, "ops": [], "ranks": [], "inflight": [],
    }  # fmt: skip
    own = found.setdefault(_key(row), fresh)
    for name in ("name", "backend", "size"):
        own[name] = own[name] if own[name] is not None else row.get(name)
    return own


def _sort(own: Row) -> None:
    orders = {
        "ops": lambda r: r["op"] or "",
        "ranks": lambda r: (r["rank"] is None, r["rank"] or 0, r["comm_rank"] or 0, r["node"], r["pid"]),
        "inflight": lambda r: (r["seq"] or 0, r["rank"] is None, r["rank"] or 0, r["pid"]),
    }
    for name, order in orders.items():
        listed = own[name]
        assert isinstance(listed, list)
        listed.sort(key=order)


def _flat(found: list[Row]) -> list[Row]:
    """One row a communicator and operation, for the formats that have only rows."""
    rows: list[Row] = []
    for own in found:
        ops = own["ops"]
        assert isinstance(ops, list)
        head = {name: own[name] for name in (*_KEY, "name", "backend", "size")}
        rows.extend({**head, **op} for op in ops)
    return rows
