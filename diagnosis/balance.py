"""Divides the training steps of each rank into computing, communication, waiting and I/O.

The four parts of a step add up to it:

* communication: an operation runs, and all its ranks have called it;
* wait: an operation runs, and the rank waits for a rank that has not called it. The rank that calls last has the
  shortest duration, so the wait of a rank is its own duration less the shortest. Only durations are compared, because
  the clocks of nodes may differ. Operations with a root, sends and receives have no common end, and so no wait;
* io: the share of the samples in which the main thread loads data, or reads or writes a checkpoint;
* compute: the rest.

A part is None if the steps, samples or times of operations that it needs are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probing.api.text import age, numbers_text

__all__ = ("EVEN", "Balance", "Pair", "RankTimes", "Role", "Shares", "balance", "reads_or_writes")

EVEN = "work is even"
"""The beginning of the sentence about a job whose ranks compute for about the same time."""
# Paths of Python files that load data, or read or write checkpoints; and usual names of user functions that read or
# write checkpoints.
_FILES = (
    "/torch/utils/data/",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/torchdata/",
    "/safetensors/",
    "/webdataset/",
    "/fsspec/",
    "/s3fs/",
    "/h5py/",
    "/PIL/Image.py",
    "/numpy/lib/npyio.py",
    "/numpy/lib/_npyio_impl.py",
)
_FUNCTIONS = frozenset({"save_checkpoint", "load_checkpoint", "write_checkpoint", "read_checkpoint"})
# Work is uneven if the rank that computes longest takes this many times as long as the shortest.
_UNEVEN = 1.2
# A wait gets a sentence if it takes at least this share of the step.
_NOTABLE_WAIT = 0.05
# If a rank arrives last at less than this share of the operations, its sentence adds that no rank is always late.
_OFTEN = 0.5


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Sums over the steps of a rank, ns. ``io_share``: the share of the samples of its main thread that show I/O. An
    unknown value is None.

    ``gpu_wait_ns``: time in which its threads waited for the GPU, which is included in the other times.
    """

    rank: int | None
    node: str
    pid: int
    steps: int
    step_ns: int
    comm_ns: int | None = None
    io_share: float | None = None
    gpu_wait_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Operations of ``rank`` at which ``last`` arrived last. ``wait_ns``: how long the rank waited in them."""

    comm: str
    role: str
    rank: int
    last: int
    ops: int
    comm_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the step of a rank, 0 to 1; None: unknown. ``last_share``: of the operations with a known wait, the
    share at which this rank arrived last. ``waits_for``: the rank for which this rank waited longest."""

    rank: int | None
    node: str
    pid: int
    steps: int
    step_ns: float | None
    compute: float | None
    communication: float | None
    wait: float | None
    io: float | None
    gpu_wait: float | None
    last_share: float | None
    waits_for: int | None


@dataclass(frozen=True, slots=True)
class Role:
    """The operations on communicators of one parallel role; shares of the step are means over its ranks.

    ``last``: the rank that arrives last most often, at ``last_share`` of the operations.
    """

    role: str
    comms: int
    ranks: tuple[int, ...]
    communication: float | None
    wait: float | None
    last: int
    last_share: float


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of a job. ``uneven``: the longest computing time in a step of any rank, divided by the shortest.
    ``sentences``: sentences to print.
    """

    ranks: tuple[Shares, ...]
    roles: tuple[Role, ...]
    uneven: float | None
    sentences: tuple[str, ...]


def balance(times: Sequence[RankTimes], pairs: Sequence[Pair]) -> Balance:
    """Returns the shares of each rank and role. ``pairs`` must be of the same job and interval as ``times``."""
    by_rank: dict[int | None, list[Pair]] = {}
    for pair in pairs:
        by_rank.setdefault(pair.rank, []).append(pair)
    shares = tuple(_shares(own, by_rank.get(own.rank, ())) for own in times)
    uneven, sentence = _uneven(shares)
    sentences = ([sentence] if sentence else []) + _waits(shares, pairs)
    return Balance(shares, tuple(_roles(times, pairs)), uneven, tuple(sentences))


def reads_or_writes(frames: Iterable[tuple[str, str]]) -> bool:
    """Returns whether a stack of pairs (function, file) loads data, or reads or writes a checkpoint."""
    return any(func.rpartition(".")[2] in _FUNCTIONS or any(part in file for part in _FILES) for func, file in frames)


def _shares(own: RankTimes, mine: Sequence[Pair]) -> Shares:
    comm = None if own.comm_ns is None or not own.step_ns else min(1.0, own.comm_ns / own.step_ns)
    wait = None if comm is None or not mine else min(comm, sum(pair.wait_ns for pair in mine) / own.step_ns)
    # One thread may load data while another communicates, so this share is limited to the rest of the step.
    io = None if own.io_share is None else min(own.io_share, 1.0 - (comm or 0.0))
    by_last: dict[int, int] = {}
    for pair in mine:
        by_last[pair.last] = by_last.get(pair.last, 0) + pair.wait_ns
    waits_for = max((last for last in by_last if last != own.rank), key=lambda last: by_last[last], default=None)
    number = sum(pair.ops for pair in mine)
    return Shares(
        own.rank,
        own.node,
        own.pid,
        own.steps,
        own.step_ns / own.steps if own.steps else None,
        compute=None if comm is None else max(0.0, 1.0 - comm - (io or 0.0)),
        communication=None if comm is None else comm - (wait or 0.0),
        wait=wait,
        io=io,
        gpu_wait=own.gpu_wait_ns / own.step_ns if own.gpu_wait_ns is not None and own.step_ns else None,
        last_share=sum(pair.ops for pair in mine if pair.last == own.rank) / number if number else None,
        waits_for=waits_for,
    )


def _uneven(shares: Sequence[Shares]) -> tuple[float | None, str]:
    """Returns the ratio of the longest to the shortest computing time, and a sentence about it."""
    known = [(own.compute * own.step_ns, own) for own in shares if own.compute is not None and own.step_ns]
    if len(known) < 2:
        return None, ""
    (least, quick), (most, slow) = min(known, key=lambda k: k[0]), max(known, key=lambda k: k[0])
    if least <= 0:
        return None, ""
    ratio = most / least
    if ratio < _UNEVEN:
        return ratio, f"{EVEN}: the ranks differ by {ratio - 1:.0%} at most"
    longest, shortest = (f"rank {own.rank} computes {age(ns)}" for ns, own in ((most, slow), (least, quick)))
    return ratio, f"work is uneven: {longest} a step, {shortest}: {ratio:.1f} times"


def _waits(shares: Sequence[Shares], pairs: Sequence[Pair]) -> list[str]:
    """Returns a sentence for each rank for which others wait; the rank with the longest waits comes first."""
    step_ns = {own.rank: own.step_ns * own.steps for own in shares if own.step_ns}
    caused: dict[int, dict[int, int]] = {}
    for pair in pairs:
        if pair.last != pair.rank and pair.rank in step_ns:
            waiting = caused.setdefault(pair.last, {})
            waiting[pair.rank] = waiting.get(pair.rank, 0) + pair.wait_ns
    lasts = {own.rank: own.last_share or 0.0 for own in shares}
    found: list[tuple[float, str]] = []
    for last, waiting in caused.items():
        share = {rank: ns / step_ns[rank] for rank, ns in waiting.items()}
        notable = sorted(rank for rank in share if share[rank] >= _NOTABLE_WAIT)
        if notable:
            most = max(share[rank] for rank in notable)
            ranks = f"rank {notable[0]} waits" if len(notable) == 1 else f"ranks {numbers_text(notable)} wait"
            often = lasts.get(last, 0.0)
            text = f"{ranks} for rank {last}, up to {most:.0%} of the step; it arrives last in {often:.0%} of the"
            found.append((most, f"{text} operations" + ("" if often >= _OFTEN else ": no rank is always late")))
    return [text for _, text in sorted(found, key=lambda f: -f[0])]


def _roles(times: Sequence[RankTimes], pairs: Sequence[Pair]) -> Iterable[Role]:
    step_ns = {own.rank: own.step_ns for own in times if own.step_ns}
    by_role: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_role.setdefault(pair.role, []).append(pair)
    for role, own in sorted(by_role.items()):
        ranks = sorted({pair.rank for pair in own})
        whole = sum(step_ns.get(rank, 0) for rank in ranks)
        comm, wait = sum(pair.comm_ns for pair in own), sum(pair.wait_ns for pair in own)
        # An operation counts once for each of its ranks.
        lasts: dict[int, int] = {}
        for pair in own:
            lasts[pair.last] = lasts.get(pair.last, 0) + pair.ops
        last = max(lasts, key=lambda rank: lasts[rank])
        yield Role(
            role,
            len({pair.comm for pair in own}),
            tuple(ranks),
            min(1.0, (comm - wait) / whole) if whole else None,
            min(1.0, wait / whole) if whole else None,
            last,
            lasts[last] / sum(lasts.values()),
        )
