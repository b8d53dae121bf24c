"""Finds what a rank does, from its stack and its condition."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from probing.diagnosis.activity.data_loader import find_data_loader, find_worker
from probing.diagnosis.activity.kinds import ACTIVITIES
from probing.diagnosis.activity.locks import find_gil, find_lock
from probing.diagnosis.activity.processor import (
    find_collecting,
    find_compiling,
    find_computing,
    find_hindered,
    find_matching,
    uses_cpu,
)
from probing.diagnosis.activity.requests import find_requests, find_rpc
from probing.diagnosis.activity.scene import Scene, Seen, letter
from probing.diagnosis.activity.storage import find_checkpoint, find_disk_io, moves_data
from probing.diagnosis.activity.waiting import (
    find_child,
    find_collective,
    find_context_lock,
    find_ended,
    find_init,
    find_network,
    find_open,
    find_pipe,
    find_sleep,
    find_stdin,
    find_stopped,
    full_shm,
)
from probing.diagnosis.facts import Facts, Frame, Rank
from probing.diagnosis.words import clean

__all__ = ("Activity", "activity_of")


_SYSTEM = re.compile(r"/(?:libc[.-]|libpthread|ld-|(?:lib)?python3)[^/]*$|^\[")
_LINE = 600
# A thread that uses a smaller share of a CPU only polls.
_POLLS = 0.02
# Samples of the first seconds of a daemon do not show what was before.
_FIRST_SAMPLES_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank does. ``kind``: a key of ``kinds.ACTIVITIES``.

    ``why``: a clause for people, as "its data loader waits in fetch_shard, data.py:12". ``frame``: the frame that shows
    it. ``since_ns``: since when, or longer, UTC. ``progressing``: whether it makes progress (its stack moves, it uses
    the CPU in changing frames, it writes); None if not known. ``evidence``: lines for people. ``next_steps``: advice.
    """

    kind: str
    why: str
    frame: Frame | None = None
    since_ns: int | None = None
    progressing: bool | None = None
    evidence: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()


def activity_of(rank: Rank, facts: Facts) -> Activity:
    """Returns what ``rank`` does at the moment of ``facts``."""
    scene = Scene.of_rank(rank, facts)
    seen = _look(scene)
    evidence = (*seen.evidence, full_shm(scene), _tracer(scene, seen.kind))
    lines = dict.fromkeys(clean(line, _LINE) for line in evidence if line)
    steps = tuple(
        step.replace("PID", str(rank.pid)).replace("--rank R", f"--rank {rank.rank}")
        for step in ACTIVITIES[seen.kind].next_steps
    )
    why = clean(f"{seen.who} {seen.does}", _LINE)
    return Activity(seen.kind, why, seen.frame, seen.since_ns, seen.progressing, tuple(lines), steps)


def _look(scene: Scene) -> Seen:
    found = next((seen for find in _TOPICS if (seen := find(scene))), None) or _unknown(scene)
    settled = found.settled or found.progressing is not None
    progressing = found.progressing if settled else _progressing(scene)
    # A thread that makes progress has not been at its line since it last slept.
    since = found.since_ns if found.since_ns is not None or progressing else scene.since_ns
    return replace(found, since_ns=since, progressing=progressing)


def _progressing(scene: Scene) -> bool | None:
    """Whether the process makes progress; None if not known."""
    main = scene.main
    if moves_data(scene) or any(t.moving and letter(t) == "R" for t in scene.threads if not t.main):
        return True
    if scene.slept and scene.letter != "R":
        return False
    if _changed(scene):
        return True
    # The stack of a loop that polls moves, too; and two readings may find a loop that works at the same line.
    if main is not None and main.moving:
        return True if scene.condition.cpu_ns is None or uses_cpu(scene, _POLLS) else None
    stands = main is not None and main.moving is False and main.since_ns is not None
    return False if stands and scene.condition.cpu_ns is not None and not uses_cpu(scene) else None


def _changed(scene: Scene) -> bool:
    """Whether samples showed the main thread elsewhere within the last W seconds."""
    since = scene.main.since_ns if scene.main else None
    began = scene.watching_since_ns
    if since is None or began is None or since - began < _FIRST_SAMPLES_NS:
        return False
    return scene.now_ns - since < round(scene.facts.stall_s * 1e9)


def _unknown(scene: Scene) -> Seen:
    state = scene.letter or scene.state or "unknown"
    library = next(
        (clean(f.file.rpartition("/")[2]) for f in scene.native if f.file and not _SYSTEM.search(f.file)), ""
    )
    code = f": it is in C code of {library}" if library else ""
    does = f"waits{scene.where}{code}" if scene.user else f"does nothing that can be seen (state {state})"
    missing = "" if scene.user else "no stack of its main thread could be read"
    return Seen("unknown", does, frame=scene.user, evidence=(scene.kernel, missing))


def _tracer(scene: Scene, kind: str) -> str:
    pid = scene.condition.tracer_pid
    return f"process {pid} traces it" if pid and kind != "traced" else ""


def _data_loader(scene: Scene) -> Seen | None:
    return find_data_loader(scene, _look) or find_worker(scene, _look)


_TOPICS: tuple[Callable[[Scene], Seen | None], ...] = (
    find_ended,
    find_stopped,
    _data_loader,
    find_init,
    find_collective,
    find_stdin,
    find_compiling,
    find_checkpoint,
    find_collecting,
    find_context_lock,
    find_matching,
    find_gil,
    find_hindered,
    find_requests,
    find_rpc,
    find_lock,
    find_pipe,
    find_network,
    find_child,
    find_sleep,
    find_disk_io,
    find_open,
    find_computing,
)
"""In this order: causes come before what they cause. A stopped rank is stopped, whatever it did before."""
