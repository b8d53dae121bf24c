"""The CUDA runtime and NCCL by ctypes: the real libraries, or doubles with the same functions."""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, byref, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path

__all__ = ("FLOAT32", "Cuda", "Nccl", "Timed", "UniqueId")

FLOAT32, SUM = 7, 0
NOT_READY = 600
# Threads that capture do not disturb each other (cudaStreamCaptureModeThreadLocal).
_THREAD_LOCAL = 1
_NON_BLOCKING = 1


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Dim3(ctypes.Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class Timed:
    """Events behind operations of a stream, and when each came: by CUDA's own clock of events, from a common base."""

    def __init__(self, cuda: Cuda, stream: c_void_p) -> None:
        self._cuda, self._stream = cuda, stream
        self._events: list[c_void_p] = []
        cuda.check("cudaStreamSynchronize", stream)
        self._base = cuda.event()
        self.base_lo_ns = time.time_ns()
        cuda.check("cudaEventRecord", self._base, stream)
        cuda.check("cudaEventSynchronize", self._base)
        self.base_hi_ns = time.time_ns()

    def mark(self) -> None:
        """Records an event behind what is on the stream now."""
        event = self._cuda.event()
        self._cuda.check("cudaEventRecord", event, self._stream)
        self._events.append(event)

    def ends(self) -> list[tuple[int, int] | None]:
        """Waits for all events; returns the UTC interval, ns, in which each came, None where the runtime cannot say."""
        for event in self._events:
            self._cuda.check("cudaEventSynchronize", event)
        found = [self._end(event) for event in self._events]
        for event in [self._base, *self._events]:
            self._cuda.check("cudaEventDestroy", event)
        return found

    def _end(self, event: c_void_p) -> tuple[int, int] | None:
        if not self._cuda.has("cudaEventElapsedTime"):
            return None
        milliseconds = c_float()
        self._cuda.check("cudaEventElapsedTime", byref(milliseconds), self._base, event)
        after = round(milliseconds.value * 1e6)
        return self.base_lo_ns + after, self.base_hi_ns + after


class Cuda:
    """libcudart at ``path``. Functions by name; ``check`` raises RuntimeError for a result other than success."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.check("cudaSetDevice", 0)

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def check(self, name: str, *args: object) -> None:
        result = getattr(self.library, name)(*args)
        if result:
            raise RuntimeError(f"{name} returned cudaError {result}")

    def stream(self) -> c_void_p:
        made = c_void_p()
        self.check("cudaStreamCreateWithFlags", byref(made), _NON_BLOCKING)
        return made

    def event(self) -> c_void_p:
        """Returns an event with timing."""
        made = c_void_p()
        self.check("cudaEventCreate", byref(made))
        return made

    def malloc(self, size: int) -> c_void_p:
        made = c_void_p()
        self.check("cudaMalloc", byref(made), c_size_t(size))
        return made

    def wait(self, event: c_void_p, poll_s: float = 0.001) -> None:
        """Asks for the event until it has come, as a framework with a blocking wait does."""
        while (result := self.library.cudaEventQuery(event)) == NOT_READY:
            time.sleep(poll_s)
        if result:
            raise RuntimeError(f"cudaEventQuery returned cudaError {result}")

    def launch(self, function: c_void_p, stream: c_void_p) -> None:
        one = _Dim3(1, 1, 1)
        self.check("cudaLaunchKernel", function, one, one, None, c_size_t(0), stream)

    def capture(self, stream: c_void_p) -> None:
        self.check("cudaStreamBeginCapture", stream, _THREAD_LOCAL)

    def captured(self, stream: c_void_p) -> c_void_p:
        """Ends the capture; returns the executable graph."""
        graph, executable = c_void_p(), c_void_p()
        self.check("cudaStreamEndCapture", stream, byref(graph))
        self.check("cudaGraphInstantiate", byref(executable), graph, c_ulonglong(0))
        return executable


class Nccl:
    """libnccl at ``path``, with one communicator after ``join``."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.comm = c_void_p()

    def check(self, name: str, *args: object) -> None:
        result = getattr(self.library, name)(*args)
        if result:
            self.library.ncclGetErrorString.restype = ctypes.c_char_p
            text = self.library.ncclGetErrorString(result)
            raise RuntimeError(f"{name} returned {result}: {text.decode() if text else ''}")

    @property
    def version(self) -> int:
        found = c_int()
        self.check("ncclGetVersion", byref(found))
        return found.value

    def join(self, folder: Path, rank: int, size: int, name: str = "world") -> None:
        """Makes a communicator of all ranks; rank 0 leaves the unique id in ``folder``."""
        place = folder / f"id-{name}"
        made = UniqueId()
        if rank == 0:
            self.check("ncclGetUniqueId", byref(made))
            place.with_suffix(".new").write_bytes(bytes(made))
            place.with_suffix(".new").replace(place)
        while not place.exists():
            time.sleep(0.005)
        made = UniqueId.from_buffer_copy(place.read_bytes())
        self.library.ncclCommInitRank.argtypes = (POINTER(c_void_p), c_int, UniqueId, c_int)
        self.check("ncclCommInitRank", byref(self.comm), size, made, rank)

    def number(self, name: str) -> int:
        """Returns what a function such as ncclCommUserRank says of the communicator."""
        found = c_int()
        self.check(name, self.comm, byref(found))
        return found.value

    def all_reduce(self, buffer: c_void_p, count: int, stream: c_void_p) -> None:
        self.check("ncclAllReduce", buffer, buffer, c_size_t(count), FLOAT32, SUM, self.comm, stream)

    def broadcast(self, buffer: c_void_p, count: int, root: int, stream: c_void_p) -> None:
        self.check("ncclBroadcast", buffer, buffer, c_size_t(count), FLOAT32, root, self.comm, stream)

    def send(self, buffer: c_void_p, count: int, peer: int, stream: c_void_p) -> None:
        self.check("ncclSend", buffer, c_size_t(count), FLOAT32, peer, self.comm, stream)

    def receive(self, buffer: c_void_p, count: int, peer: int, stream: c_void_p) -> None:
        self.check("ncclRecv", buffer, c_size_t(count), FLOAT32, peer, self.comm, stream)
