"""Finds the operation in which a rank waits, from its recorded operations and its stack, and says how long a wait must
last to count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from probing.diagnosis.facts import Facts, Operation, Rank, Thread
from probing.diagnosis.stack_calls import StackCall, native_wait, python_wait

__all__ = (
    "FILE_LOCK",
    "INIT",
    "MAX_PHASE_S",
    "STUCK_PATIENCE",
    "Wait",
    "gate_ns",
    "halted",
    "is_p2p",
    "last_seen_ns",
    "main_thread",
    "open_operations",
    "outside",
    "patience_ns",
    "phase_limit_ns",
    "quiet_ns",
    "usual_gate_ns",
    "wait_in",
    "wait_of",
)

_P2P = frozenset(("send", "recv", "recv_any_source"))
INIT = "init"
"""``Wait.op`` of a rank that waits in a store, or for others to create a communicator."""
FILE_LOCK = "file lock"
"""``Wait.op`` of a rank that waits for the lock of a file that another rank holds."""
_DEFAULT = "default_pg"
# If this many later collectives have completed, the end of an open collective was missed.
_STALE_AFTER = 8
# A thread that waits for a collective sleeps in a futex, or spins in these calls.
_WAITING_SYSCALLS = frozenset(("futex", "futex_waitv", "sched_yield", ""))
# In these functions the main thread waits for another thread of its process.
_JOINS = frozenset(("join", "_wait_for_tstate_lock", "result", "wait", "get", "acquire", "_engine_run_backward"))
# The threads that compute gradients on GPUs; their frames may all be native.
_AUTOGRAD = "pt_autograd"
_JOIN_FILES = ("threading.py", "queue.py", "concurrent/futures/_base.py", "torch/autograd/graph.py")


@dataclass(frozen=True, slots=True)
class Wait:
    """The operation in which a rank waits. ``seq``: None if only a stack shows the wait. ``peer``: the other rank of a
    send or recv.

    ``witnesses``: the sources that show the wait: ``probe``, ``stack``, ``ras`` or ``flight_recorder``. ``firm``: False
    if the operation is in flight, but the rank is perhaps not waiting for it. ``dtype`` and ``count`` describe the
    data; None if unknown.
    """

    comm: str | None
    seq: int | None
    op: str | None
    since_ns: int | None
    peer: int | None = None
    witnesses: tuple[str, ...] = ()
    firm: bool = True
    dtype: str | None = None
    count: int | None = None


def wait_of(rank: Rank, facts: Facts) -> Wait | None:
    """Returns the operation in which ``rank`` waits; None if no wait is known."""
    if halted(rank):
        return None
    own = open_operations(rank)
    main = main_thread(rank)
    if main is None:
        return None if not own else wait_in(own[0])
    call, thread = _call(rank, main)
    if call is not None:
        return _matched(rank, thread, call, own, facts)
    if not own or _contradicts(rank, main, own[0]):
        return None
    return wait_in(own[0])


def halted(rank: Rank) -> bool:
    """Returns whether the process of a rank has ended or is stopped."""
    condition = rank.condition
    state = condition.state if condition else None
    frozen = condition is not None and condition.frozen is True
    return rank.exit is not None or rank.state in ("exited", "zombie", "stopped") or state in ("T", "t", "Z") or frozen


def main_thread(rank: Rank) -> Thread | None:
    """Returns the thread that trains: the main thread, unless another thread was seen to train. None if its stack is
    unknown.
    """
    return next((thread for thread in rank.threads if thread.main and thread.frames), None)


def outside(rank: Rank, main: Thread) -> bool:
    """Returns whether the native frames or the system call of ``main`` prove that it waits in no call of a
    communication library. Its stack must show no such call."""
    if any(f.native for f in main.frames) and not main.native_missing:
        return True
    return rank.condition is not None and rank.condition.syscall not in (None, *_WAITING_SYSCALLS)


def is_p2p(op: str | None) -> bool:
    """Returns whether ``op`` is a send or a receive."""
    return op in _P2P


def open_operations(rank: Rank) -> list[Operation]:
    """Returns the operations of ``rank`` in flight, the oldest first. Operations whose end was missed are left out."""
    ended: dict[str, list[int]] = {}
    if rank.open:
        for one in rank.done:
            if one.seq is not None and not is_p2p(one.op):
                ended.setdefault(one.comm, []).append(one.seq)
    live = [o for o in rank.open if o.seq is None or sum(s > o.seq for s in ended.get(o.comm, ())) < _STALE_AFTER]
    return sorted(live, key=lambda o: o.t_call_ns or 0)


def wait_in(one: Operation) -> Wait:
    """Returns the wait for the end of an operation in flight, firm unless it is asynchronous."""
    return _of(one, ("probe",), one.async_op is not True)


def _of(one: Operation, witnesses: tuple[str, ...], firm: bool = True) -> Wait:
    if one.source != "probe":
        witnesses = (one.source, *witnesses[1:])
    return Wait(one.comm, one.seq, one.op, one.t_call_ns, one.peer, witnesses, firm, one.dtype, one.count)


def _call(rank: Rank, main: Thread) -> tuple[StackCall | None, Thread]:
    # Returns the call in which the main thread waits, or if it joins another thread, the call of that thread.
    call = _thread_call(main, rank.open)
    if call is not None or not _joins(main):
        return call, main
    for thread in rank.threads:
        if not thread.main and (thread.name.startswith(_AUTOGRAD) or any(not f.native for f in thread.frames)):
            call = _thread_call(thread, rank.open)
            if call is not None:
                return call, thread
    return None, main


def _joins(main: Thread) -> bool:
    inner = next((f for f in main.frames if not f.native), None)
    return inner is not None and inner.func.rpartition(".")[2] in _JOINS and inner.file.endswith(_JOIN_FILES)


def _thread_call(thread: Thread, own: Sequence[Operation]) -> StackCall | None:
    call = python_wait(thread.frames)
    if call is not None:
        return call
    native = native_wait(takewhile(lambda f: f.native, thread.frames))
    if native is None:
        return None
    if "Store::" in native:
        return StackCall("store", INIT)
    if native.startswith(("ncclCommInit", "pncclCommInit", "ncclCommSplit", "pncclCommSplit")):
        return StackCall("init", INIT)
    # Without an operation in flight, the thread waits for its own kernels, or for a future of another kind, and not for
    # other ranks.
    if native.startswith("cu"):
        return StackCall("device") if own else None
    if "Future" in native or native.startswith("jax::"):
        return StackCall("collective") if own else None
    return StackCall("collective")


def _matched(rank: Rank, thread: Thread, call: StackCall, own: Sequence[Operation], facts: Facts) -> Wait:
    if call.kind in ("store", "init"):
        # A rank that polls a store wakes up now and then, so the earliest known time counts.
        known = [t for t in (_since(rank, thread), thread.since_ns) if t is not None]
        return Wait(None, None, INIT, min(known, default=None), None, ("stack",))
    same = [o for o in own if o.op == call.op and call.comm in (None, o.comm)]
    if not same and call.op is not None:
        # If the operation is coalesced, its name may differ from the name in Python. But a send or receive never
        # appears as a collective.
        same = [o for o in own if is_p2p(o.op) == (call.kind == "p2p") and o.async_op is not True]
    if same or (own and call.op is None):
        # An asynchronous call returns at once, so its frame cannot be on the stack. A synchronous operation is
        # preferred.
        return _of(min(same, key=lambda o: o.async_op is True) if same else own[0], ("probe", "stack"))
    comm = _default_group(facts) if call.comm is None and call.default else call.comm
    return Wait(comm, None, call.op, _since(rank, thread), call.peer, ("stack",), True, call.dtype, call.count)


def _default_group(facts: Facts) -> str:
    known = (c.comm for c in facts.communicators if c.name == _DEFAULT or c.role == "world")
    return next(known, _DEFAULT)


def _since(rank: Rank, thread: Thread) -> int | None:
    # The samples are less certain: a rank may leave a frame and return between two samples. A thread that sleeps has
    # not left its frame.
    asleep = rank.condition.asleep_since_ns if rank.condition is not None and thread.main else None
    return asleep if asleep is not None else thread.since_ns


def _contradicts(rank: Rank, main: Thread, oldest: Operation) -> bool:
    # A synchronous call waits in a frame of torch. The wait for an asynchronous call may be in C, called from any line.
    return outside(rank, main) or (oldest.async_op is False and "torch/" not in main.frames[0].file)


_CLOCKS_APART_NS = 60 * 10**9
_NEVER_NS = 1 << 60
MAX_PHASE_S = 3600.0
"""The maximum limit of a phase, s. Longer limits are cut, because a peer may send any value."""
STUCK_PATIENCE = 2
"""Waits of unknown kind count once the job has stood still for this many times ``gate_ns``."""
_S = 10**9


def gate_ns(facts: Facts) -> int:
    """Returns the time after which a wait is a stall, ns: the larger of ``stall_s`` and twice the job's longest
    usual gap.

    No wait is a stall while a rank is in a phase whose limit has not passed.
    """
    return _NEVER_NS if phase_limit_ns(facts) else usual_gate_ns(facts)


def usual_gate_ns(facts: Facts) -> int:
    """Returns ``gate_ns`` of a job without a phase."""
    return max(round(facts.stall_s * _S), 2 * (facts.usual_gap_ns or 0))


def phase_limit_ns(facts: Facts) -> int:
    """Returns the limit of the phase that a rank is in, ns; 0 without a phase, and once the limit has passed."""
    phase = facts.phase
    if phase is None or phase.since_ns > facts.taken_ns + _CLOCKS_APART_NS:
        return 0
    limit = round(min(max(phase.limit_s, 0.0), MAX_PHASE_S) * _S)
    return limit if facts.taken_ns - phase.since_ns < limit else 0


def patience_ns(facts: Facts) -> int:
    """Returns the time after which a rank that makes progress elsewhere counts as holding the job up, ns."""
    return max(6 * round(facts.stall_s * _S), 60 * _S, gate_ns(facts))


def last_seen_ns(rank: Rank) -> int | None:
    """Returns when ``rank`` was last seen to begin or end an operation or a step, on its clock, ns; None if never."""
    seen = [t for p in rank.progress for t in (p.last_call_ns, p.last_done_ns) if t is not None]
    operations = rank.open if seen else (*rank.open, *rank.done)
    seen += [t for o in operations for t in (o.t_call_ns, o.t_done_ns) if t is not None]
    seen += [s.t_start_ns + s.duration_ns for s in rank.steps]
    return max(seen, default=None)


def quiet_ns(rank: Rank, now: int, watching_since_ns: int | None) -> int | None:
    """Returns a lower bound of the time since ``rank`` last began or ended an operation or step, ns; None if unknown.
    ``now`` is when the facts were read, and ``watching_since_ns`` when the daemon began to record, both on the clock of
    the rank's node.
    """
    seen = last_seen_ns(rank)
    if seen is not None:
        return max(0, now - seen)
    main = main_thread(rank)
    still = [main.since_ns] if main is not None and main.since_ns is not None else []
    if rank.condition is not None and rank.condition.asleep_since_ns is not None:
        still.append(rank.condition.asleep_since_ns)
    if still:
        return max(0, now - min(still))
    # The daemon has recorded nothing about the rank since it started.
    return max(0, now - max(watching_since_ns, rank.started_ns or 0)) if watching_since_ns is not None else None
