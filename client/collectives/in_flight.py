"""Finds operations in flight. ``diagnosis.joins`` decides which ranks are in an operation and which ranks have not
joined it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from probing.client.collectives.standing import Run
from probing.client.render.rows import Row

if TYPE_CHECKING:
    from probing.diagnosis.wait_graph import Pending

__all__ = ("CALLED", "INFLIGHT", "NOTABLE_NS", "in_flight", "not_joined")

# The minimum age of a reported operation in flight, ns.
NOTABLE_NS = 1_000_000_000
INFLIGHT = """
SELECT job, run, comm, comm_name AS name, backend, comm_size AS size, op, seq, rank, comm_rank, node, pid, tid, bytes,
  state, age_ns
FROM comm.inflight WHERE {where}
"""
# The last operation of each rank, also of ranks that recently ended. `seen_ns`: operations that began longer ago
# than this were not seen; NULL: all were seen.
CALLED = """
SELECT node, job, run, pid, comm, comm_size AS size, rank, comm_rank, seq,
  epoch_ns(now()) - epoch_ns(attached) AS seen_ns, ended IS NULL AS lives
FROM comm.progress WHERE {where}
"""


def in_flight(
    live: Iterable[Row], inflight: Iterable[Row], called: Iterable[Row], members: Iterable[Row] = ()
) -> dict[Run, list[Pending]]:
    """Returns, by job and run, the operations that have been in flight for at least NOTABLE_NS, ordered by communicator
    and sequence number.

    ``live``: the living trainers; ``inflight`` and ``called``: rows of INFLIGHT and CALLED; ``members``: rows with
    ``comm``, ``size`` and ``rank`` of members of communicators.
    """
    parts: dict[Run, list[list[Row]]] = defaultdict(lambda: [[], [], [], []])
    for number, rows in enumerate((live, inflight, called, members)):
        for row in rows:
            parts[row["job"], row["run"]][number].append(row)
    return {run: _of_run(*rows) for run, rows in parts.items() if any(_notable(row["age_ns"]) for row in rows[1])}


def not_joined(pending: Iterable[Pending]) -> set[int]:
    """Returns the ranks that have not joined an operation in flight and are in no operation themselves."""
    found = list(pending)
    return {rank for one in found for rank in one.awaited}.difference(*(one.waiters for one in found))


def _of_run(live: list[Row], inflight: list[Row], called: list[Row], members: list[Row]) -> list[Pending]:
    # Imported only if an operation is notable, because the import of the rules takes a while.
    from probing.diagnosis.case import Case
    from probing.diagnosis.facts import Communicator, Facts, Member, Operation, Progress, Rank

    living = {row["rank"] for row in live if row["rank"] is not None}
    opened: dict[int, list[Operation]] = {number: [] for number in living}
    progress: dict[int, list[Progress]] = defaultdict(list)
    seen: dict[int, int] = {}
    known: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for row in (*inflight, *called, *members):
        number, comm = row["rank"] if row["rank"] is not None else row.get("comm_rank"), row["comm"] or ""
        if number is None or (number in living and not row.get("lives", True)):
            continue
        if row.get("seen_ns") is not None:
            seen[number] = -row["seen_ns"]
        if row["comm"] is None and "age_ns" not in row:
            # No operation of the rank was seen.
            continue
        known[comm].add(number)
        sizes[comm] = max(sizes[comm], row["size"] or 0)
        operations = opened.setdefault(number, [])
        if "age_ns" in row:
            began_ns = None if row["age_ns"] is None else -row["age_ns"]
            operations.append(Operation(comm, row["seq"], row["op"], began_ns))
        elif "seq" in row:
            progress[number].append(Progress(comm, row["seq"], None, 0, None))
    world = max((row["world_size"] or 0 for row in live), default=None)
    ranks = (
        Rank(
            number,
            "",
            0,
            0,
            "running" if own or number in living else "exited",
            seen_from_ns=seen.get(number),
            open=tuple(own),
            progress=tuple(progress[number]),
        )
        for number, own in sorted(opened.items())
    )
    comms = (
        Communicator(comm, None, None, sizes[comm] or None, tuple(Member(rank, rank) for rank in sorted(own)))
        for comm, own in known.items()
    )
    # Only ages matter here, so the present time is set to 0.
    facts = Facts("", "", world, 0.0, 0, (), tuple(ranks), tuple(comms))
    pending = [one for one in Case(facts).in_flight if _notable(one.age_ns)]
    return sorted(pending, key=lambda one: (str(one.comm), one.seq or 0, str(one.op)))


def _notable(age_ns: int | None) -> bool:
    return age_ns is None or age_ns >= NOTABLE_NS
