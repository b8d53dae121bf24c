"""GPUs are visible as CUDA_VISIBLE_DEVICES says, and are as many and of one model on all nodes."""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case, Device, NodeFacts
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, compared, names, skipped

__all__ = ("check",)

NAME = "gpus"


def check(case: Case) -> Iterator[Result]:
    """Fails for entries of CUDA_VISIBLE_DEVICES that name no GPU, and where fewer are visible than ranks need."""
    with_gpus = [node for node in case.nodes if _whole(node)]
    good = []
    for node in case.nodes:
        if node not in with_gpus:
            why = node.problem("gpus") or "the node has none, or they are not read"
            if with_gpus and not node.problem("gpus"):
                yield Result(NAME, FAIL, f"{node.node} has no GPU, others have", (node.node,), "is its driver loaded?")
            else:
                yield skipped(NAME, f"no GPUs of {node.node} are known: {why}", [node.node])
            continue
        found = list(_visible(case, node))
        yield from found
        if not found and case.variable(node, "CUDA_VISIBLE_DEVICES"):
            good.append(node.node)
    if good:
        yield Result(NAME, PASS, f"CUDA_VISIBLE_DEVICES names GPUs that are there on {names(good)}")
    if with_gpus:
        counts = {node.node: str(len(_whole(node))) for node in with_gpus}
        yield from compared(NAME, "the number of GPUs,", counts, state=WARN, hint="is a GPU lost?")
        models = {n.node: ", ".join(sorted({d.name or "unknown" for d in _whole(n)})) for n in with_gpus}
        yield from compared(NAME, "the model,", models, state=WARN, hint="the slowest model sets the pace of all")


def _whole(node: NodeFacts) -> list[Device]:
    return [device for device in node.devices if device.mig is None and device.state != "gone"]


def _visible(case: Case, node: NodeFacts) -> Iterator[Result]:
    value = case.variable(node, "CUDA_VISIBLE_DEVICES")
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        return
    # CUDA stops at the first entry that it does not know.
    unknown = [part for part in parts if not any(_is(part, device) for device in node.devices)]
    text = f"CUDA_VISIBLE_DEVICES={value} on {node.node}"
    if unknown:
        hint = "CUDA sees none of the GPUs from the first unknown one on"
        yield Result(NAME, FAIL, f"{text} names {', '.join(unknown)}, which is no GPU there", (node.node,), hint)
    elif len(set(parts)) < len(parts):
        yield Result(NAME, FAIL, f"{text} names a GPU twice", (node.node,), "CUDA sees none then")
    elif (needed := len({r.local_rank for r in node.ranks if r.local_rank is not None})) > len(parts) > 1:
        yield Result(NAME, FAIL, f"{text} has fewer GPUs than the {needed} ranks there", (node.node,))


def _is(part: str, device: Device) -> bool:
    if part.isascii() and part.isdigit():
        return device.mig is None and device.device_id == int(part[:9])
    # A UUID may be cut, as long as it is the only one that fits.
    return bool(device.uuid) and len(part) > 4 and str(device.uuid).lower().startswith(part.lower())
