"""Groups and their ranks as rows: what ``group status`` and the page show."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from probing.api.text import utc
from probing.client.groups.records import GroupsSeen
from probing.groups.group import Group

if TYPE_CHECKING:
    from probing.client.render.rows import Row

__all__ = ("group_row", "order_of_worker", "rank_rows", "table_rows")

_LIVING = ("starting", "running", "ending")


def group_row(groups: GroupsSeen, group: Group) -> Row:
    """Returns the line of a group in ``group status``."""
    spec, ranks = group.spec, group.ranks()
    states = [row["rank_state"] for row in _worker_rows(groups, group)]
    living = sum(state in _LIVING for state in states)
    return {
        "group": spec.name,
        "owner": spec.owner,
        "phase": group.phase,
        "since": utc(group.since_ns) if group.since_ns else None,
        "generation": group.generation,
        "ranks": f"{living}/{len(ranks)}",
        "master": f"{group.address or ranks[0].node}:{group.port or spec.master_port}",
        "why": groups.waits.get(spec.name) or group.reason or None,
        "version": spec.version,
        "restarts": group.restarts,
        "excluded": list(group.excluded),
        "command": list(spec.command),
    }


def rank_rows(groups: GroupsSeen, group: Group) -> list[Row]:
    """Returns a row for each rank of the present generation. If a rank's worker reports nothing, the row says so."""
    by_worker = {row["worker"]: row for row in _worker_rows(groups, group)}
    launchers = {row["worker"]: row["state"] for row in groups.workers}
    rows: list[Row] = []
    for rank in group.ranks():
        row = by_worker.get(rank.worker)
        launcher = launchers.get(rank.worker)
        rows.append(
            {
                "rank": rank.rank,
                "worker": rank.worker,
                "node": rank.node,
                "launcher": launcher or "none",
                "state": row["rank_state"] if row else "not started",
                "since": row["since"] if row else None,
                "pid": row["pid"] if row else None,
                "exit_code": row["exit_code"] if row else None,
                "reason": row["reason"] if row else (None if launcher else f"no launcher serves {rank.worker}"),
                "log": row["log"] if row else None,
            }
        )
    return rows


def table_rows(group: Group) -> list[Row]:
    """Returns the rank table: the variables of each worker, as ``--dry-run`` shows them."""
    return [{**asdict(rank), "master": f"{rank.master_addr}:{rank.master_port}"} for rank in group.ranks()]


def order_of_worker(worker: str) -> tuple[str, int]:
    """Returns the key by which workers ``NODE-N`` are sorted: the node, and the number."""
    node, _, number = worker.rpartition("-")
    return node, int(number) if number.isdecimal() else 0


def _worker_rows(groups: GroupsSeen, group: Group) -> list[Row]:
    name, generation = group.spec.name, group.generation
    return [row for row in groups.workers if row["group_name"] == name and (row["generation"] or 0) >= generation - 1]
