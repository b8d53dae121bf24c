"""NCCL_* and TORCH_* are equal on all ranks.

Those that name something of one rank or node may differ: interfaces, HCAs, files, and addresses of the node's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("check",)

NAME = "variables"
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_DEVICE_MAX_", "CUDA_LAUNCH_", "PYTORCH_")
# Names of devices and files: a difference is likely meant.
_LOCAL = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_RAS_ADDR")
_LOCAL_ENDS = ("_FILE", "_DIR", "_PATH")
_Who = tuple[str, str]


def check(case: Case) -> Iterator[Result]:
    """Compares each variable over ranks; one that some ranks lack is a difference."""
    ranks: dict[str, dict[str, str]] = {}
    for node in case.nodes:
        for number, rank in enumerate(node.ranks):
            who = f"rank {rank.rank}" if rank.rank is not None else f"{node.node} number {number}"
            own = {v.name: v.value for v in rank.variables if v.name.startswith(_PREFIXES)}
            ranks[f"{who} on {node.node}"] = own
    common = {name: value for name, value in case.variables.items() if name.startswith(_PREFIXES)}
    if len(ranks) < 2:
        if common:
            yield Result(NAME, PASS, f"{len(common)} variables are the same for all ranks, by --env-file")
        else:
            yield skipped(NAME, "no variables of ranks are known: name --env-file F, or a job that runs with --job J")
        return
    differing = list(_differences(ranks))
    yield from differing
    if not differing:
        every = {name for own in ranks.values() for name in own}
        yield Result(NAME, PASS, f"{len(every)} variables are the same on all {len(ranks)} ranks")


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
        hint = "it may differ where devices have other names" if local else "give all ranks the same value"
        yield Result(NAME, WARN if local else FAIL, f"{name} differs: {text}", nodes, hint)


def _named(ranks: list[str]) -> str:
    return names(ranks) if len(ranks) <= 4 else f"{len(ranks)} ranks"
