"""Makes facts from other witnesses: NCCL's RAS, PyTorch's flight recorder, and errors that the libraries report.

``RAS_SQL``, ``FLIGHT_SQL`` and ``ERRORS_SQL`` are the statements, in which a literal replaces ``{job}``. Their rows may
be of several runs: a row counts if its process or its communicator belongs to the run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from probing.diagnosis.facts import Communicator, Member, Missing, Operation, Rank, Witness

__all__ = ("ERRORS_SQL", "FLIGHT_SQL", "RAS_SQL", "add_witnesses")

_LAUNCHED = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
_MAX_OF_A_RANK = 32
_MAX_TEXT = 200
_MAX_MISSING = 16
_LONGEST_MS = 10**11

# The newest report about each communicator.
RAS_SQL = f"""
SELECT epoch_ns(ts) AS ts_ns, comm, secondary_hash, size, comm_rank, host, rank_pid, missing, considered_dead,
  init_state, async_error, abort_flag, {", ".join(_LAUNCHED)}
FROM comm.ras WHERE job = {{job}} AND ts > now() - INTERVAL 10 MINUTE
QUALIFY ts = max(ts) OVER (PARTITION BY comm, secondary_hash) ORDER BY comm, comm_rank LIMIT 4096
"""
# The last eight records of each group in the newest dump of each process.
FLIGHT_SQL = """
WITH newest AS (
  SELECT pid, start_ns, arg_max(snapshot_id, ts) AS snapshot_id FROM python.torch_nccl_flight_record
  WHERE job = {job} AND ts > now() - INTERVAL 1 HOUR GROUP BY pid, start_ns
)
SELECT epoch_ns(f.ts) AS ts_ns, f.pid, f.start_ns, f.record_id, f.pg_name, f.pg_desc, f.collective_seq_id,
  f.p2p_seq_id, f.is_p2p, f.profiling_name, f.state, f.input_sizes, f.input_dtypes, f.time_created_ns,
  f.time_discovered_completed_ns, f.timeout_ms
FROM python.torch_nccl_flight_record AS f JOIN newest AS n
  ON f.pid = n.pid AND f.start_ns = n.start_ns AND f.snapshot_id = n.snapshot_id
WHERE f.job = {job} AND f.ts > now() - INTERVAL 1 HOUR
QUALIFY row_number() OVER (PARTITION BY f.pid, f.start_ns, f.pg_name ORDER BY f.record_id DESC) <= 8
ORDER BY f.pid, f.record_id LIMIT 4096
"""
# Communicators with an error, or that were aborted or destroyed: when this was first seen, and the newest state.
_ENDED = "async_error IS NOT NULL OR aborted OR state IN ('failed', 'aborted', 'destroyed')"
ERRORS_SQL = f"""
SELECT pid, start_ns, comm, arg_max(async_error, ts) AS async_error, arg_max(aborted, ts) AS aborted,
  arg_max(state, ts) AS state,
  epoch_ns(min(ts) FILTER (WHERE {_ENDED})) AS ts_ns
FROM comm.communicators WHERE job = {{job}} AND comm IS NOT NULL GROUP BY pid, start_ns, comm
HAVING count(*) FILTER (WHERE {_ENDED}) > 0
ORDER BY ts_ns LIMIT 4096
"""
_Row = Mapping[str, Any]
_Said = dict[int, list[Witness]]


def add_witnesses(
    ranks: Sequence[Rank],
    communicators: Sequence[Communicator],
    ras_rows: Iterable[_Row],
    flight_rows: Iterable[_Row],
    error_rows: Iterable[_Row] = (),
) -> tuple[list[Rank], list[Communicator], list[Missing]]:
    """Returns the ranks, with the facts of the witnesses added; the communicators, including communicators that only
    RAS lists; and missing facts.

    The rows come from ``RAS_SQL``, ``FLIGHT_SQL`` and ``ERRORS_SQL``.
    """
    said: _Said = defaultdict(list)
    places = {(rank.pid, rank.start_ns): rank.rank for rank in ranks}
    for row in error_rows:
        if (rank := places.get((row["pid"], row["start_ns"]))) is not None:
            said[rank].append(_error(row))
    found, missing = _ras(list(ras_rows), ranks, communicators, said)
    _flight(flight_rows, places, [*communicators, *found], said)
    heard = [replace(rank, witnesses=tuple(said[rank.rank][:_MAX_OF_A_RANK])) for rank in ranks]
    return heard, [*communicators, *found], missing


def _error(row: _Row) -> Witness:
    return Witness(
        "probe",
        row["comm"],
        row["ts_ns"],
        async_error=_text(row["async_error"]),
        aborted=row["aborted"],
        state=row["state"],
    )


def _ras(
    rows: Sequence[_Row], ranks: Sequence[Rank], communicators: Sequence[Communicator], said: _Said
) -> tuple[list[Communicator], list[Missing]]:
    """Adds RAS's reports to ``said``. Returns the communicators that only RAS lists, and the ranks that it cannot
    reach.
    """
    known = {c.comm: {m.comm_rank: m.rank for m in c.members} for c in communicators}
    pids, here = _unambiguous(ranks), {rank.rank for rank in ranks}
    found: dict[str, Communicator] = {}
    missing: list[Missing] = []
    for row in rows:
        comm, comm_rank = row["comm"], row["comm_rank"]
        rank = known[comm].get(comm_rank) if comm in known else pids.get(row["rank_pid"])
        if comm not in known:
            if rank is None:
                continue
            before = found.get(comm, Communicator(comm, None, "nccl", row["size"], (), witness="ras"))
            found[comm] = replace(before, members=(*before.members, Member(comm_rank, rank)))
        if rank in here:
            said[rank].append(_ras_witness(row))
        if row["missing"] and len(missing) < _MAX_MISSING:
            missing.append(_unreached(row, rank))
    return list(found.values()), missing


def _unambiguous(ranks: Sequence[Rank]) -> dict[int, int]:
    """Returns the rank of each pid that only one rank has: RAS names hosts in its own way, so only the pid can be
    compared.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[rank.pid].append(rank.rank)
    return {pid: having[0] for pid, having in found.items() if len(having) == 1}


def _ras_witness(row: _Row) -> Witness:
    return Witness(
        "ras",
        row["comm"],
        row["ts_ns"],
        launched=tuple((op, row[op]) for op in _LAUNCHED if row[op] is not None),
        missing=bool(row["missing"]),
        dead=bool(row["considered_dead"]),
        async_error=_text(row["async_error"]),
        aborted=row["abort_flag"],
        state=_text(row["init_state"]),
    )


def _unreached(row: _Row, rank: int | None) -> Missing:
    who = f"rank {rank}" if rank is not None else f"rank {row['comm_rank']} of communicator {row['comm']}"
    where = f" (host {_text(row['host'])}, pid {row['rank_pid']})" if row["rank_pid"] is not None else ""
    how = "considers it dead" if row["considered_dead"] else "cannot reach it"
    return Missing("rank", f"NCCL's RAS {how}: {who}{where}", rank)


def _flight(
    rows: Iterable[_Row], places: Mapping[tuple[int, int], int], communicators: Sequence[Communicator], said: _Said
) -> None:
    groups: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    times: dict[tuple[int, str], int] = {}
    time_outs: dict[tuple[int, str], int | None] = {}
    for row in rows:
        rank = places.get((row["pid"], row["start_ns"]))
        if rank is not None:
            comm = _comm_of(row, rank, communicators)
            groups[rank, comm].append(_operation(row, comm))
            times[rank, comm] = row["ts_ns"]
            time_outs[rank, comm] = _nanoseconds(row["timeout_ms"])
    for (rank, comm), operations in groups.items():
        said[rank].append(
            Witness(
                "flight_recorder",
                comm,
                times[rank, comm],
                operations=tuple(operations),
                time_out_ns=time_outs[rank, comm],
            )
        )


def _nanoseconds(ms: int | None) -> int | None:
    return ms * 1_000_000 if ms is not None and 0 < ms <= _LONGEST_MS else None


def _comm_of(row: _Row, rank: int, communicators: Sequence[Communicator]) -> str:
    """Returns the communicator of a record: the rank's only communicator with the group's name, else "group NAME"."""
    names = {name for name in (row["pg_name"], row["pg_desc"]) if name and name != "undefined"}
    named = [c for c in communicators if (c.comm in names or c.name in names) and _has(c, rank)]
    return named[0].comm if len(named) == 1 else f"group {_text(row['pg_desc'] or row['pg_name'])}"


def _has(communicator: Communicator, rank: int) -> bool:
    return not communicator.members or any(member.rank == rank for member in communicator.members)


def _operation(row: _Row, comm: str) -> Operation:
    called, done = row["time_created_ns"], row["time_discovered_completed_ns"]
    dtype = next(iter(_listed(row["input_dtypes"])), None)
    return Operation(
        comm,
        row["p2p_seq_id"] if row["is_p2p"] else row["collective_seq_id"],
        _op(row["profiling_name"]),
        called,
        done,
        state=row["state"],
        dtype=dtype[:_MAX_TEXT].lower() if isinstance(dtype, str) else None,
        count=_elements(row["input_sizes"]),
        source="flight_recorder",
    )


def _op(name: str | None) -> str | None:
    """Returns all_gather for "nccl:_all_gather_base", and send for "nccl:send 0->1"."""
    if not name:
        return None
    op = name.partition(":")[2].partition(" ")[0].strip("_")
    return op.removesuffix("_base").removesuffix("_coalesced")[:_MAX_TEXT] or None


def _elements(sizes: str | None) -> int | None:
    total = 0
    for shape in _listed(sizes):
        if not isinstance(shape, list) or not all(isinstance(length, int) for length in shape):
            return None
        count = 1
        for length in shape:
            count *= length
        total += count
    return total if 0 <= total < 1 << 63 and sizes else None


def _listed(text: str | None) -> list[Any]:
    """Returns the JSON list in a column; empty for any other text, which a job could write."""
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _text(value: str | None) -> str | None:
    return value[:_MAX_TEXT] if value else None
