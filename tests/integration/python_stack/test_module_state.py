"""The rank in the state of JAX's and vLLM's modules, as every CPython keeps it, and when the state is hostile."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import Parsers
from python_stack_helpers import ReadersOfValues, child, each_interpreter

from probing.daemon.processes.identity import Ranks
from probing.daemon.processes.procfs import parse_stat
from probing.daemon.processes.ranking import ModuleState
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.modules import module_state
from probing.daemon.python_stack.values.requests import Values

# The shapes of jax/_src/distributed.py and vllm/distributed/parallel_state.py.
JAX = """
import sys, time, types
class State:
    process_id: int = 0
    num_processes: int = 1
    def __init__(self):
        self.service = None
module = types.ModuleType("jax._src.distributed")
sys.modules["jax._src.distributed"] = module
module.global_state = state = State()
{lines}
print("ready", flush=True)
time.sleep(600)
"""
VLLM = """
import sys, time, types
class GroupCoordinator:
    def __init__(self, rank, size, local_rank):
        self.rank, self.world_size, self.local_rank, self.ranks = rank, size, local_rank, list(range(size))
module = types.ModuleType("vllm.distributed.parallel_state")
sys.modules["vllm.distributed.parallel_state"] = module
module._WORLD = GroupCoordinator(5, 7, 1)
print("ready", flush=True)
time.sleep(600)
"""
SET = "state.process_id, state.num_processes, state.coordinator_address = {}, {}, {}"


@contextmanager
def reading(python: str, code: str) -> Iterator[tuple[Values, int, int]]:
    """Gives what reads the values of a process that runs ``code``, its pid and start."""
    with child(python, "-u", "-c", code) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        start_ns = parse_stat(Path(f"/proc/{process.pid}/stat").read_bytes()).start_ns
        stacks = PythonStacks(ReadersOfValues(), Parsers())
        values = Values(ReadersOfValues(), stacks.prepare)
        try:
            yield values, process.pid, start_ns
        finally:
            values.close()
            stacks.close()


def seen(python: str, code: str) -> ModuleState | None:
    with reading(python, code) as (values, pid, start_ns):
        return module_state(values, pid, start_ns)


@each_interpreter
def test_jax_names_rank_size_and_coordinator(python: str) -> None:
    lines = SET.format(1, 2, "'127.0.0.1:1234'")
    assert seen(python, JAX.format(lines=lines)) == ModuleState(Ranks(1, 2), "127.0.0.1:1234")


@each_interpreter
def test_vllm_names_rank_size_and_local_rank(python: str) -> None:
    assert seen(python, VLLM) == ModuleState(Ranks(5, 7, 1))


TORCH = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{folder}/meet", rank=0, world_size=1)
print("ready", flush=True)
time.sleep(600)
"""


def test_torch_names_rank_and_size(tmp_path: Path) -> None:
    assert seen(sys.executable, TORCH.format(folder=tmp_path)) == ModuleState(Ranks(0, 1))


GROUPS = TORCH.replace(
    "print(",
    """from datetime import timedelta
dist.new_group([0], timeout=timedelta(seconds=777))
dist.group.WORLD._get_backend(__import__("torch").device("cpu"))._set_default_timeout(timedelta(minutes=31))
print(""",
)


def test_each_group_of_torch_has_its_time_out(tmp_path: Path) -> None:
    name = "module:torch.distributed.distributed_c10d._pg_names"
    with reading(sys.executable, GROUPS.format(folder=tmp_path)) as (values, pid, start_ns):
        (row,) = values.of_process(pid, start_ns, [name], time.monotonic() + 5)
    assert row["value"] == (
        "{ProcessGroup(rank=0, size=1, gloo, timeout=1860000 ms): '0',"
        " ProcessGroup(rank=0, size=1, gloo, timeout=777000 ms): '1'}"
    )


@pytest.mark.parametrize("words", ["0, 0", "7 << 60, 7", "id(kept) + 16, 23", "4104, 0"])
def test_a_class_with_the_name_of_a_process_group_names_nobody(words: str) -> None:
    code = f"""
import struct, sys, time, types
class Group:
    __slots__ = ("held", "other")
Group.__name__ = "torch._C._distributed_c10d.ProcessGroup"
kept = b"x" * 4096
module = types.ModuleType("torch.distributed.distributed_c10d")
sys.modules[module.__name__] = module
module._world = types.SimpleNamespace(_default_pg=Group())
module._world._default_pg.held, module._world._default_pg.other = {words}
print("ready", flush=True)
time.sleep(600)
"""
    assert seen(sys.executable, code) is None


@pytest.mark.parametrize(
    "lines",
    [
        "",
        SET.format(3, 2, "'a:1'"),
        SET.format("state", "[state]", "{1: state}"),
        SET.format("1 << 4000", "1 << 5000", "'a:1'"),
        SET.format("1.5", "True", "'a:1'"),
        SET.format(0, 2, "'a:1' * 10_000_000"),
        SET.format(0, 2, "'\\x1b[2J:1'"),
        SET.format(0, 2, "b'a:1'"),
        "module.global_state = module",
        "State.process_id = property(lambda self: print('code ran', flush=True))",
        "module.__dict__.clear()",
        "del sys.modules['jax._src.distributed']",
        "sys.modules['jax._src.distributed'] = 7",
    ],
)
def test_hostile_state_names_nobody(lines: str) -> None:
    assert seen(sys.executable, JAX.format(lines=lines)) is None
