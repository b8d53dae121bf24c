"""Finding the runtime, reading memory, naming threads, and the message between reader and collector."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, InternalError, NotPython, ProcessGone, UnsupportedTarget, UsageError
from probing.daemon.ipc import MAX_HEADER
from probing.daemon.processes.memory import PAGE, FakeMemory, ProcessMemory
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.python_stack.stacks.dump import handlers
from probing.daemon.python_stack.walk.locate import RuntimeInfo, RuntimeSymbols, candidates, locate, sys_hexversion
from probing.daemon.python_stack.walk.threads import KernelThread, match_threads, read_start_ns, read_threads
from probing.daemon.python_stack.walk.walker import RawThread
from probing.daemon.stack_wire import ProcessStacks, join_stacks, pack, split_stacks, unpack

MAPS = b"""\
5555555fe000-555555600000 r--p 00000000 08:01 11 /opt/bin/trainer
555555600000-555555601000 r-xp 00002000 08:01 11 /opt/bin/trainer
7f0000000000-7f0000100000 r--p 00000000 08:01 12 /opt/lib/libpython3.so
7f0000200000-7f0000300000 r-xp 00010000 08:01 13 /opt/lib/libpython3.12.so.1.0
7f00001f0000-7f0000200000 r--p 00000000 08:01 13 /opt/lib/libpython3.12.so.1.0
7f0000400000-7f0000500000 r--p 00000000 08:01 14 /opt/lib/libpython3.12_helper/x.so
7f0000600000-7f0000601000 rw-p 00000000 00:00 0 [heap]
7f0000700000-7f0000800000 r--p 00000000 08:01 15 /usr/bin/python3.11
"""


def test_a_library_comes_before_programs() -> None:
    found = candidates(parse_maps(MAPS))
    assert [m.path for m in found] == [b"/opt/lib/libpython3.12.so.1.0", b"/usr/bin/python3.11", b"/opt/bin/trainer"]
    assert candidates([]) == []


def test_addresses_with_and_without_relocation() -> None:
    library, program, _ = candidates(parse_maps(MAPS))
    names = {"_PyRuntime": 0x5000, "Py_Version": 0x2000}
    found = locate(library, RuntimeSymbols(names, 0x123, True), 0x030C01F0)
    assert (found.runtime, found.version_at) == (0x7F00001F5000, 0x7F00001F2000)
    assert (found.version, found.python) == ((3, 12), "3.12.1")
    assert RuntimeInfo.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    fixed = locate(program, RuntimeSymbols(names, 0x400000, False), 0x030D00B2)
    assert (fixed.runtime, fixed.python) == (0x5000, "3.13.0b2")


@pytest.mark.parametrize(
    ("exported", "version"),
    [
        (("PyCode_NewWithPosOnlyArgs",), (3, 8)),
        (("PyCode_NewWithPosOnlyArgs", "PyFrame_GetCode"), (3, 9)),
        (("PyCode_NewWithPosOnlyArgs", "PyFrame_GetCode", "Py_NewRef"), (3, 10)),
    ],
)
def test_versions_without_a_number(exported: tuple[str, ...], version: tuple[int, int]) -> None:
    names = dict.fromkeys(("_PyRuntime", *exported), 16)
    found = locate(candidates(parse_maps(MAPS))[0], RuntimeSymbols(names, 0, True))
    assert (found.version, found.python) == (version, f"3.{version[1]}")


def test_what_is_no_runtime() -> None:
    mapping = candidates(parse_maps(MAPS))[0]
    with pytest.raises(NotPython):
        locate(mapping, RuntimeSymbols({"Py_Version": 16}, 0, True))
    for names in ({"_PyRuntime": 16}, {"_PyRuntime": 16, "Py_Version": 16}):
        with pytest.raises(UnsupportedTarget):
            locate(mapping, RuntimeSymbols(names, 0, True))


@pytest.mark.parametrize("request_", [{}, {"pid": 1}, {"pid": os.getpid(), "start_ns": 0, "runtime": {"runtime": 1}}])
def test_requests_that_make_no_sense(request_: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        handlers()["stacks"](request_)


def test_ranges_around_one_that_cannot_be_read() -> None:
    size = 4 * PAGE
    with mmap.mmap(-1, size) as area:
        area[:] = bytes(range(256)) * (size // 256)
        pin = ctypes.c_char.from_buffer(area)
        address = ctypes.addressof(pin)
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(address + PAGE), PAGE, 0) == 0
        memory = ProcessMemory(os.getpid())
        wanted = [(address, 4), (address + PAGE, 4), (address + 5, 3), (address + PAGE - 4, 8), (address + 2 * PAGE, 2)]
        expected = [bytes(range(4)), None, bytes((5, 6, 7)), None, bytes((0, 1))]
        assert memory.read_many(wanted) == expected
        assert memory.read_many([(0, 8), (8, 8), ((1 << 64) - 8, 8), (address, 0), (address, -1)]) == [None] * 5
        assert memory.read_many([]) == []
        many = [(address + i % 100, 1) for i in range(3000)]
        assert memory.read_many(many) == [bytes([i % 100]) for i in range(3000)]
        assert libc.mprotect(ctypes.c_void_p(address + PAGE), PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        del pin


def test_what_a_walk_may_cost() -> None:
    buffer = ctypes.create_string_buffer(100)
    one = [(ctypes.addressof(buffer), 60)]
    with pytest.raises(CorruptTarget):
        ProcessMemory(os.getpid(), max_bytes=100).read_many(one * 2)
    memory = ProcessMemory(os.getpid(), max_calls=1)
    memory.read_many(one)
    with pytest.raises(CorruptTarget):
        memory.read_many(one)


def test_a_process_that_has_gone() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    for read in (read_start_ns, read_threads, lambda pid: ProcessMemory(pid).read_many([(1 << 20, 8)])):
        with pytest.raises(ProcessGone):
            read(pid)


def test_threads_as_the_kernel_has_them() -> None:
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait)
    other.start()
    found = {t.tid: t for t in read_threads(os.getpid())}
    assert next(iter(found)) == os.getpid()
    assert found[threading.get_native_id()].state == "running"
    assert other.native_id in found
    waiting.set()
    other.join()


def raw(native: int | None, *pthread: int) -> RawThread:
    return RawThread(1, 2, native, None, pthread)


def test_which_thread_is_which() -> None:
    kernel = [KernelThread(1000 + n, n, "", "sleeping") for n in (1, 7, 8)]
    assert match_threads([raw(7, 0, 0, 0), raw(1, 0, 0, 0)], kernel) == [1007, 1001]
    # No tid in the thread state, and the C library's is at the second place.
    assert match_threads([raw(None, 7, 1, 0), raw(None, 9, 8, 0)], kernel) == [1001, 1008]
    # After a fork the main thread's is stale; one thread is no more.
    assert match_threads([raw(5, 1, 0, 0), raw(6, 5, 0, 0)], kernel) == [1001, None]
    assert match_threads([], kernel) == []


def dumped(threads: int, frames: int, name: str) -> dict[str, object]:
    frame = {"file": "/f", "lineno": 3, "frame_type": "Python", "ip": 1 << 46, "entry": False}
    return {
        "threads": [
            {"tid": t, "complete": True, "frames": [{"func": f"{name}{i}", **frame} for i in range(frames)]}
            for t in range(threads)
        ],
        "reads": 2,
    }


def test_a_message_gives_back_what_was_packed() -> None:
    dump = dumped(3, 5, "größe")
    assert unpack(json.loads(json.dumps(pack(dump)))) == dump
    for broken in (
        {},
        {"codes": [], "threads": [{"frames": [[0, 1, 2]]}]},
        {"codes": [[]], "threads": [{"frames": [[0]]}]},
    ):
        with pytest.raises(InternalError):
            unpack(broken)


@pytest.mark.parametrize(
    ("threads", "frames", "name"), [(4096, 4, "f"), (16, 1024, "名" * 4000), (16, 1024, "\U0001f40d")]
)
def test_a_message_fits_its_header(threads: int, frames: int, name: str) -> None:
    packed = pack(dumped(threads, frames, name))
    assert len(json.dumps(packed)) < MAX_HEADER
    assert len(packed["threads"]) == threads
    for thread in unpack(packed)["threads"]:
        assert thread["complete"] == (len(thread["frames"]) == frames)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_stacks_of_many_processes_travel_as_they_are(packed: list[bytes]) -> None:
    processes = [ProcessStacks("jöb", "r", n or None, 7 + n, 1 << 60, 7 + n, own) for n, own in enumerate(packed)]
    failures = [{"pid": 9, "rank": None, "job": "", "error": {"kind": "TargetTimeout", "message": "x", "hint": ""}}]
    assert split_stacks(*join_stacks(processes, failures)) == (processes, failures)


@given(st.binary(max_size=2000))
def test_candidates_of_any_maps(text: bytes) -> None:
    try:
        mappings = parse_maps(text)
    except CorruptTarget:
        return
    assert len(candidates(mappings)) <= 3


@pytest.mark.parametrize("version", [(3, 8), (3, 9), (3, 10), (3, 11)])
@given(noise=st.binary(min_size=1, max_size=4096))
def test_the_release_in_any_memory(version: tuple[int, int], noise: bytes) -> None:
    memory = FakeMemory({1 << 30: (noise * (8192 // len(noise) + 1))[:8192]})
    found = sys_hexversion(memory.read_many, 1 << 30, version)
    assert found is None or (found >> 24, found >> 16 & 0xFF) == version
