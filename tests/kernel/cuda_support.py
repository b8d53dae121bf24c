"""What the tests of CUDA share: a process on the double of libcudart that runs a script, and a session on it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fakes import LiveReaders

from probing.daemon.bpf.build import compile_object
from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.config import CudaConfig
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.gpu.cuda.source import OBJECTS, OPTIONAL, RING, CudaSource
from probing.daemon.source import Identity, Loss

DOUBLES = Path(__file__).parents[1] / "doubles"
STATES = {1: "called", 3: "done", 4: "failed", 5: "abandoned", 6: "unseen", 7: "launched"}
TIMINGS = {0: None, 2: "sync", 3: "enqueue_only", 4: "watchdog", 5: "graph", 6: "blocking_wait"}

# What NCCL is to the streams: a call that puts work on one, and the launch of a group.
OPERATIONS = r"""
#include <pthread.h>
#include <stdint.h>
#include "cudart.h"

#define OPERATIONS 100000
static struct { uint64_t start_ns, end_ns; } truth[OPERATIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static intptr_t gate = OPERATIONS;

static void run(void *id)
{
	pthread_mutex_lock(&lock);
	while ((intptr_t)id >= gate)
		pthread_cond_wait(&opened, &lock);
	pthread_mutex_unlock(&lock);
}
static void ended(void *id, uint64_t start_ns, uint64_t end_ns, int failed)
{
	truth[(intptr_t)id].start_ns = start_ns;
	truth[(intptr_t)id].end_ns = failed ? 0 : end_ns;
}
void open_gate(intptr_t before)
{
	pthread_mutex_lock(&lock);
	gate = before;
	pthread_cond_broadcast(&opened);
	pthread_mutex_unlock(&lock);
}
uint64_t end_of(intptr_t id) { return truth[id].end_ns; }
int operation(cudaStream_t stream, int device, uint64_t group, intptr_t id)
{
	struct double_work work = {run, ended, (void *)id};

	return cudartDoublePush(stream, &work);
}
int launched(uint64_t object, uint64_t position) { return object + position != 0; }
"""
PROBE = r"""
#include "completion.bpf.h"

UPROBE(test_operation)
{
	struct call *call = call_begin(ctx, probe, BACKEND_NCCL);

	if (!call)
		return;
	call->record.stream = argument(ctx, 0);
	call->record.cuda_device = (__s32)argument(ctx, 1);
	call->record.group_id = argument(ctx, 2);
	call->record.count = argument(ctx, 3);
	stream_enqueue(&call->record, cuda_process_of(call->record.tgid, call->record.start_ns));
}

UPROBE(test_launched)
{
	struct operation_key key = {argument(ctx, 0), argument(ctx, 1), current_start_ns(), current_tgid()};
	struct collective_record *r = bpf_map_lookup_elem(&operations, &key);

	if (r)
		stream_launched(&key, r, probe->now);
}

char LICENSE[] SEC("license") = "GPL";
"""
CHILD = r"""
import ctypes, json, sys, threading, time
folder = sys.argv[1]
cuda = ctypes.CDLL(folder + "/libcudart.so.12", ctypes.RTLD_GLOBAL)
ops = ctypes.CDLL(folder + "/libops.so")
P = ctypes.c_void_p
ops.end_of.restype = ctypes.c_uint64
ops.operation.argtypes = [P, ctypes.c_int, ctypes.c_uint64, ctypes.c_ssize_t]
ops.launched.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
ops.open_gate.argtypes = [ctypes.c_ssize_t]
ops.end_of.argtypes = [ctypes.c_ssize_t]
for name in ("cudaStreamDestroy", "cudaStreamQuery", "cudaStreamSynchronize", "cudaEventDestroy", "cudaEventQuery",
             "cudaEventSynchronize", "cudaFree", "cudaFreeAsync", "cudaFreeHost"):
    getattr(cuda, name).argtypes = [P]
cuda.cudaEventRecord.argtypes = cuda.cudaStreamEndCapture.argtypes = [P, P]
def ok(result): assert result == 0, result
def stream():
    made = P(); ok(cuda.cudaStreamCreate(ctypes.byref(made))); return made.value
def event():
    made = P(); ok(cuda.cudaEventCreateWithFlags(ctypes.byref(made), 2)); return made.value
def op(stream, number, device=0, group=0): return ops.operation(stream, device, group, number)
def record(event, stream): ok(cuda.cudaEventRecord(event, stream))
def witness(): cuda.cudaEventQuery(event())
def say(**values): print(json.dumps(values), flush=True)
def wait(): assert sys.stdin.readline()
ops.open_gate(0)
say(ready=True)
wait()
exec(sys.argv[2])
say(over=True)
wait()
"""


class Anybody:
    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job0", "run", "trainer", 5, 1, 8, 0)


class Collected:
    """A ``Sink`` that keeps its input."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, pa.RecordBatch]] = []
        self.losses: list[Loss] = []

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.batches.append((table, batch))

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for name, batch in self.batches if name == table for row in _rows(batch)]


class Script:
    """A process that runs Python on the double; ``step`` resumes it until its next line of output."""

    def __init__(self, folder: Path, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD, folder, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the script ended"
        return dict(json.loads(line))

    def step(self) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Cuda:
    """The double, built in ``folder``, and a session with the probes on it."""

    def __init__(self, folder: Path, open_session: Callable[..., Session], config: CudaConfig | None = None) -> None:
        self.folder = folder
        probe = folder / "operations.bpf.o"
        self.session = open_session(*OBJECTS, probe if probe.exists() else _built(folder), optional=OPTIONAL)
        self.sink, self.clock = Collected(), SystemClock()
        self.source = CudaSource(
            self.session, Anybody(), "node", find_symbols, self.sink, LiveReaders(), self.clock, config or CudaConfig()
        )
        self.ops: list[dict[str, Any]] = []
        self._scripts: list[Script] = []
        self.source.start()
        self.placed = self._attach()

    def _attach(self) -> int:
        fd = os.open(self.folder / "libops.so", os.O_RDONLY)
        try:
            for program, name in (("test_operation", "operation"), ("test_launched", "launched")):
                offset = find_symbols(fd, [name])[0].file_offset
                assert offset is not None
                self.session.attach_uprobe(program, fd, [offset], [1])
        finally:
            os.close(fd)
        return self.attach_cudart()

    def attach_cudart(self, library: Path | None = None) -> int:
        library = library or self.folder / "libcudart.so.12"
        fd = os.open(library, os.O_RDONLY)
        try:
            return self.source.attach(fd, os.fsencode(library))
        finally:
            os.close(fd)

    def script(self, code: str) -> Script:
        self._scripts.append(Script(self.folder, code))
        return self._scripts[-1]

    def run(self, code: str) -> list[dict[str, Any]]:
        """Runs a script that never waits and returns its output. The process stays until ``close``."""
        script = self.script(code)
        said = [script.step()]
        while "over" not in said[-1]:
            said.append(script.hear())
        return said[:-1]

    def closed(self) -> list[dict[str, Any]]:
        """All operations that were closed so far, in the order in which they were."""
        ring = self.session.rings["collectives"]
        drained = ring.drain()
        self.ops += [_operation(record) for record in drained.records]
        ring.commit(drained.position)
        return self.ops

    def open(self) -> dict[int, dict[str, Any]]:
        _, records = self.session.maps["operations"].items()
        return {int(record["count"]): _operation(record) for record in records}

    def syncs(self) -> list[dict[str, Any]]:
        ring = self.session.rings[RING]
        drained = ring.drain()
        batches = self.source.assemble_syncs(drained.records, self.clock.pair())
        ring.commit(drained.position)
        return [row for batch in batches.values() for row in _rows(batch)]

    def close(self) -> None:
        for script in self._scripts:
            script.close()
        self.source.stop()


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Times as numbers: Python's own have no nanoseconds."""
    fields = [pa.field(f.name, pa.int64() if pa.types.is_timestamp(f.type) else f.type) for f in batch.schema]
    return list(batch.cast(pa.schema(fields)).to_pylist())


def _operation(record: np.void) -> dict[str, Any]:
    return {
        "id": int(record["count"]),
        "position": int(record["position"]),
        "state": STATES[int(record["state"])],
        "timing": TIMINGS[int(record["timing"])],
        "call": int(record["t_call"]),
        "launch": int(record["t_launch"]),
        "lo": int(record["t_done_lo"]),
        "hi": int(record["t_done_hi"]),
        "error": bytes(record["error"]).rstrip(b"\0").decode(),
    }


def _built(folder: Path) -> Path:
    """Copies the libraries and the program of the test to ``folder``; returns the object. Compiles them once."""
    for path in _compiled().iterdir():
        shutil.copy2(path, folder)
    return folder / "operations.bpf.o"


@cache
def _compiled() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="probingd-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = ["cc", "-O1", "-w", "-shared", "-fPIC", "-fno-omit-frame-pointer", "-pthread", f"-I{DOUBLES}"]
    library = folder / "libcudart.so.12"
    subprocess.run([*flags, "-Wl,-soname,libcudart.so.12", "-o", library, DOUBLES / "cudart.c"], check=True)
    (folder / "ops.c").write_text(OPERATIONS)
    subprocess.run([*flags, "-o", folder / "libops.so", folder / "ops.c", library], check=True)
    source = folder / "operations.bpf.c"
    source.write_text(PROBE)
    compile_object(source)
    return folder
