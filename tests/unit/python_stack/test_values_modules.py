"""Ranks in the state of Python modules, whatever is found there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.processes.identity import Ranks
from probing.daemon.processes.ranking import ModuleState
from probing.daemon.python_stack.values.modules import module_state

JAX = "module:jax._src.distributed.global_state"
VLLM = "module:vllm.distributed.parallel_state._WORLD"


class Values:
    """Answers with ``values`` by name: text and number."""

    def __init__(self, **values: tuple[Any, Any]) -> None:
        self.values = values

    def of_process(self, pid: int, start_ns: int, names: list[str], deadline: float) -> list[Any]:
        found = []
        for name in names:
            value, number = self.values.get(name.rpartition(".")[2], (None, None))
            here = (JAX if "coordinator_address" in self.values else VLLM) in name
            shown = (value, number) if here else (None, None)
            found.append({"name": name, "value": shown[0], "number": shown[1], "reason": ""})
        return found


def jax(rank: float | None, size: float | None, coordinator: str | None) -> Values:
    return Values(process_id=("", rank), num_processes=("", size), coordinator_address=(coordinator, None))


def test_jax_names_rank_size_and_coordinator() -> None:
    assert module_state(jax(1.0, 2.0, "'10.0.0.1:1234'"), 1, 1) == ModuleState(Ranks(1, 2), "10.0.0.1:1234")
    assert module_state(jax(0.0, 2.0, "'[::1]:1234'"), 1, 1) == ModuleState(Ranks(0, 2), "[::1]:1234")


@pytest.mark.parametrize(
    "values",
    [
        jax(None, None, None),
        jax(1.0, 2.0, None),
        jax(3.0, 2.0, "'a:1'"),
        jax(-1.0, 2.0, "'a:1'"),
        jax(0.5, 2.0, "'a:1'"),
        jax(float("nan"), float("inf"), "'a:1'"),
        jax(0.0, 1e300, "'a:1'"),
        jax(0.0, 2.0, "'a b:1'"),
        jax(0.0, 2.0, "'a:\\x1b'"),
        jax(0.0, 2.0, f"'{'a' * 300}:1'"),
    ],
)
def test_what_makes_no_sense_names_nothing(values: Values) -> None:
    assert module_state(values, 1, 1) is None


def test_vllm_names_rank_size_and_local_rank() -> None:
    values = Values(rank=("", 5.0), world_size=("", 8.0), local_rank=("", 1.0))
    assert module_state(values, 1, 1) == ModuleState(Ranks(5, 8, 1))


@given(st.floats(), st.floats(), st.text())
def test_any_values_give_a_sensible_rank_or_none(rank: float, size: float, coordinator: str) -> None:
    state = module_state(jax(rank, size, coordinator), 1, 1)
    assert state is None or 0 <= state.ranks.rank < state.ranks.world_size
