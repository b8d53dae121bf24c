"""Finds the code in which samples differ: a rank's samples from its peers', or a job's samples from its past."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from probing.diagnosis.facts import Frame, Sample

__all__ = ("Difference", "Growth", "Work", "difference", "growth", "work_of")

_LEAST = 0.15
"""The minimum difference, as a share of the working time, by which a frame must exceed its share on the other ranks."""
_NEAR = 0.8
_COLLECTIVES = "/distributed/distributed_c10d.py"
_LOADER = "torch/utils/data/"
# A thread that is off the CPU in torch's own code waits for a CUDA stream or for other ranks.
_TORCH = "/torch/"
_Key = tuple[str, str, int | None]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a rank, without its waits for others, as shares of the window.

    ``shares``: for each frame, the share of the window in which it is anywhere in the stack. Each frame has two keys:
    with its line number, and with None in its place. ``leaves``: the shares of innermost frames, with line numbers.
    ``depths``: the mean distance of each frame from the innermost frame. ``blocked``: the part of each frame's share
    that is off the CPU.
    """

    total: float
    shares: Mapping[_Key, float]
    leaves: Mapping[_Key, float]
    depths: Mapping[_Key, float]
    blocked: Mapping[_Key, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference: ``frame`` takes ``share`` of the window, of which ``off_cpu`` is off the CPU; on the other ranks it
    takes ``others`` (median).

    ``loader``: the frame is in a data loader, or called by one.
    """

    frame: Frame
    share: float
    others: float
    off_cpu: float
    loader: bool = False

    def blocked(self, waits_for_cpu: float = 0.0) -> bool:
        """Returns whether the frame is mostly off the CPU. The share ``waits_for_cpu`` of the window does not count,
        because the thread was ready to run.
        """
        return self.off_cpu - waits_for_cpu > 0.6 * self.share


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of an innermost ``frame``: it takes ``after`` of each step, and took ``before``, ns."""

    frame: Frame
    before: float
    after: float


def growth(past: Iterable[Sample], before: float, recent: Iterable[Sample], after: float) -> Growth | None:
    """Returns the innermost frame with most of the time by which steps grew from ``before`` to ``after``, ns.

    None if no frame has half of this time.
    """
    was, now = work_of(past).leaves, work_of(recent).leaves
    grown = {key: share * after - was.get(key, 0.0) * before for key, share in now.items()}
    key = max(grown, key=grown.__getitem__, default=None)
    if key is None or not was or grown[key] * 2 < after - before:
        return None
    return Growth(Frame(*key), was.get(key, 0.0) * before, now[key] * after)


def work_of(samples: Iterable[Sample]) -> Work:
    """Returns the work in ``samples`` of one rank."""
    shares: defaultdict[_Key, float] = defaultdict(float)
    leaves: defaultdict[_Key, float] = defaultdict(float)
    blocked: defaultdict[_Key, float] = defaultdict(float)
    depths: defaultdict[_Key, float] = defaultdict(float)
    total = 0.0
    for sample, keys in _stacks(samples):
        total += sample.share
        leaves[next(iter(keys))] += sample.share
        for key, depth in keys.items():
            shares[key] += sample.share
            blocked[key] += 0.0 if sample.on_cpu else sample.share
            depths[key] += depth * sample.share
    means = {key: depths[key] / share if share else 0.0 for key, share in shares.items()}
    return Work(total, shares, leaves, means, blocked)


def _stacks(samples: Iterable[Sample]) -> Iterator[tuple[Sample, dict[_Key, int]]]:
    """Yields the samples of work, and the depth of each Python frame in them."""
    for sample in samples:
        frames = [f for f in sample.frames if not f.native]
        if not frames or _waits(sample, frames):
            continue
        keys: dict[_Key, int] = {}
        for depth, frame in enumerate(frames):
            for key in (_line(frame), (frame.func, frame.file, None)):
                keys.setdefault(key, depth)
        yield sample, keys


def difference(one: Sequence[Sample], others: Iterable[Work]) -> Difference | None:
    """Returns the innermost frame that takes a larger share of the work of ``one`` than of ``others``.

    None if no frame does: then ``one`` does the same as the others, perhaps for longer.
    """
    mine, theirs = work_of(one), [work for work in others if work.total > 0]
    if mine.total <= 0 or not theirs:
        return None
    more: defaultdict[_Key, float] = defaultdict(float)
    for sample, keys in _stacks(one):
        # A caller that only this rank has is no difference if its callees take as long as usual.
        excess = _excess(next(iter(keys)), mine, theirs) * sample.share / mine.total
        for key in keys:
            more[key] += excess
    most = max(more.values())
    if most < _LEAST:
        return None
    near = [key for key, extra in more.items() if extra >= _NEAR * most]
    # Chooses the innermost frame, and its line rather than its function.
    key = min(near, key=lambda k: (mine.depths[k], k[2] is None, -more[k]))
    func, file, line = key
    if line is None:
        line = max(
            (k for k in mine.shares if k[:2] == key[:2] and k[2] is not None), key=lambda k: mine.shares[k], default=key
        )[2]
    return Difference(
        Frame(func, file, line),
        mine.shares[key],
        median(work.shares.get(key, 0.0) for work in theirs),
        mine.blocked[key],
        _in_loader(one, key),
    )


def _excess(leaf: _Key, mine: Work, theirs: Sequence[Work]) -> float:
    """Returns the fraction of an innermost frame's share of the work that exceeds the median share on the other ranks,
    0 to 1.
    """
    usual = median(work.leaves.get(leaf, 0.0) / work.total for work in theirs)
    return max(0.0, 1 - usual * mine.total / mine.leaves[leaf]) if mine.leaves[leaf] > 0 else 0.0


def _line(frame: Frame) -> _Key:
    return frame.func, frame.file, frame.line


def _waits(sample: Sample, frames: Sequence[Frame]) -> bool:
    """Returns whether a sample shows a wait for other ranks."""
    if any(f.file.endswith(_COLLECTIVES) for f in frames):
        return True
    return not sample.on_cpu and _TORCH in frames[0].file and not any(_LOADER in f.file for f in frames)


def _in_loader(samples: Iterable[Sample], key: _Key) -> bool:
    """Returns whether the frame is mostly in stacks of a data loader."""
    inside = outside = 0.0
    for sample in samples:
        if any((f.func, f.file) == key[:2] for f in sample.frames):
            if any(_LOADER in f.file for f in sample.frames):
                inside += sample.share
            else:
                outside += sample.share
    return inside > outside
