"""The entries of the sampler's maps, in the layout that the compiler gave them; needs no BPF."""

from __future__ import annotations

import errno
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import AttachError, UnsupportedTarget
from probing.daemon.bpf import build as build_module
from probing.daemon.bpf.build import compile_object
from probing.daemon.bpf.libbpf import Object
from probing.daemon.python_stack.sampling.kernel_maps import SampledProcesses
from probing.daemon.python_stack.walk.layouts import TABLE, Layout

LAYOUT = TABLE[3, 11]
OFFSETS = [name for name in Layout._fields if name.startswith(("thread_", "frame_", "code_", "gil_"))]


class FakeMap:
    def __init__(self, value: np.dtype[Any], room: int = 100) -> None:
        self.value, self.max_entries = value, room
        self.held: dict[int, bytes] = {}

    def update(self, key: int, value: bytes) -> None:
        if key not in self.held and len(self.held) >= self.max_entries:
            raise OSError(errno.E2BIG, "full")
        self.held[key] = value

    def lookup(self, key: int) -> Any:
        raw = self.held.get(key)
        return None if raw is None else np.frombuffer(raw, self.value)[0]

    def delete(self, key: int) -> bool:
        return self.held.pop(key, None) is not None

    def items(self) -> tuple[np.ndarray[Any, Any], None]:
        return np.array(list(self.held)), None


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.dtype[Any]]:
    source = tmp_path_factory.mktemp("python") / "python.bpf.c"
    shutil.copy(build_module.FOLDER / source.name, source)
    with Object("python", compile_object(source).read_bytes()) as found:
        values = {name: found.btf.map_types(name)[1] for name in found.maps}
    return {name: value for name, value in values.items() if value is not None}


def made(types: dict[str, np.dtype[Any]], room: int = 100) -> tuple[SampledProcesses, dict[str, FakeMap]]:
    names = ("python_processes", "python_threads", "python_seen")
    maps = {name: FakeMap(types[name], room) for name in names}
    return SampledProcesses(SimpleNamespace(maps=maps)), maps  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", TABLE.values(), ids=lambda layout: f"3.{layout.version[1]}")
def test_layout_arrives_field_by_field(types: dict[str, np.dtype[Any]], layout: Layout) -> None:
    processes, maps = made(types)
    processes.add(7, 20, layout, 0x1000, 0, 19, 5)
    told = maps["python_processes"].lookup(7)
    assert (told["start_ns"], told["rate"], told["off_rate"]) == (20, 19, 5)
    assert told["gil"] == (0 if layout.runtime_current is None else 0x1000 + layout.runtime_current)
    found = told["layout"]
    for name in found.dtype.names:
        if name not in ("instr", "gil_kind", "shim_owner"):
            offset = getattr(layout, name)
            assert found[name] == (0xFFFF if offset is None else offset), name
    assert found["instr"] == {"lasti_bytes": 1, "lasti_units": 2, "previous": 3, "current": 3}[layout.instr]
    assert found["shim_owner"] == (3 if layout.version >= (3, 12) else 0xFF)
    assert found["gil_kind"] == (1 if layout.version <= (3, 11) else 0)
    processes.add(7, 20, layout, 0x1000, 0x2000, 19, 5)
    assert maps["python_processes"].lookup(7)["layout"]["gil_kind"] == (1 if layout.version <= (3, 11) else 2)
    assert maps["python_processes"].lookup(7)["gil"] == 0x2000


@given(st.data())
def test_layout_that_programs_cannot_follow_is_refused(types: dict[str, np.dtype[Any]], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(OFFSETS), min_size=1, max_size=3, unique=True))
    offsets = {name: data.draw(st.one_of(st.integers(0, 200), st.integers(0, 1 << 20))) for name in names}
    layout = LAYOUT._replace(**offsets)
    processes, maps = made(types)
    refused = None
    try:
        processes.add(7, 20, layout, 0, 0, 19, 0)
    except UnsupportedTarget as e:
        refused = e
    if refused is not None:
        assert refused.hint
        assert not maps["python_processes"].held
        return
    found = maps["python_processes"].lookup(7)["layout"]
    # What the program reads at once: whole words within a window of 128 bytes.
    frame = [int(found[name]) for name in ("frame_previous", "frame_code", "frame_instr")]
    code = [int(found[name]) for name in ("code_filename", "code_name", "code_short_name", "code_linetable")]
    first = int(found["code_firstlineno"])
    assert max(*frame, int(found["frame_owner"]) - 7) + 8 <= 128
    assert max(*code, first) + 8 - (min(*code, first) & ~7) <= 128
    assert all(offset % 8 == 0 for offset in (*frame, *code))
    assert first % 4 == 0


def test_threads_are_replaced_and_those_of_others_left_alone(types: dict[str, np.dtype[Any]]) -> None:
    processes, maps = made(types)
    held = maps["python_threads"].held
    for pid in (7, 8):
        processes.add(pid, pid * 10, LAYOUT, 0, 0, 19, 0)
    assert processes.set_threads(7, 70, {7: (0x100, 1), 71: (0, 0)}) == 0
    assert processes.set_threads(8, 80, {8: (0x200, 2)}) == 0
    thread = maps["python_threads"].lookup(7)
    assert (thread["state"], thread["thread_id"], thread["start_ns"]) == (0x100, 1, 70)
    # The thread 71 ended, and its number is one of process 8 now.
    processes.set_threads(8, 80, {8: (0x200, 2), 71: (0x300, 3)})
    processes.set_threads(7, 70, {7: (0x100, 1)})
    assert sorted(held) == [7, 8, 71]
    processes.remove(7, 71)
    assert sorted(held) == [7, 8, 71]
    processes.remove(7, 70)
    assert sorted(held) == [8, 71]
    assert processes.set_threads(7, 70, {7: (0x100, 1)}) == 0
    assert sorted(held) == [8, 71]
    # A new process with the number of one that ended takes its place.
    processes.add(8, 81, LAYOUT, 0, 0, 19, 0)
    assert held == {}
    processes.clear()
    assert maps["python_processes"].held == {}


def test_rates_of_who_is_not_sampled_change_nothing(types: dict[str, np.dtype[Any]]) -> None:
    processes, maps = made(types)
    processes.set_rate(7, 70, 19, 0)
    processes.add(7, 70, LAYOUT, 0, 0, 19, 0)
    processes.set_rate(7, 71, 99, 9)
    assert maps["python_processes"].lookup(7)["rate"] == 19
    processes.set_rate(7, 70, 99, 9)
    told = maps["python_processes"].lookup(7)
    assert (told["rate"], told["off_rate"], told["layout"]["frame_instr"]) == (99, 9, LAYOUT.frame_instr)


def test_full_maps_are_said(types: dict[str, np.dtype[Any]]) -> None:
    processes, maps = made(types, room=1)
    processes.add(7, 70, LAYOUT, 0, 0, 19, 0)
    with pytest.raises(AttachError) as caught:
        processes.add(8, 80, LAYOUT, 0, 0, 19, 0)
    assert caught.value.hint
    assert processes.set_threads(7, 70, {7: (1, 1), 71: (2, 2)}) == 1
    # Told again as soon as there is room.
    maps["python_threads"].max_entries = 8
    assert processes.set_threads(7, 70, {7: (1, 1), 71: (2, 2)}) == 0
    assert sorted(maps["python_threads"].held) == [7, 71]


def test_one_owner_leaves_room_for_others(types: dict[str, np.dtype[Any]]) -> None:
    processes, maps = made(types, room=8)
    for pid in range(1, 7):
        processes.add(pid, 1, LAYOUT, 0, 0, 19, 0, owner=7)
    with pytest.raises(AttachError, match="of its user"):
        processes.add(7, 1, LAYOUT, 0, 0, 19, 0, owner=7)
    processes.add(20, 1, LAYOUT, 0, 0, 19, 0, owner=8)
    # Rates of processes that are in the map still change.
    processes.set_rate(6, 1, 99, 0)
    left_out = [processes.set_threads(pid, 1, {10 * pid: (1, 1), 10 * pid + 1: (1, 2)}) for pid in range(1, 7)]
    assert left_out == [0, 0, 0, 2, 2, 2]
    assert processes.set_threads(20, 1, {200: (1, 1), 201: (1, 2)}) == 0
    processes.remove(1, 1)
    assert processes.set_threads(4, 1, {40: (1, 1), 41: (1, 2)}) == 0
    processes.add(7, 1, LAYOUT, 0, 0, 19, 0, owner=7)
    assert len(maps["python_threads"].held) == 8


def test_a_thread_that_has_no_room_any_more_leaves_no_entry(types: dict[str, np.dtype[Any]]) -> None:
    processes, maps = made(types, room=8)
    processes.add(7, 70, LAYOUT, 0, 0, 19, 0)
    assert processes.set_threads(7, 70, {7: (0x100, 1), 72: (0x200, 2)}) == 0
    # GIVEN another thread, and that the last one has another state, for which there is no room
    assert processes.set_threads(7, 70, {7: (0x100, 1), 71: (0x300, 3), 72: (0x400, 4)}) == 1
    # THEN it is sampled no more with the state that it had
    assert sorted(maps["python_threads"].held) == [7, 71]
    # AND nothing is left after the end of the process
    processes.remove(7, 70)
    assert maps["python_threads"].held == {}
