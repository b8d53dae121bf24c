"""Finds out why a rank is slower than its peers. Each reason is a function in REASONS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from probing.api.text import share_text, size
from probing.diagnosis.activity.processor import is_compiling
from probing.diagnosis.activity.scene import is_library, user_frame
from probing.diagnosis.affinity import crowd_text, process_text
from probing.diagnosis.case import Case
from probing.diagnosis.cold_caches import WARM_UP, cold_pages_text, compiling_share
from probing.diagnosis.facts import Condition, Rank
from probing.diagnosis.sample_difference import Difference, difference
from probing.diagnosis.words import clean, frame_text

__all__ = ("REASONS", "Reason", "SlowReason", "reason_of")

_LEAST = 0.05
_CONTENDED = 0.1
_RATIO = 1.5
_FAULTS_PER_S = 20.0
_READS_PER_S = 1 << 20
_LONGER = 1.1
_COMMON = 0.08
_TIMES = 8
_MOST_PEERS = 64
_OWN_CPUS = (
    "Give each rank and its workers CPUs of their own: taskset, the cpuset of the container, `srun --cpus-per-task`,"
    " OMP_PROC_BIND, or whatever called sched_setaffinity."
)
_WARM_PAGES = "Read the files once before the job, or free memory of the node: other files push them out of its cache."
_WAITS_FOR_IO = "disk_io", "waits for I/O in"
# The minimum rate of reads from storage, bytes per second, of a rank with cold pages. The second limit is for a rank
# that seems to compute: with a fast disk, copying takes more time than waiting.
_COLD_PER_S, _MUCH_PER_S = 1 << 20, 100 << 20
_COMPILES, _TIMES_COMPILING = 0.1, 3
_IO = frozenset({"fsync", "flush", "load", "open", "read", "readinto", "readline", "save", "write"})


@dataclass(frozen=True, slots=True)
class SlowReason:
    """Why a rank is slow. ``activity``: a key of ACTIVITIES. ``why``: a clause that follows "rank 1 (node b, pid 4)".
    ``sure``: the confidence in the reason, 0 to 1.
    """

    activity: str
    why: str
    evidence: tuple[str, ...]
    next_steps: tuple[str, ...] = ()
    sure: float = 1.0


Reason = Callable[[Case, Rank, Sequence[Rank]], SlowReason | None]
"""(case, the slow rank, the ranks that wait for it) -> why it is slow; None if this reason does not hold."""


def reason_of(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    """Returns the first of REASONS that applies; None if none does. If there are many peers, only some are compared."""
    some = peers[:: len(peers) // _MOST_PEERS + 1]
    return next((found for reason in REASONS if (found := reason(case, rank, some)) is not None), None)


def _throttled(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    del case
    own, usual = _share(rank, _throttled_ns), _usual(peers, _throttled_ns)
    if rank.condition is None or own < max(_LEAST, 2 * usual):
        return None
    quota = rank.condition.cpu_quota
    limit = "" if quota is None else f" to {quota:g} CPUs"
    return SlowReason(
        "throttled",
        f"its cgroup throttles it{limit}, {share_text(own)} of the time",
        (f"throttled {share_text(own)} of the time; the others {share_text(usual)}", *_cgroup(rank)),
        ("Raise the CPU limit of the container or cgroup, or let the rank use fewer threads.",),
    )


def _contended(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    condition = rank.condition
    own, usual = _share(rank, _run_delay_ns), _usual(peers, _run_delay_ns)
    if condition is None or own < max(_CONTENDED, 2 * usual):
        return None
    # On a busy node, a rank that computes for longer also waits for a CPU for longer. Then the lack of a CPU is not the
    # reason, so the ratio of waiting to computing is compared.
    ratios = [_delay_ratio(peer) for peer in peers if _rate(peer, _cpu_ns)]
    if _delay_ratio(rank) < _RATIO * median(ratios or [0.0]):
        return None
    interval = condition.interval_ns or 1
    who = [process_text(case.on_node(rank.node), rank.node, name, pid) for name, pid, _ in condition.neighbours[:3]]
    rivals = [
        f"{name} uses {share_text(ns / interval)} of a CPU"
        for name, (_, _, ns) in zip(who, condition.neighbours, strict=False)
    ]
    cpus = f" on CPUs {clean(condition.cpu_list)}" if condition.cpu_list else ""
    rival = f": {who[0]} runs there" if who else ""
    crowd = crowd_text(case.on_node(rank.node), rank.node, rank.pid, condition)
    shares = (f"it {crowd}",) if crowd else ()
    return SlowReason(
        "computing",
        f"it waits for a CPU {share_text(own)} of the time{f': it {crowd}' if crowd else rival}",
        (
            f"ready to run and without a CPU{cpus} {share_text(own)} of the time; the others {share_text(usual)}",
            *rivals,
            *shares,
        ),
        (_OWN_CPUS,) if crowd else ("Move the other processes off its CPUs, or change its CPU affinity.",),
    )


def _swapping(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    del case
    own, usual = _rate(rank, _faults), median([_rate(peer, _faults) for peer in peers] or [0.0])
    if rank.condition is None or own < max(_FAULTS_PER_S, 4 * usual):
        return None
    swap = rank.condition.swap_bytes or 0
    what = "its memory is swapped out" if swap else "it reads pages of files back into memory"
    return SlowReason(
        "swapping",
        f"{what}, {own:.0f} major faults a second",
        (f"{own:.0f} major faults a second, the others {usual:.0f}; {size(swap)} of its memory are swapped out",),
        ("Free memory on the node or in the cgroup: the rank waits for the disk at each fault.",),
    )


def _compiling(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    """Returns the reason that a compiler runs on this rank only."""
    own = compiling_share(rank.samples)
    usual = median([compiling_share(peer.samples) for peer in peers if peer.samples] or [own])
    if own < _LEAST or own < _TIMES_COMPILING * usual:
        return None
    # A small share may still be the reason, because the window of the samples may have begun before the compiler did.
    # The compiler is rejected as the reason only if the share of another single frame differs by more.
    if own < _COMPILES:
        code = difference(rank.samples, [case.work(peer.rank) for peer in peers])
        if code is not None and code.share - code.others > own - usual:
            return None
    frames = max((s for s in rank.samples if any(map(is_compiling, s.frames))), key=lambda s: s.share).frames
    user = user_frame(frames)
    place = f" in {frame_text(user)}" if user is not None and not is_library(user) else ""
    shares = f"{share_text(own)} of the time, the others {share_text(usual)}"
    return SlowReason(
        "compiling",
        f"it compiles{place}, {shares}: its cache is cold, or its shapes are new",
        (f"samples of its main thread: a compiler {shares}",),
        WARM_UP,
    )


def _slow_code(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    """Returns the reason that some code takes a larger share of this rank's work than of the others' work."""
    found = difference(rank.samples, [case.work(peer.rank) for peer in peers])
    if found is None or found.share - found.others < _LEAST or _common(rank, found):
        return None
    (kind, does), place = _kind(rank, peers, found), frame_text(found.frame)
    steps: tuple[str, ...] = (f"Look at {place}: only this rank spends so much time there.",)
    if more := _workers_wait(case, rank) if found.loader else "":
        steps = (_OWN_CPUS,)
    elif more := cold_pages_text(rank, peers, _MUCH_PER_S if kind == "computing" else _COLD_PER_S):
        steps = (_WARM_PAGES,)
        kind, does = (kind, does) if found.loader else _WAITS_FOR_IO
    shares = f"{share_text(found.share)} of the time; the others {share_text(found.others)}"
    return SlowReason(
        kind,
        f"it {does} {place}, {shares}{f': {more}' if more else ''}",
        (f"samples of its main thread: {place} {shares}", *((more,) if more else ())),
        steps,
    )


def _workers_wait(case: Case, rank: Rank) -> str:
    """Returns a clause about the first data-loader worker that waits for a CPU that it shares; empty if none does."""
    for helper in rank.helpers:
        condition = helper.condition
        if helper.role != "data_loader" or condition is None or not condition.interval_ns:
            continue
        waits = min(1.0, (condition.run_delay_ns or 0) / condition.interval_ns)
        crowd = crowd_text(case.on_node(rank.node), rank.node, helper.pid, condition) if waits >= _CONTENDED else ""
        if crowd:
            return f"worker {helper.pid} waits for a CPU {share_text(waits)} of the time: it {crowd}"
    return ""


def _blocked(rank: Rank, found: Difference) -> bool:
    """Returns whether the rank is mostly off the CPU in this code, for other reasons than waiting for a CPU."""
    return found.blocked(_share(rank, _run_delay_ns))


def _common(rank: Rank, found: Difference) -> bool:
    """Returns whether all ranks compute in this code for a notable time, so that this rank only has more to compute."""
    return not _blocked(rank, found) and not found.loader and found.others >= max(_COMMON, found.share / _TIMES)


def _kind(rank: Rank, peers: Sequence[Rank], found: Difference) -> tuple[str, str]:
    if found.loader:
        return "data_loader", "waits for its data loader in"
    if not _blocked(rank, found):
        return "computing", "computes in"
    reads = _rate(rank, _io_bytes)
    if found.frame.func in _IO or reads > max(_READS_PER_S, 2 * median([_rate(p, _io_bytes) for p in peers] or [0.0])):
        return _WAITS_FOR_IO
    return "sleeping", "is blocked in"


def _uneven(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    """Returns the reason that the rank runs the same code for longer. The rank must have a condition: without one, a
    lack of CPU, which looks the same, cannot be ruled out.
    """
    if rank.condition is None or rank.condition.interval_ns is None:
        return None
    theirs = [case.work(peer.rank) for peer in peers if peer.samples]
    own, usual = case.work(rank.rank).total, median([work.total for work in theirs] or [1.0])
    if own < _LONGER * usual:
        return None
    found = difference(rank.samples, theirs)
    place = f", most of it in {frame_text(found.frame)}" if found else ""
    shares = f"{share_text(own)} of the time, the others {share_text(usual)}"
    return SlowReason(
        "computing",
        f"uneven work: it is busy {shares}, in the same code{place}",
        ("the stacks of its main thread are those of the others, for longer", _no_other_cause(rank)),
        ("Compare the sizes of the ranks' batches, their sequence lengths and their parts of the model.",),
    )


def _hardware(case: Case, rank: Rank, peers: Sequence[Rank]) -> SlowReason | None:
    """Returns the reason that hardware of this rank works worse. Symptoms that all its peers have, too, explain no
    difference and are left out.
    """
    common = [{symptom.kind for symptom in case.symptoms_of_rank(peer.rank)} for peer in peers]
    shared = set.intersection(*common) if common else set()
    own = [symptom for symptom in case.symptoms_of_rank(rank.rank) if symptom.kind not in shared]
    if not own:
        return None
    first = own[0]
    evidence = (*first.evidence, *(symptom.text for symptom in own[1:4]))
    return SlowReason("bad_hardware", first.why, evidence, first.next_steps)


REASONS: list[Reason] = [_throttled, _contended, _swapping, _hardware, _compiling, _slow_code, _uneven]


def _no_other_cause(rank: Rank) -> str:
    waits, throttled = _share(rank, _run_delay_ns), _share(rank, _throttled_ns)
    return f"it waits for a CPU {share_text(waits)} of the time and is throttled {share_text(throttled)}"


def _cgroup(rank: Rank) -> tuple[str, ...]:
    cgroup = rank.condition.cgroup if rank.condition else None
    return (f"cgroup {clean(cgroup)}",) if cgroup else ()


def _delay_ratio(rank: Rank) -> float:
    """Returns how long the main thread waited for a CPU for each second on a CPU."""
    delay, ran = _rate(rank, _run_delay_ns), _rate(rank, _cpu_ns)
    return delay / ran if ran else inf


def _cpu_ns(condition: Condition) -> int | None:
    return condition.cpu_ns


def _throttled_ns(condition: Condition) -> int | None:
    return condition.throttled_ns


def _run_delay_ns(condition: Condition) -> int | None:
    return condition.run_delay_ns


def _faults(condition: Condition) -> int | None:
    return condition.major_faults


def _io_bytes(condition: Condition) -> int | None:
    return (condition.read_bytes or 0) + (condition.write_bytes or 0)


def _rate(rank: Rank, what: Callable[[Condition], int | None]) -> float:
    """Returns the rate per second of a counter in the condition of ``rank``; 0 if unknown."""
    condition = rank.condition
    if condition is None or not condition.interval_ns:
        return 0.0
    return (what(condition) or 0) * 1e9 / condition.interval_ns


def _share(rank: Rank, what: Callable[[Condition], int | None]) -> float:
    """Returns a time in the condition of ``rank``, ns, as a share of the interval of the condition."""
    return min(1.0, _rate(rank, what) / 1e9)


def _usual(peers: Sequence[Rank], what: Callable[[Condition], int | None]) -> float:
    return median([_share(peer, what) for peer in peers if peer.condition] or [0.0])
