"""The rank waits for other ranks: in an operation, or while communication is set up."""

from __future__ import annotations

from probing.diagnosis.activity.scene import Scene, Seen, innermost
from probing.diagnosis.waits import Wait, wait_of

__all__ = ("find_collective", "find_init", "find_open")

_DISTRIBUTED = "torch/distributed/distributed_c10d.py"
_INIT = ("init_process_group", "_new_process_group_helper", "new_group", "_store_based_barrier", "split_group")
_RENDEZVOUS = ("torch/distributed/rendezvous.py", "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py")
_NATIVE = ("ncclCommInit", "ncclCommSplit", "connectFullMesh")


def find_init(scene: Scene) -> Seen | None:
    """Returns whether the rank creates a communicator or waits in a store."""
    wait = _wait(scene)
    shown = innermost(scene.python, _DISTRIBUTED, _INIT) is not None or scene.runs_in(*_NATIVE)
    shown = shown or any(innermost(scene.python, file) is not None for file in _RENDEZVOUS)
    if not shown and (wait is None or wait.op != "init"):
        return None
    stored = not shown and scene.runs_in("Store::")
    does = f"waits for other ranks {'in a store' if stored else 'to set up communication'}{scene.where}"
    since = wait.since_ns if wait else None
    return Seen("nccl_init", does, frame=scene.user, since_ns=since, evidence=(scene.kernel,))


def find_collective(scene: Scene) -> Seen | None:
    """Returns the operation that the rank waits in, if its stack shows the wait or was not read."""
    wait = _wait(scene)
    return _seen(scene, wait) if wait is not None and ("stack" in wait.witnesses or not scene.python) else None


def find_open(scene: Scene) -> Seen | None:
    """Returns the operation of the rank in flight, if only that shows that it waits."""
    wait = _wait(scene)
    return _seen(scene, wait) if wait is not None else None


def _wait(scene: Scene) -> Wait | None:
    return wait_of(scene.rank, scene.facts) if scene.rank is not None else None


def _seen(scene: Scene, wait: Wait) -> Seen:
    number = f" (seq {wait.seq})" if wait.seq is not None else ""
    does = f"waits in {wait.op or 'a collective'}{number}{scene.where}"
    witnesses = f"shown by: {', '.join(wait.witnesses)}"
    return Seen("in_collective", does, frame=scene.user, since_ns=wait.since_ns, evidence=(witnesses,))
