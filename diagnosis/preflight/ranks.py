"""Checks of the ranks before a job: their numbers, places and variables."""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped
from probing.diagnosis.ranks import Placed, check_ranks

__all__ = ("check_numbers", "check_variables")

RANKS = "ranks"


def check_numbers(case: Case) -> Iterator[Result]:
    """Fails for each rule of numbering that the ranks of all nodes together break."""
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
        yield skipped(RANKS, "no ranks are known: list them in --env-file F, or name a job that runs with --job J")
        return
    violations = check_ranks(placed, whole=not case.silent)
    nodes_of: dict[int | None, set[str]] = {}
    for one in placed:
        nodes_of.setdefault(one.rank, set()).add(one.node)
    for violation in violations:
        nodes = tuple(sorted({name for rank in violation.ranks for name in nodes_of.get(rank, ())}))
        yield Result(
            RANKS,
            FAIL,
            violation.text,
            nodes,
            "`probingctl ranks check --workers W --master M` shows the launcher's ranks",
        )
    if violations:
        return
    known, size = len(placed), max((one.world_size or 0 for one in placed), default=0)
    if known < size:
        yield skipped(RANKS, f"only {known} of {size} ranks are known: the nodes of the others did not answer")
        return
    covered = "1 rank covers 0" if known == 1 else f"{known} ranks cover 0 to {known - 1}"
    yield Result(RANKS, PASS, f"{covered}, and LOCAL_RANK once on each node")


VARIABLES = "variables"
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_DEVICE_MAX_", "CUDA_LAUNCH_", "PYTORCH_")
# Variables with names of devices and files, which are likely to differ on purpose.
_LOCAL = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_RAS_ADDR")
_LOCAL_ENDS = ("_FILE", "_DIR", "_PATH")


def check_variables(case: Case) -> Iterator[Result]:
    """Compares each variable between ranks; a variable that some ranks lack is a difference."""
    ranks: dict[str, dict[str, str]] = {}
    for node in case.nodes:
        for number, rank in enumerate(node.ranks):
            who = f"rank {rank.rank}" if rank.rank is not None else f"{node.node} number {number}"
            own = {v.name: v.value for v in rank.variables if v.name.startswith(_PREFIXES)}
            ranks[f"{who} on {node.node}"] = own
    common = {name: value for name, value in case.variables.items() if name.startswith(_PREFIXES)}
    if len(ranks) < 2:
        if common:
            yield Result(VARIABLES, PASS, f"{len(common)} variables from --env-file are the same for all ranks")
        else:
            yield skipped(
                VARIABLES, "no variables of ranks are known: name --env-file F, or a job that runs with --job J"
            )
        return
    differing = list(_differences(ranks))
    yield from differing
    if not differing:
        every = {name for own in ranks.values() for name in own}
        yield Result(VARIABLES, PASS, f"{len(every)} variables are the same on all {len(ranks)} ranks")


def _differences(ranks: dict[str, dict[str, str]]) -> Iterator[Result]:
    for name in sorted({name for own in ranks.values() for name in own}):
        found: dict[str | None, list[str]] = {}
        for who, own in ranks.items():
            found.setdefault(own.get(name), []).append(who)
        if len(found) < 2:
            continue
        order = sorted(found.items(), key=lambda item: (-len(item[1]), str(item[0])))
        text = "; ".join(f"{'not set' if value is None else value} on {_named(own)}" for value, own in order)
        local = name in _LOCAL or name.endswith(_LOCAL_ENDS)
        nodes = tuple(sorted({who.rpartition(" on ")[2] for _, own in order[1:] for who in own}))
        hint = "check that each node needs its own value" if local else "give all ranks the same value"
        yield Result(VARIABLES, WARN if local else FAIL, f"{name} differs: {text}", nodes, hint)


def _named(ranks: list[str]) -> str:
    return names(ranks) if len(ranks) <= 4 else f"{len(ranks)} ranks"
