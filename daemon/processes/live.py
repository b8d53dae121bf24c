"""Current state of watched processes and the collective backends they use, read for each query."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from probing.api.errors import ProbingError
from probing.daemon.processes.readers import Readers
from probing.daemon.processes.registry import Process
from probing.daemon.processes.rows import state_name
from probing.daemon.source import ProcessKey

__all__ = ("backends_of", "read_states")

TIMEOUT_S = 0.5
# Threads that show which collectives a process uses (torch/csrc/distributed/c10d, gloo/transport/tcp).
_THREADS = (("pt_gloo", "gloo"), ("gloo_tcp", "gloo"), ("pt_nccl", "nccl"), ("pt_ucc", "ucc"), ("pt_mpi", "mpi"))
_log = logging.getLogger(__name__)


def read_states(readers: Readers, processes: list[Process]) -> dict[ProcessKey, tuple[str | None, list[str]]]:
    """State and thread names of each process, without those that could not be read in time."""
    if not processes:
        return {}
    targets = [list(process.key) for process in processes]
    try:
        payload = readers.call("state", timeout=TIMEOUT_S, targets=targets, threads=True).payload
    except ProbingError as e:
        _log.warning("the states of processes are not known: %s", e.message)
        return {}
    found: dict[ProcessKey, tuple[str | None, list[str]]] = {}
    for process, seen in zip(processes, json.loads(payload), strict=True):
        found[process.key] = (state_name(seen["state"]), seen["threads"]) if seen else ("exited", [])
    return found


def backends_of(threads: Iterable[str]) -> set[str]:
    """The collective backends of threads with these names."""
    return {backend for name in threads for prefix, backend in _THREADS if name.startswith(prefix)}
