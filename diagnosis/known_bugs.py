"""Known bugs of libraries that hang a rank, each by a function on its native stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Thread
from probing.diagnosis.verdict import Finding

__all__ = ("BUGS", "KnownBug", "with_known_bugs")

_MOST_LINES = 4
_FRAMES = 32


class KnownBug(NamedTuple):
    """``function``: on the stack of a thread; ``other``: on the stack of another thread, if the bug takes two.

    ``text``: what it is, since when it is fixed, and where it was reported.
    """

    function: re.Pattern[str]
    text: str
    other: re.Pattern[str] | None = None


BUGS = (
    KnownBug(
        re.compile(r"ncclLocalOpAppend"),
        "NCCL before 2.29.3 loses slots of its proxy on aarch64, until a launch waits for one for ever"
        " (NVIDIA/nccl#2353): update it, or see what its proxy thread waits for",
    ),
    KnownBug(
        re.compile(r"cu(?:Library|Module)Load\w*"),
        "CUDA loads a module under the lock of its context while a kernel waits for a peer"
        " (meta-pytorch/torchcomms#2334): set CUDA_MODULE_LOADING=EAGER, or launch the kernel once before",
        re.compile(r"cu(?:da)?Mem(?:cpy|set)\w*|cu(?:da)?LaunchKernel\w*"),
    ),
    KnownBug(
        re.compile(r"cu(?:da)?EventDestroy\w*"),
        "PyTorch held the GIL while CUDA destroyed an event, which waits for the device (pytorch/pytorch#119393)",
    ),
)


def with_known_bugs(case: Case, finding: Finding) -> Finding:
    """Returns a hang with the known bugs that the stacks of its culprits, or else of its victims, may show."""
    if finding.verdict.group != "hang":
        return finding
    ranks = [culprit.rank for culprit in finding.culprits] or list(finding.victims)
    lines = tuple(islice((line for rank in ranks for line in _lines(case, rank)), _MOST_LINES))
    return replace(finding, evidence=(*finding.evidence, *lines)) if lines else finding


def _lines(case: Case, rank: int) -> Iterator[str]:
    threads = case.ranks[rank].threads if rank in case.ranks else ()
    for bug in BUGS:
        for thread in threads:
            function = _shown(thread, bug.function)
            others = [one for one in threads if one is not thread]
            if function and (bug.other is None or any(_shown(one, bug.other) for one in others)):
                yield f"rank {rank} is in {function}: it may be a known bug. {bug.text}"
                break


def _shown(thread: Thread, function: re.Pattern[str]) -> str:
    """Returns the name of the function on the stack of ``thread``; empty if it is not there."""
    native = (frame.func for frame in thread.frames[:_FRAMES] if frame.native)
    return next((match[0] for name in native if (match := function.match(name))), "")
