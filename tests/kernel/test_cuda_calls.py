"""What processes ask of the CUDA runtime: waits, memory and launches, against a double."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collectives_support import both_ways
from cuda_support import DOUBLES, Cuda

from probing.daemon.bpf.session import Session
from probing.daemon.config import CudaConfig
from probing.daemon.processes.liveness import is_alive


@pytest.fixture
def started(tmp_path: Path, open_session: Callable[..., Session]) -> Iterator[Callable[[CudaConfig], Cuda]]:
    made: list[Cuda] = []

    def start(config: CudaConfig) -> Cuda:
        made.append(Cuda(tmp_path, open_session, config))
        return made[-1]

    yield start
    for cuda in made:
        cuda.close()


WAITS = """
cuda.cudaSetDevice(0)
s, e = stream(), event()
witness()
before = time.monotonic_ns()
op(s, 0); record(e, s); ops.open_gate(1)
ok(cuda.cudaStreamSynchronize(s))
op(s, 1); record(e, s); ops.open_gate(2)
ok(cuda.cudaEventSynchronize(e))
ok(cuda.cudaEventSynchronize(event()))
ok(cuda.cudaDeviceSynchronize())
cuda.cudartDoubleFail(719)
assert cuda.cudaDeviceSynchronize() == 719
say(s=s, e=e, before=before, after=time.monotonic_ns(), tid=threading.get_native_id())
"""


@both_ways
def test_waits_are_rows(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig())
    (said,) = cuda.run(WAITS)
    rows = cuda.syncs()
    assert [(row["op"], row["stream"], row["error"]) for row in rows] == [
        ("stream_synchronize", said["s"], None),
        ("event_synchronize", said["s"], None),
        ("event_synchronize", None, None),
        ("device_synchronize", None, None),
        ("device_synchronize", None, "cudaError 719"),
    ]
    assert [row["event"] == said["e"] for row in rows] == [False, True, False, False, False]
    assert {(row["tid"], row["job"], row["rank"], row["node"]) for row in rows} == {(said["tid"], "job0", 5, "node")}
    pair = cuda.clock.pair()
    for row in rows:
        assert said["before"] < row["ts"] - pair.mono_to_utc_ns + 1_000_000
        assert 0 < row["duration_ns"] < said["after"] - said["before"]


def test_waits_can_be_left_out_at_any_time(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig(syncs=False))
    script = cuda.script("""
s = stream()
ok(cuda.cudaStreamSynchronize(s)); say(); wait()
ok(cuda.cudaStreamSynchronize(s)); say(); wait()
ok(cuda.cudaStreamSynchronize(s)); say()
""")
    script.step()
    cuda.source.configure(CudaConfig())
    script.step()
    cuda.source.configure(CudaConfig(syncs=False))
    script.step()
    assert len(cuda.syncs()) == 1


MEMORY = """
p = [P() for _ in range(200)]
def allocate(first, count, size):
    for pointer in p[first:first + count]: ok(cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
allocate(0, 10, 1000)
allocate(10, 5, 1024)
allocate(15, 3, 1025)
for pointer in p[:4]: ok(cuda.cudaFree(pointer))
ok(cuda.cudaMallocAsync(ctypes.byref(p[100]), ctypes.c_size_t(1 << 20), stream()))
ok(cuda.cudaMallocManaged(ctypes.byref(p[101]), ctypes.c_size_t(64), 1))
ok(cuda.cudaMallocHost(ctypes.byref(p[102]), ctypes.c_size_t(64)))
ok(cuda.cudaHostAlloc(ctypes.byref(p[103]), ctypes.c_size_t(4096), 0))
ok(cuda.cudaFreeHost(p[102]))
cuda.cudartDoubleFailAllocation()
assert cuda.cudaMalloc(ctypes.byref(p[104]), ctypes.c_size_t(7)) == 2
say(); wait()
allocate(18, 1, 1000)
ok(cuda.cudaFree(p[18]))
ok(cuda.cudaFree(p[5]))
say()
"""


def summed(rows: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Over stacks: (kind, size class) -> allocations, frees, bytes, live, live_bytes, errors."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for row in rows:
        counts = tuple(row[f] for f in ("allocations", "frees", "bytes", "live", "live_bytes", "errors"))
        key = row["kind"], row["size_class"]
        found[key] = tuple(map(sum, zip(counts, found.get(key, (0,) * 6), strict=True)))
    return found


def test_memory_is_summed_up_by_size_and_stack(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig())
    script = cuda.script(MEMORY)
    script.step()
    cuda.source.round(cuda.clock.pair())
    rows = cuda.sink.rows("cuda.memory")
    assert summed(rows) == {
        ("device", 1024): (15, 4, 15120, 11, 11120, 0),
        ("device", 2048): (3, 0, 3075, 3, 3075, 0),
        ("device", 8): (0, 0, 0, 0, 0, 1),
        ("async", 1 << 20): (1, 0, 1 << 20, 1, 1 << 20, 0),
        ("managed", 64): (1, 0, 64, 1, 64, 0),
        ("host", 64): (1, 1, 64, 0, 0, 0),
        ("host", 4096): (1, 0, 4096, 1, 4096, 0),
    }
    assert all(row["caller"] == row["frames"][0] and row["interval_ns"] > 0 for row in rows)
    # ctypes calls through libffi.
    assert {row["caller"].partition(".so")[0] for row in rows} == {"libffi"}
    script.step()
    cuda.source.round(cuda.clock.pair())
    again = cuda.sink.rows("cuda.memory")[len(rows) :]
    assert summed(again) == {("device", 1024): (1, 2, 1000, 10, 10120, 0)}
    cuda.source.round(cuda.clock.pair())
    assert len(cuda.sink.rows("cuda.memory")) == len(rows) + len(again)


LEAK = r"""
#include <stddef.h>
#include "cudart.h"
/* Nothing is done behind the calls, but they must not become jumps. */
int allocate(size_t size) { void *p; int r = cudaMalloc(&p, size); asm volatile("" : "+r"(r)); return r; }
int leaks(int times) { int r = 0; for (int i = 0; i < times; i++) r += allocate(500); return r; }
int other(void) { int r = allocate(400); asm volatile("" : "+r"(r)); return r; }
"""


def test_leaks_differ_by_their_stacks(started: Callable[[CudaConfig], Cuda], tmp_path: Path) -> None:
    cuda = started(CudaConfig())
    (tmp_path / "leak.c").write_text(LEAK)
    flags = ["-O1", "-shared", "-fPIC", "-fno-omit-frame-pointer", "-fno-inline", f"-I{DOUBLES}"]
    subprocess.run(
        ["cc", *flags, "-o", tmp_path / "libleak.so", tmp_path / "leak.c", tmp_path / "libcudart.so.12"], check=True
    )
    cuda.run("leak = ctypes.CDLL(folder + '/libleak.so')\nfor _ in range(5): leak.leaks(3)\nleak.other()")
    cuda.source.round(cuda.clock.pair())
    rows = cuda.sink.rows("cuda.memory")
    assert sorted((row["live"], row["live_bytes"]) for row in rows) == [(1, 400), (15, 7500)]
    assert len({row["stack"] for row in rows}) == 2
    for row in rows:
        assert [frame.partition("+")[0] for frame in row["frames"][:2]] == ["libleak.so"] * 2
    assert len({row["caller"] for row in rows}) == 1
    assert len({row["frames"][1] for row in rows}) == 2


MEMORY_MAPS = ("cuda_memory_sums", "cuda_memory_live", "cuda_memory_stacks", "cuda_memory_processes")


def test_the_end_of_a_process_ends_its_sums(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig())
    script = cuda.script(MEMORY)
    script.step()
    pid = script.process.pid
    keys, _ = cuda.session.maps["cuda_memory_sums"].items()
    script.close()
    cuda.source.started(lambda found, start_ns: (found, start_ns) != (pid, int(keys[0]["start_ns"])))
    cuda.source.round(cuda.clock.pair(), memory=False)
    assert sum(row["live"] for row in cuda.sink.rows("cuda.memory")) == 17
    for name in MEMORY_MAPS:
        assert not len(cuda.session.maps[name].items()[0])


FILL = """
pointer = P()
for _ in range(%d): ok(cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(8)))
say(); wait()
"""


def test_one_process_cannot_take_the_room_of_the_others(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig())
    most = cuda.session.maps["cuda_memory_live"].max_entries // 8
    greedy, other = cuda.script(FILL % (most + 100)), cuda.script(FILL % 7)
    greedy.step()
    other.step()
    cuda.source.round(cuda.clock.pair())
    live = {row["pid"]: 0 for row in cuda.sink.rows("cuda.memory")}
    for row in cuda.sink.rows("cuda.memory"):
        live[row["pid"]] += row["live"]
    assert live == {greedy.process.pid: most, other.process.pid: 7}
    assert sum(loss.count or 0 for loss in cuda.sink.losses) == 100


PROGRAM = """
s, e, p = stream(), event(), P()
witness()
op(s, 0); record(e, s)
ok(cuda.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(8)))
say(); wait()
"""


def test_exec_ends_what_belonged_to_the_program(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig())
    script = cuda.script(PROGRAM)
    script.step()
    pid = script.process.pid
    (key,) = cuda.session.maps["cuda_memory_processes"].items()[0]
    names = (*MEMORY_MAPS, "cuda_streams", "cuda_events", "cuda_processes")
    assert all(len(cuda.session.maps[name].items()[0]) for name in names)
    begun = cuda.clock.pair().mono_ns
    cuda.source.round(cuda.clock.pair())
    # The entries came after this exec: they are of the new program.
    cuda.source.program_ended(pid, int(key["start_ns"]), begun)
    cuda.source.round(cuda.clock.pair())
    assert all(len(cuda.session.maps[name].items()[0]) for name in names)
    cuda.source.program_ended(pid, int(key["start_ns"]), cuda.clock.pair().mono_ns)
    cuda.source.round(cuda.clock.pair())
    assert [row["pid"] for row in cuda.sink.rows("cuda.memory")] == [pid]
    assert {name: len(cuda.session.maps[name].items()[0]) for name in names} == dict.fromkeys(names, 0)


LAUNCH = """
class Dim(ctypes.Structure): _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]
one, s = Dim(1, 1, 1), P(stream())
graph, executable = P(), P()
cuda.cudaLaunchKernel.argtypes = [P, Dim, Dim, P, ctypes.c_size_t, P]
ok(cuda.cudaStreamBeginCapture(s, 2))
ok(cuda.cudaLaunchKernel(1, one, one, None, 0, s))
ok(cuda.cudaStreamEndCapture(s, ctypes.byref(graph)))
ok(cuda.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
def launch(kernels, graphs):
    for _ in range(kernels): ok(cuda.cudaLaunchKernel(1, one, one, None, 0, s))
    for _ in range(graphs): ok(cuda.cudaGraphLaunch(executable, s))
for kernels, graphs in ((3, 1), (1000, 20), (5, 0), (7, 7)):
    launch(kernels, graphs)
    say(); wait()
"""


def test_launches_are_counted_while_they_are_asked_for(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig())
    script = cuda.script(LAUNCH)
    script.step()
    cuda.source.round(cuda.clock.pair())
    if cuda.source.configure(CudaConfig(launches=True)):
        assert not cuda.session.features.uprobe_multi
        assert cuda.attach_cudart() == 1
    assert not cuda.source.configure(CudaConfig(launches=True))
    script.step()
    cuda.source.round(cuda.clock.pair())
    script.step()
    cuda.source.round(cuda.clock.pair())
    cuda.source.round(cuda.clock.pair())
    cuda.source.configure(CudaConfig())
    script.step()
    cuda.source.round(cuda.clock.pair())
    assert [(row["kernels"], row["graphs"]) for row in cuda.sink.rows("cuda.launches")] == [(1000, 20), (5, 0)]
    assert "cuda_launch" not in {link.program for link in cuda.session.links.values()}


def test_launches_of_a_process_that_nobody_knows_end_with_it(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig(launches=True))
    script = cuda.script(LAUNCH)
    script.step()
    cuda.source.round(cuda.clock.pair())
    cuda.source.started(is_alive)
    cuda.source.round(cuda.clock.pair())
    assert len(cuda.session.maps["cuda_launches"].items()[0]) == 1
    script.close()
    cuda.source.started(is_alive)
    cuda.source.round(cuda.clock.pair())
    assert len(cuda.session.maps["cuda_launches"].items()[0]) == 0
    assert [(row["kernels"], row["graphs"]) for row in cuda.sink.rows("cuda.launches")] == [(4, 1)]


def test_the_next_daemon_goes_on_with_what_lies_open(started: Callable[[CudaConfig], Cuda]) -> None:
    first = started(CudaConfig(launches=True))
    script = first.script("""
s, e, p = stream(), event(), P()
witness()
for number in range(3): op(s, number)
record(e, s)
ok(cuda.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(100)))
say(); wait()
ops.open_gate(3)
ok(cuda.cudaEventSynchronize(e))
ok(cuda.cudaFree(p))
say()
""")
    script.step()
    assert first.placed > 0
    first.source.stop()
    first.session.close(keep=True)
    second = started(CudaConfig())
    assert second.placed == 0
    assert "cuda_launch" not in {link.program for link in second.session.links.values()}
    script.step()
    assert {row["id"]: (row["state"], row["timing"]) for row in second.closed()} == dict.fromkeys(
        range(3), ("done", "sync")
    )
    second.source.finish()
    (row,) = second.sink.rows("cuda.memory")
    # What the first daemon had not reported is a gap.
    assert [(loss.table, loss.count) for loss in second.sink.losses] == [("cuda.memory", None)]
    assert [row[f] for f in ("allocations", "frees", "live", "live_bytes")] == [0, 1, 0, 0]


def test_a_library_behind_two_overlays_counts_once(started: Callable[[CudaConfig], Cuda], tmp_path: Path) -> None:
    cuda = started(CudaConfig())
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "libcudart.so.12").write_bytes((tmp_path / "libcudart.so.12").read_bytes())
    mounts = []
    try:
        for number in range(2):
            folder = tmp_path / f"overlay{number}"
            for name in ("upper", "work", "merged"):
                (folder / name).mkdir(parents=True)
            options = f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder / "merged"], check=True)
            mounts.append(folder / "merged")
        assert [cuda.attach_cudart(mount / "libcudart.so.12") > 0 for mount in mounts] == [True, False]
    finally:
        # A probe holds the file, and so the mount.
        for link in list(cuda.session.links.values()):
            cuda.session.detach(link)
        for mount in mounts:
            subprocess.run(["umount", "--lazy", mount], check=True)


def test_a_library_is_attached_once(started: Callable[[CudaConfig], Cuda]) -> None:
    cuda = started(CudaConfig(launches=True))
    links = len(cuda.session.links)
    assert cuda.attach_cudart() == 0
    assert len(cuda.session.links) == links
    assert set(cuda.source.slots) <= set(range(128, 192))
