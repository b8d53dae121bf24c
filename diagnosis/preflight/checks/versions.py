"""The same Python, torch, CUDA, NCCL, driver and kernel on all nodes.

A difference of the kernel alone is a warning: jobs run across kernels, yet figures differ. NCCL itself refuses
communicators across its versions (ncclCommInitRank, "mismatched NCCL version").
"""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, WARN, Result, compared, names, skipped

__all__ = ("check",)

NAME = "versions"
_OF_PYTHON = ("python", "torch", "cuda", "nccl")
_OF_NODE = ("driver", "kernel")
_TITLES = {
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "nccl": "NCCL",
    "driver": "the GPU driver",
    "kernel": "the kernel",
}
_HINT = "use one image, or one environment, on all nodes"


def check(case: Case) -> Iterator[Result]:
    """Compares each version over nodes; one that is there on some nodes only is a difference."""
    answered = [node for node in case.nodes if not node.problem("versions")]
    for node in case.nodes:
        if why := node.problem("versions"):
            yield skipped(NAME, f"the versions of {node.node} are not known: {why}", [node.node])
    if not case.python and case.nodes:
        yield skipped(NAME, "Python, torch, CUDA and NCCL were not asked for: name the interpreter with --python PATH")
    for name in (*(_OF_PYTHON if case.python else ()), *_OF_NODE):
        chosen = answered if name in _OF_PYTHON else list(case.nodes)
        values = {node.node: next((v.value for v in node.versions if v.name == name), "") for node in chosen}
        if not any(values.values()):
            continue
        if name == "kernel" or all(values.values()):
            state = WARN if name == "kernel" else FAIL
            yield from compared(NAME, _TITLES[name], values, state=state, hint=_HINT)
        else:
            without = [node for node, value in values.items() if not value]
            others = sorted({value for value in values.values() if value})
            text = f"{names(without)} without {_TITLES[name]}, the others have {names(others)}"
            yield Result(NAME, FAIL, text, tuple(sorted(without)), _HINT)
