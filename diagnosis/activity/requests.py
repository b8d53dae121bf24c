"""Recognizes a main thread that waits for requests, as in an idle server, or for the answer to its own request."""

from __future__ import annotations

from collections.abc import Sequence

from probing.diagnosis.activity.scene import Scene, Seen, innermost, is_library, python_frames
from probing.diagnosis.facts import Frame, Thread
from probing.diagnosis.words import clean

__all__ = ("IDLE", "RPC", "find_requests", "find_rpc")

IDLE = "idle"
RPC = "rpc"
_API = "torch/distributed/rpc/api.py"
# The functions of torch.distributed.rpc that wait, and a text for each. Futures of torch are not among them: they wait
# in C++, which the user's line calls directly.
_RPC_WAITS = {
    "rpc_sync": "waits for the answer of an RPC",
    **dict.fromkeys(("_wait_all_workers", "shutdown"), "serves RPCs until all ranks have ended theirs"),
}
_FUTURE = "PythonFutureWrapper::wait"
_ACCEPTS = frozenset(("accept", "accept4"))
_PYTHON_ACCEPT = ("/socket.py", ("accept",))
_LISTENER = "listener"
# vLLM's queue from an engine to its workers; SGLang has it, too.
_RING = "/shm_broadcast.py"
_RING_READS = ("acquire_read", "dequeue")
_ZMQ = "/zmq/"
_ZMQ_WAITS = ("zmq_poll", "zmq_msg_recv", "zmq_recv")
_QUEUES = (("/queue.py", ("get",)), ("/threading.py", ("wait",)))
# Any process may run a metrics server or a debug server. Requests to these are not work of the job, so they do not
# count.
_MONITORS = ("/prometheus_client/", "/debugpy/", "/tensorboard/", "/wsgiref/", "/http/server.py")


def find_requests(scene: Scene) -> Seen | None:
    """Returns whether the main thread waits for requests from outside: a server that has nothing to do."""
    c = scene.condition
    thread = None
    if c.target_kind == _LISTENER or c.syscall in _ACCEPTS or _accepts(scene.python):
        what = f"for requests on {_address(c.target)}"
    elif innermost(scene.python, _RING, _RING_READS) is not None:
        what = "for requests in a ring of shared memory"
    elif _reads_zmq(scene.main):
        what = "for messages of ZeroMQ"
    elif (thread := _receiver(scene)) is not None:
        source = "of ZeroMQ" if _reads_zmq(thread) else f"on {_address(thread.target)}"
        what = f"in a queue for requests {source}"
    else:
        return None
    receives = f"thread {clean(thread.name)} ({thread.tid}) receives them" if thread is not None else ""
    return Seen(IDLE, f"waits {what}{scene.where}", frame=scene.user, evidence=(receives, scene.kernel))


def find_rpc(scene: Scene) -> Seen | None:
    """Returns whether the process waits for an answer through torch.distributed.rpc, or serves until all ranks are
    done.
    """
    at = innermost(scene.python, _API, _RPC_WAITS)
    if at is not None:
        does = _RPC_WAITS[scene.python[at].func.rpartition(".")[2]]
    elif scene.runs_in(_FUTURE) and scene.rank is not None and not scene.rank.open:
        does = "waits for a future of torch"
    else:
        return None
    return Seen(RPC, f"{does}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def _receiver(scene: Scene) -> Thread | None:
    """Returns the thread that may fill the queue in which the main thread waits."""
    user = scene.python.index(scene.user) if scene.user in scene.python else len(scene.python)
    if not any(innermost(scene.python[:user], file, names) is not None for file, names in _QUEUES):
        return None
    return next((thread for thread in scene.threads if not thread.main and _receives(thread)), None)


def _receives(thread: Thread) -> bool:
    python = python_frames(thread.frames)
    if not python or any(monitor in frame.file for frame in python for monitor in _MONITORS):
        return False
    return thread.target_kind == _LISTENER or _accepts(python) or _reads_zmq(thread)


def _accepts(python: Sequence[Frame]) -> bool:
    """Returns whether the innermost Python frame accepts a connection; the system call may be unknown."""
    return innermost(python[:1], *_PYTHON_ACCEPT) is not None


def _reads_zmq(thread: Thread | None) -> bool:
    if thread is None:
        return False
    inner = next(iter(python_frames(thread.frames)), None)
    if inner is not None and is_library(inner) and _ZMQ in inner.file:
        return True
    return any(frame.native and frame.func.startswith(_ZMQ_WAITS) for frame in thread.frames[:8])


def _address(target: str | None) -> str:
    """Returns the address of a target, such as "tcp 127.0.0.1:8000" of "socket:[4711] tcp 127.0.0.1:8000"."""
    return clean((target or "").partition(" ")[2] or "a socket")
