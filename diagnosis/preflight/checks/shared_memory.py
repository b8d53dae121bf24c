"""Shared memory (/dev/shm) is large enough.

Data loaders hand batches over in it, and NCCL the buffers between ranks of a node. A container gets 64 MiB by default
(docker run --shm-size), with which data loaders die of a bus error.
"""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import size
from probing.diagnosis.preflight.facts import Case
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("check",)

NAME = "shared_memory"
# NCCL takes about 10 MB for each pair of ranks of a node; a worker of a data loader some hundred MB.
LEAST_BYTES = 1 << 30
GOOD_BYTES = 8 << 30
_SHM = "/dev/shm"  # noqa: S108
_HINT = "mount /dev/shm with a larger size, in containers by --shm-size or an emptyDir of medium Memory"


def check(case: Case) -> Iterator[Result]:
    """Fails below LEAST_BYTES that are free, and warns below GOOD_BYTES."""
    good: dict[str, int] = {}
    for node in case.nodes:
        found = next((fs for fs in node.file_systems if fs.mount_point == _SHM), None)
        if found is None or found.available_bytes is None:
            why = node.problem("file_systems") or "it has none, or it was not read"
            yield skipped(NAME, f"{_SHM} of {node.node} is not known: {why}", [node.node])
            continue
        free = found.available_bytes
        if free >= GOOD_BYTES:
            good[node.node] = free
            continue
        text = f"{_SHM} of {node.node} has {size(free)} free"
        yield Result(NAME, FAIL if free < LEAST_BYTES else WARN, text, (node.node,), _HINT)
    if good:
        least = f"{'at least ' if len(good) > 1 else ''}{size(min(good.values()))}"
        yield Result(NAME, PASS, f"{_SHM} has {least} free on {names(good)}")
