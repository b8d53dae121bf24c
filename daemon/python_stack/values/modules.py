"""Reads the rank of a process from its Python modules, if its environment does not show the rank.

JAX: ``jax._src.distributed.State`` (jax/_src/distributed.py of 0.4 to 0.12), which is set before the ranks meet. vLLM:
the ``GroupCoordinator`` of all ranks (vllm/distributed/parallel_state.py of 0.6 to 0.32). torch: the default process
group (torch/distributed/distributed_c10d.py of 2.1 to 2.15).
"""

from __future__ import annotations

import re
import time

from probing.daemon.processes.identity import MAX_WORLD, Ranks
from probing.daemon.processes.ranking import ModuleState
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.stack_wire import NamedVariable

__all__ = ("module_state",)

TIMEOUT_S = 1.0
_JAX = "module:jax._src.distributed.global_state"
_VLLM = "module:vllm.distributed.parallel_state._WORLD"
_TORCH = "module:torch.distributed.distributed_c10d._world._default_pg"
_GROUP = re.compile(r"ProcessGroup\(rank=([0-9]{1,9}), size=([0-9]{1,9})(?:, [^()]*)?\)")
# Attributes with the rank, the number of ranks, the local rank and the coordinator.
_NAMES = (
    (f"{_JAX}.process_id", f"{_JAX}.num_processes", "", f"{_JAX}.coordinator_address"),
    (f"{_VLLM}.rank", f"{_VLLM}.world_size", f"{_VLLM}.local_rank", ""),
)
_COORDINATOR = re.compile(r"'([\w.\-\[\]:]{1,200}:[0-9]{1,5})'")


def module_state(values: Values, pid: int, start_ns: int) -> ModuleState | None:
    """Returns the rank according to the modules of a process; None if no module is imported and initialized yet.

    Raises the errors of ``Values.of_process``.
    """
    names = [_TORCH, *(name for group in _NAMES for name in group if name)]
    rows = {row["name"]: row for row in values.of_process(pid, start_ns, names, time.monotonic() + TIMEOUT_S)}
    for rank_name, size_name, local_name, coordinator_name in _NAMES:
        rank, size, local = (_whole(rows.get(name)) for name in (rank_name, size_name, local_name))
        coordinator = _coordinator(rows.get(coordinator_name))
        # The attributes are set one by one, and the job is named after the coordinator, so all must be set.
        if rank is None or size is None or not rank < size <= MAX_WORLD or (coordinator_name and not coordinator):
            continue
        return ModuleState(Ranks(rank, size, local), coordinator)
    group = _GROUP.fullmatch(_text(rows.get(_TORCH)))
    return ModuleState(Ranks(int(group[1]), int(group[2]))) if group else None


def _whole(row: NamedVariable | None) -> int | None:
    number = row["number"] if row is not None else None
    return int(number) if number is not None and 0 <= number <= MAX_WORLD and number == int(number) else None


def _coordinator(row: NamedVariable | None) -> str:
    match = _COORDINATOR.fullmatch(_text(row))
    return match[1] if match else ""


def _text(row: NamedVariable | None) -> str:
    return (row["value"] or "") if row is not None else ""
