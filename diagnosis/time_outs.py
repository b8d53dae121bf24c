"""When the library's own time-out ends the wait of a finding, where the time-out is known.

NCCL: a watchdog compares the age of each operation since its call with the time-out of its process group, and ends the
process (WorkNCCL::checkTimeout of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). gloo: the wait for a peer fails
(UnboundBuffer::waitRecv of gloo/transport/tcp/unbound_buffer.cc). The defaults are those of torch/distributed/
constants.py since torch 2.2.
"""

from __future__ import annotations

from dataclasses import replace

from probing.api.text import time_text
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Operation, Rank
from probing.diagnosis.verdict import ERROR, Ending, Finding
from probing.diagnosis.waits import main_thread

__all__ = ("with_time_out",)

_DEFAULTS_NS = {"nccl": 600 * 10**9, "gloo": 1800 * 10**9}
# Functions with a time-out of their own, by their argument of that name.
_WITH_OWN = frozenset(("barrier", "monitored_barrier"))


def with_time_out(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with the first end by a time-out of a wait of its ranks."""
    if finding.severity != ERROR:
        return finding
    ranks = {*finding.victims, *(culprit.rank for culprit in finding.culprits)} & case.waits.keys()
    ends = [end for rank in sorted(ranks) if (end := _end(case, case.ranks[rank])) is not None]
    return replace(finding, ends=min(ends, key=lambda end: end.at_ns, default=None))


def _end(case: Case, rank: Rank) -> Ending | None:
    wait = case.waits[rank.rank]
    call = next((o for o in rank.open if (o.comm, o.seq) == (wait.comm, wait.seq) and o.source == "probe"), None)
    if call is None or call.t_call_ns is None or _has_own(rank):
        return None
    communicator = case.communicators.get(call.comm)
    backend = communicator.backend if communicator is not None else None
    limit = _limit_ns(rank, call)
    if limit is None or backend not in _DEFAULTS_NS or (backend == "nccl" and not _is_watched(rank)):
        return None
    at = call.t_call_ns + limit
    if at <= case.now(rank.rank):
        # It should have ended by now: something is not as it seems.
        return None
    default = ", the default" if limit == _DEFAULTS_NS[backend] else ""
    by = "NCCL's watchdog" if backend == "nccl" else "gloo's time-out"
    return Ending(case.time(rank.rank, at), f"{by} ({time_text(limit)}{default})")


def _limit_ns(rank: Rank, call: Operation) -> int | None:
    """Returns the time-out of an operation: as a dump has it, else that of its process group."""
    dumped = (w.time_out_ns for w in rank.witnesses if w.source == "flight_recorder" and w.comm == call.comm)
    read = (limit.ns for limit in rank.time_outs if limit.comm == call.comm)
    return next((ns for ns in (*dumped, *read) if ns is not None), None)


def _has_own(rank: Rank) -> bool:
    """Whether the call has, or may have, a time-out of its own."""
    main = main_thread(rank)
    frames = main.frames if main is not None else ()
    return any(dict(f.values).get("timeout", "None") != "None" for f in frames if f.func in _WITH_OWN)


def _is_watched(rank: Rank) -> bool:
    """Whether the watchdog of ProcessGroupNCCL handles time-outs: it does by default."""
    env = dict(rank.env)

    def value(name: str, default: str) -> str:
        return env.get(f"TORCH_{name}", env.get(name, default))

    return bool(env) and (value("NCCL_ASYNC_ERROR_HANDLING", "3") != "0" or value("NCCL_BLOCKING_WAIT", "0") == "1")
