"""Modules of this very interpreter, recorded and then spoilt: whatever is read, it ends, and is a list of names."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from test_values_fuzz import MAX_CALLS, OWN, Recording, spoilt

from probing.api.errors import CorruptTarget
from probing.daemon.processes.memory import FakeMemory, Memory
from probing.daemon.python_stack.torch_modules.naming import KnownModules, ModuleNames, TorchModule
from probing.daemon.python_stack.values.heap import Heap
from probing.daemon.python_stack.values.objects import Objects


class Module:
    def __init__(self, **children: Module) -> None:
        self.training = True
        self._modules = children


class Net(Module):
    """The outermost module."""


LAYERS = Module(**{str(number): Module(mlp=Module()) for number in range(5)})
NET = Net(module=Net(layers=LAYERS))
INNER = NET._modules["module"]
MLP = LAYERS._modules["3"]._modules["mlp"]
CHAIN = [id(NET), id(INNER), id(LAYERS._modules["3"]), id(LAYERS._modules["3"]), id(MLP)]
NAMES = [("Net", "Net"), ("Net", "Net"), ("Net", "layers.3"), ("Net", "layers.3.mlp")]


def named(memory: Memory, known: KnownModules, values: list[int]) -> list[TorchModule]:
    return ModuleNames(Objects(Heap(memory, time.monotonic() + 60), OWN), known).of(values)


@pytest.fixture(scope="module")
def image() -> dict[int, bytes]:
    recording = Recording()
    assert [module[:2] for module in named(recording, KnownModules(), CHAIN)] == NAMES
    return recording.segments()


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_spoilt_image_gives_names(image: dict[int, bytes], data: st.DataObject) -> None:
    near, before = [], 0
    for base, part in image.items():
        near += [(before + a - base) // 8 for a in (*CHAIN, id(LAYERS), id(Module)) if base <= a < base + len(part)]
        before += len(part)
    word = st.one_of(
        st.integers(0, 1 << 24), st.tuples(st.sampled_from(near), st.integers(0, 50)).map(lambda pair: sum(pair))
    )
    changes = data.draw(st.lists(st.tuples(word, st.integers(0, 2), st.integers(0, 1 << 40)), max_size=40))
    values = data.draw(st.permutations([*CHAIN, 0, 7, id(Module), 1 << 50]))
    known = KnownModules()
    # What is known is of the time before the change, or of none.
    if data.draw(st.booleans()):
        named(FakeMemory(image), known, CHAIN)
    memory = FakeMemory(spoilt(image, changes), max_calls=MAX_CALLS)
    for _ in range(2):
        try:
            modules = named(memory, known, values)
        except CorruptTarget:
            continue
        assert len(modules) <= len(values)
        for text in (text for module in modules for text in module):
            assert 0 < len(text) <= 512
            assert text.isprintable()
    assert memory.calls < MAX_CALLS


def test_nothing_where_modules_should_be() -> None:
    assert named(FakeMemory({}), KnownModules(), [0, 8, 7, 1 << 50, (1 << 64) - 8]) == []
    assert named(FakeMemory({}), KnownModules(), []) == []


def test_what_is_known_is_no_longer_there(image: dict[int, bytes]) -> None:
    known = KnownModules()
    assert named(FakeMemory(image), known, CHAIN)
    assert named(FakeMemory({}), known, CHAIN) == []
    assert [module[:2] for module in named(FakeMemory(image), known, CHAIN)] == NAMES
