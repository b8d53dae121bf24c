"""Ranks cover 0..WORLD_SIZE-1 once, and LOCAL_RANK is there once a host, by the rules of ``ranks check``."""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, PASS, Result, skipped
from probing.diagnosis.ranks import Placed, check_ranks

__all__ = ("check",)

NAME = "ranks"


def check(case: Case) -> Iterator[Result]:
    """Fails for each rule that the ranks of the nodes break together."""
    placed = []
    for node in case.nodes:
        for rank in node.ranks:
            own = {v.name: v.value for v in rank.variables}
            address, port = (own.get(name, case.variables.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT"))
            master = f"{address or '?'}:{port or '?'}" if address or port else None
            placed.append(
                Placed(
                    rank=rank.rank,
                    local_rank=rank.local_rank,
                    world_size=rank.world_size,
                    node=node.node,
                    pid=rank.pid,
                    box=rank.box,
                    node_rank=rank.node_rank,
                    master=master,
                )
            )
    if not placed:
        yield skipped(NAME, "no ranks are known: list them in --env-file F, or name a job that runs with --job J")
        return
    violations = check_ranks(placed, whole=not case.silent)
    for violation in violations:
        nodes = tuple(sorted({p.node for p in placed if p.rank in violation.ranks}))
        yield Result(NAME, FAIL, violation.text, nodes, "`probingctl ranks check` shows what the launcher would give")
    if violations:
        return
    known, size = len(placed), max((one.world_size or 0 for one in placed), default=0)
    if known < size:
        yield skipped(NAME, f"only {known} of {size} ranks are known: nodes of the others did not answer")
        return
    covered = "1 rank covers 0" if known == 1 else f"{known} ranks cover 0 to {known - 1}"
    yield Result(NAME, PASS, f"{covered}, and LOCAL_RANK once on each node")
