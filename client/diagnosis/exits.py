"""How a job ended: in words, and as facts where it ended too long ago for a node to gather them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from probing.api.text import ranks_of, sql_text
from probing.client.diagnosis.findings import ns_of
from probing.client.render.rows import Row, rows_of
from probing.diagnosis.facts import MAX_RANKS, Exit, Facts, Missing, Process, Rank
from probing.diagnosis.words import exit_text

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("facts_of_exits", "how_it_ended", "job_ended")

_MOST_NAMED = 4
_ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXITS = """
SELECT ts, node, run, rank, role, pid, start_ns, event, exit_code, signal FROM process.events
WHERE event IN ('exit', 'oom_kill') AND job = {job} ORDER BY ts DESC LIMIT 10000
"""
_UNSEEN = Missing("operations", "only the exits of its processes are known by now, not what they did")


def facts_of_exits(cluster: Cluster, job: str) -> list[Facts]:
    """Returns facts of the run of ``job`` that ended last: its ranks with their exits; none where no exit is stored."""
    runs: dict[str, list[Row]] = {}
    rows = rows_of(cluster.query(_EXITS.format(job=sql_text(job))))[::-1]
    out_of_memory = {_identity(row) for row in rows if row["event"] == "oom_kill"}
    for row in rows:
        if row["event"] == "exit":
            runs.setdefault(str(row["run"] or ""), []).append({**row, "oom": _identity(row) in out_of_memory})
    if not runs:
        return []
    run, rows = max(runs.items(), key=lambda item: str(item[1][-1]["ts"]))
    return [_facts(job, run, rows)]


def _facts(job: str, run: str, rows: Sequence[Row]) -> Facts:
    # A rank that was started again within its run has several exits: the last one counts.
    ranks = {row["rank"]: _rank(row) for row in rows if row["role"] == "trainer" and _numbered(row["rank"])}
    others = [_process(row) for row in rows if row["role"] == "launcher"]
    ends = [ns_of(row["ts"]) or 0 for row in rows]
    return Facts(
        job,
        run,
        None,
        0.0,
        max(ends),
        (),
        tuple(ranks[number] for number in sorted(ranks)),
        processes=tuple(others),
        missing=(_UNSEEN,),
    )


def _identity(row: Row) -> tuple[object, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _numbered(rank: object) -> bool:
    return isinstance(rank, int) and 0 <= rank < MAX_RANKS


def _rank(row: Row) -> Rank:
    return Rank(row["rank"], str(row["node"]), row["pid"], row["start_ns"] or 0, "exited", exit=_exit(row))


def _process(row: Row) -> Process:
    return Process(str(row["node"]), row["pid"], row["start_ns"] or 0, str(row["role"]), "exited", _exit(row))


def _exit(row: Row) -> Exit:
    return Exit(ns_of(row["ts"]) or 0, row["exit_code"], row["signal"], bool(row["oom"]))


def job_ended(facts: Facts) -> bool:
    """Whether all ranks of the job have ended."""
    return bool(facts.ranks) and all(rank.exit is not None for rank in facts.ranks)


def how_it_ended(facts: Facts) -> Iterator[str]:
    """Yields how the ranks and the launcher of a job ended, and who ended them."""
    alike: dict[str, list[int]] = {}
    for rank in facts.ranks:
        if rank.exit is not None:
            alike.setdefault(exit_text(rank.exit, rank.condition), []).append(rank.rank)
    for text, ranks in list(alike.items())[:_MOST_NAMED]:
        yield f"{ranks_of(ranks)} {text if len(ranks) == 1 else text.replace('was ', 'were ', 1)}"
    for process in facts.processes:
        if process.role == "launcher" and process.exit is not None:
            yield f"the launcher (pid {process.pid}) {exit_text(process.exit)}"
    yield from _by_whom(facts)


def _by_whom(facts: Facts) -> Iterator[str]:
    """Yields who ended the job, as far as exits show it: the kernel, or who sent a signal that asks to end."""
    ends = [rank.exit for rank in facts.ranks if rank.exit is not None]
    if any(end.oom for end in ends):
        yield "the kernel ended it for lack of memory"
    elif ends and all(end.signal in _ORDERS for end in ends):
        launchers = [process for process in facts.processes if process.role == "launcher"]
        if any(process.exit is None and process.state not in ("exited", "zombie") for process in launchers):
            yield "its launcher lives: it or a user ended the ranks"
        else:
            yield f"a scheduler{', its launcher' if launchers else ''} or a user ended it, no fault of a rank"
