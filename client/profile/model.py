"""A profile in memory: weighted stacks, from which all formats and tables are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = (
    "IMPORTS",
    "OFF_CPU",
    "ON_CPU",
    "STATE",
    "Frame",
    "Profile",
    "Sample",
    "folded_imports",
    "grouped",
    "label",
    "merged",
    "short_files",
    "without_lines",
)

STATE, ON_CPU, OFF_CPU = "state", "on the CPU", "off the CPU"
"""The key of the label that says whether the thread of a sample ran, and the two values of this label."""
IMPORTS = "(imports)"
"""Stands for the frames of Python's import system."""
_IMPORT_FILES = ("<frozen importlib.", "<frozen zipimport>")
_LIBRARIES = ("/site-packages/", "/dist-packages/")


class Frame(NamedTuple):
    """A frame. ``lineno`` is None if unknown. A frame that is not code has no ``file``."""

    func: str
    file: str = ""
    lineno: int | None = None


class Sample(NamedTuple):
    """A stack with its weight. ``frames`` are ordered from the outermost and never empty. ``labels``: job, rank, node,
    pid, thread, state.

    ``ns`` is the time that the sample represents, ``seen`` how often the stack was sampled.
    """

    frames: tuple[Frame, ...]
    ns: int
    seen: int
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile. ``kind`` is ``cpu``, ``wall`` or ``off_cpu``. ``trains``: the profile has only threads that train.

    ``begin_ns``, the begin of the interval, is CLOCK_REALTIME; 0 if unknown.
    """

    title: str
    kind: str
    samples: tuple[Sample, ...]
    begin_ns: int = 0
    length_ns: int = 0
    trains: bool = False

    @property
    def ns(self) -> int:
        """The time of all samples together."""
        return sum(sample.ns for sample in self.samples)

    @property
    def seen(self) -> int:
        return sum(sample.seen for sample in self.samples)

    @property
    def time_text(self) -> str:
        """Returns which part of the time the profile covers, as text: ``on the CPU``, ``on and off the CPU,
        96% off``.
        """
        if self.kind != "wall":
            return "on the CPU" if self.kind == "cpu" else "off the CPU"
        away = sum(sample.ns for sample in self.samples if (STATE, OFF_CPU) in sample.labels)
        whose = " of the threads that train" if self.trains else ""
        return f"on and off the CPU{whose}, {away / (self.ns or 1):.0%} off"


def merged(samples: Iterable[Sample], *, labels: bool = False) -> tuple[Sample, ...]:
    """Merges samples with equal frames (and equal labels, if ``labels``), and sorts them by frames."""
    # Frames are replaced by numbers, which are hashed and compared faster.
    numbers: dict[Frame, int] = {}
    sums: dict[tuple[tuple[int, ...], tuple[tuple[str, str], ...]], Sample] = {}
    for sample in samples:
        kept = sample.labels if labels else ()
        key = (tuple([numbers.setdefault(frame, len(numbers)) for frame in sample.frames]), kept)
        known = sums.get(key)
        ns, seen = (known.ns, known.seen) if known is not None else (0, 0)
        sums[key] = Sample(sample.frames, ns + sample.ns, seen + sample.seen, kept)
    places = {numbers[frame]: place for place, frame in enumerate(sorted(numbers, key=_order))}
    found = sorted(sums.items(), key=lambda item: ([places[number] for number in item[0][0]], item[0][1]))
    return tuple([sample for _, sample in found])


def _order(frame: Frame) -> tuple[str, str, int]:
    return frame.func, frame.file, frame.lineno or 0


def without_lines(profile: Profile) -> Profile:
    """Returns the profile without line numbers, so that times are counted by function."""
    samples = (s._replace(frames=tuple(f._replace(lineno=None) for f in s.frames)) for s in profile.samples)
    return replace(profile, samples=tuple(samples))


def folded_imports(profile: Profile) -> Profile:
    """Returns the profile with one frame IMPORTS in place of all frames of the import system in a stack."""
    samples = (s._replace(frames=_without_importlib(s.frames)) for s in profile.samples)
    return replace(profile, samples=tuple(samples))


def _without_importlib(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    first = next((at for at, frame in enumerate(frames) if frame.file.startswith(_IMPORT_FILES)), None)
    if first is None:
        return frames
    kept = [frame for frame in frames[first:] if not frame.file.startswith(_IMPORT_FILES)]
    return (*frames[:first], Frame(IMPORTS), *kept)


def grouped(profile: Profile, keys: Sequence[str]) -> Profile:
    """Returns the profile with an additional outermost frame for each label in ``keys``: ``rank 3``, ``thread
    MainThread``.
    """
    samples = (
        s._replace(frames=(*(Frame(f"{key} {dict(s.labels).get(key, '-')}") for key in keys), *s.frames))
        for s in profile.samples
    )
    return replace(profile, samples=tuple(samples))


def label(frame: Frame, short: dict[str, str]) -> str:
    """Returns ``func (file)`` or ``func (file:line)``. ``short``: the short name of each file, as ``short_files``
    returns them.
    """
    if not frame.file:
        return frame.func or "?"
    where = short.get(frame.file, frame.file)
    return f"{frame.func or '?'} ({where})" if frame.lineno is None else f"{frame.func or '?'} ({where}:{frame.lineno})"


def short_files(profiles: Iterable[Profile]) -> dict[str, str]:
    """Returns a short name for each file: its path within its package, else the last two parts of the path; the whole
    path if the short name is ambiguous.
    """
    files = {frame.file for profile in profiles for sample in profile.samples for frame in sample.frames}
    short = {file: _short(file) for file in files}
    taken: dict[str, int] = {}
    for name in short.values():
        taken[name] = taken.get(name, 0) + 1
    return {file: name if taken[name] == 1 else file for file, name in short.items()}


def _short(file: str) -> str:
    for folder in _LIBRARIES:
        if folder in file:
            return file.rpartition(folder)[2]
    head, found, tail = file.rpartition("/lib/python3")
    if found and head and "/" in tail:
        return tail.partition("/")[2]
    return "/".join(file.split("/")[-2:])
