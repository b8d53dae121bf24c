"""The process has ended, is stopped, or is held by a debugger."""

from __future__ import annotations

import signal

from probing.api.text import size
from probing.diagnosis.activity.scene import Scene, Seen
from probing.diagnosis.words import clean, exit_text

__all__ = ("find_ended", "find_stopped", "full_shm")

_FULL = 0.95


def find_ended(scene: Scene) -> Seen | None:
    """Returns how the process ended."""
    if scene.exit is not None:
        more = f": {full_shm(scene)}" if scene.exit.signal == signal.SIGBUS and full_shm(scene) else ""
        return Seen("exited", exit_text(scene.exit) + more, since_ns=scene.exit.ts_ns, progressing=False)
    if scene.state in ("exited", "zombie") or scene.letter in ("Z", "X"):
        return Seen("exited", "has ended", progressing=False)
    return None


def find_stopped(scene: Scene) -> Seen | None:
    """Returns what stopped the process: a debugger, its cgroup or a signal."""
    condition = scene.condition
    tracer = clean(condition.tracer or "a debugger")
    if scene.letter == "t":
        pid = f" (pid {condition.tracer_pid})" if condition.tracer_pid else ""
        return _stood("traced", scene, f"is held by {tracer}{pid}{scene.where}")
    if condition.frozen:
        return _stood("stopped", scene, f"is frozen by its cgroup {clean(condition.cgroup or '')}".rstrip())
    if scene.letter == "T" or (not scene.letter and scene.state == "stopped"):
        return _stood("stopped", scene, f"is stopped by a signal{scene.where}")
    return None


def full_shm(scene: Scene) -> str:
    """Returns a text if /dev/shm is full, else an empty one."""
    used, total = scene.condition.shm_used_bytes, scene.condition.shm_size_bytes
    if not total or used is None or used < _FULL * total:
        return ""
    return f"/dev/shm is full ({size(used, total)})"  # noqa: S108


def _stood(kind: str, scene: Scene, does: str) -> Seen:
    return Seen(kind, does, frame=scene.user, progressing=False, evidence=(scene.kernel,))
