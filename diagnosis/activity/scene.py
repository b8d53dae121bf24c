"""The facts about one process that show its activity: main thread, Python and native frames, kernel state."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from probing.diagnosis.facts import Condition, Exit, Facts, Frame, Helper, Rank, Thread
from probing.diagnosis.words import clean, frame_text

__all__ = ("Scene", "Seen", "innermost", "is_library", "letter", "python_frames", "user_frame")

_PATH = 200
# The kernel's letter for each state of a thread in the facts.
_LETTERS = {"running": "R", "sleeping": "S", "blocked": "D", "stopped": "T", "zombie": "Z"}
_FORKED = "/multiprocessing/process.py"
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|/pytorch/torch/|^<frozen |^<eval_with_key>")


@dataclass(frozen=True, slots=True)
class Seen:
    """The activity of a process. ``does``: a predicate such as "sleeps in step, train.py:40". ``who``: its subject.

    ``settled``: ``progressing`` is final, even if None.
    """

    kind: str
    does: str
    who: str = "it"
    frame: Frame | None = None
    since_ns: int | None = None
    progressing: bool | None = None
    evidence: tuple[str, ...] = ()
    settled: bool = False


@dataclass(frozen=True)
class Scene:
    """The facts about a process. ``now_ns``: when the facts were read, on the clock of ``node``. ``rank``: None for a
    helper.
    """

    pid: int
    state: str | None
    threads: tuple[Thread, ...]
    condition: Condition
    exit: Exit | None
    facts: Facts
    now_ns: int
    helpers: tuple[Helper, ...] = ()
    rank: Rank | None = None
    node: str = ""

    @classmethod
    def of_rank(cls, rank: Rank, facts: Facts) -> Scene:
        condition = rank.condition or Condition()
        now = next((node.taken_ns for node in facts.nodes if node.node == rank.node), facts.taken_ns)
        return cls(rank.pid, rank.state, rank.threads, condition, rank.exit, facts, now, rank.helpers, rank, rank.node)

    def of_helper(self, helper: Helper) -> Scene:
        condition = helper.condition or Condition()
        own = helper.pid, helper.state, helper.threads, condition, helper.exit
        return Scene(*own, self.facts, self.now_ns, node=self.node)

    @cached_property
    def main(self) -> Thread | None:
        return next((thread for thread in self.threads if thread.main), None)

    @cached_property
    def python(self) -> tuple[Frame, ...]:
        """The Python frames of the main thread, innermost first."""
        frames = python_frames(self.main.frames) if self.main else ()
        # Frames outside of _bootstrap belong to the process that forked this one.
        forked = innermost(frames, _FORKED, ("_bootstrap",))
        return frames[:forked] if forked is not None else frames

    @cached_property
    def native(self) -> tuple[Frame, ...]:
        """The C functions that the innermost Python frame of the main thread called, innermost first."""
        return tuple(takewhile(lambda frame: frame.native, self.main.frames if self.main else ()))

    @cached_property
    def user(self) -> Frame | None:
        return user_frame(self.python)

    @property
    def letter(self) -> str:
        """The kernel's state letter of the main thread; empty if unknown."""
        return self.condition.state or (letter(self.main) if self.main else "")

    @property
    def target(self) -> str:
        """The file, pipe, socket or child in the main thread's system call, as text."""
        return clean(self.condition.target or "", _PATH)

    @property
    def where(self) -> str:
        """Returns " in FUNCTION, FILE:LINE" of the user's innermost frame; empty without frames."""
        return self.at(self.user)

    def at(self, frame: Frame | None) -> str:
        return f" in {frame_text(frame)}" if frame else ""

    @property
    def since_ns(self) -> int | None:
        """The earliest time at which the main thread is known to have been at its line, ns."""
        known = [self.condition.asleep_since_ns, self.main.since_ns if self.main else None]
        return min((t for t in known if t is not None), default=None)

    @property
    def watching_since_ns(self) -> int | None:
        """The time since which the daemon of the rank's node watches, ns; None if unknown."""
        node = self.rank.node if self.rank else ""
        return next((n.watching_since_ns for n in self.facts.nodes if n.node == node), None)

    @property
    def slept(self) -> bool:
        """Whether the main thread did not run between the readings of its condition."""
        c = self.condition
        if c.interval_ns is None:
            return False
        asleep = c.asleep_since_ns is not None and c.asleep_since_ns <= self.now_ns - c.interval_ns
        return asleep or (c.switches == 0 and not c.cpu_ns)

    def runs_in(self, *tokens: str) -> bool:
        """Returns whether the innermost Python frame called a C function with one of ``tokens`` in its name."""
        return any(token in frame.func for frame in self.native for token in tokens)

    @property
    def kernel(self) -> str:
        """The kernel's state of the main thread, as text; empty if unknown."""
        c = self.condition
        about = [f"in {clean(c.syscall)}"] if c.syscall else []
        about += [f"on {self.target}"] if c.target else []
        about += [f"({clean(c.file_system, _PATH)})"] if c.file_system else []
        function = f"kernel function {clean(c.wchan)}" if c.wchan else ""
        state = f"state {clean(self.letter, 1)}" if self.letter else ""
        parts = [part for part in (state, " ".join(about), function) if part]
        return f"kernel: {', '.join(parts)}" if parts else ""


def python_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Returns the Python frames of ``frames``."""
    return tuple(frame for frame in frames if not frame.native)


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """Returns the innermost Python frame of the user's code, or if there is none, of any code."""
    python = python_frames(frames)
    return next((frame for frame in python if not is_library(frame)), python[0] if python else None)


def is_library(frame: Frame) -> bool:
    """Returns whether a frame belongs to Python itself or to an installed package such as torch."""
    return bool(_LIBRARY.search(frame.file))


def innermost(frames: Iterable[Frame], file: str, names: Iterable[str] = ()) -> int | None:
    """Returns the index of the innermost frame whose file ends in ``file`` and whose function is in ``names``."""
    for at, frame in enumerate(frames):
        if frame.file.endswith(file) and (not names or frame.func.rpartition(".")[2] in names):
            return at
    return None


def letter(thread: Thread) -> str:
    """Returns the kernel's letter of a thread's state; empty if unknown."""
    return _LETTERS.get(thread.state or "", (thread.state or "")[:1])
