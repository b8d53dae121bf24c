"""Finds out what a rank is doing, from its stack and its condition: reading a file system, writing a checkpoint and so
on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

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
from probing.diagnosis.activity.scene import Scene, Seen, is_library, letter
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

__all__ = (
    "Activity",
    "activity_of",
)

# The verb for the use of a file, by system call.
_VERBS = MappingProxyType(
    {
        **dict.fromkeys(("read", "pread64", "readv", "preadv", "preadv2", "getdents64", "getdents"), "reads"),
        **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate"), "writes"),
        **dict.fromkeys(("fsync", "fdatasync", "msync", "sync_file_range", "syncfs", "sync"), "syncs"),
        **dict.fromkeys(("open", "openat", "openat2", "creat"), "opens"),
        **dict.fromkeys(("sendfile", "copy_file_range", "splice"), "copies"),
        **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "removes"),
        **dict.fromkeys(("rename", "renameat", "renameat2"), "renames"),
        **dict.fromkeys(("mkdir", "mkdirat"), "makes"),
        **dict.fromkeys(("stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "statfs"), "looks up"),
        "close": "closes",
        "fstatfs": "looks up",
        "faccessat2": "looks up",
    }
)
_NO_FILES = frozenset(("fifo", "pipe", "socket", "tty", "child", "other"))
# Kernel functions that wait for a disk or for the server of a file system.
_WAITS = re.compile(
    r"request_wait_answer|fuse|nfs|rpc_wait|io_schedule|folio_wait|wait_on_page|jbd2|xfs_|ext4_|lustre|ceph"
)
_FILES = ("torch/serialization.py", "safetensors/torch.py")
_PACKAGES = ("torch/distributed/checkpoint/", "torch/distributed/checkpoint.py", "/orbax/", "/torchsnapshot/")
_NAME = re.compile(
    r"checkpoint|ckpt|(?:save|load|write|dump)_?(?:model|state|weights)|(?:model|state|weights)_?(?:save|load)"
)
_LOADS = re.compile(r"load|read|restore|resume")
_PATH = 200
_MOVED_BYTES = 64 << 10


def _find_checkpoint(scene: Scene) -> Seen | None:
    """Returns the process's write or read of a checkpoint, with the file for which it waits."""
    frame = _checkpoint_frame(scene)
    if frame is None:
        return None
    io = _io(scene)
    same = [f for f in scene.python if f is frame or (f.file == frame.file and is_library(f))]
    names = [f.func.rpartition(".")[2].lower() for f in same]
    verb = "reads" if io.startswith("reads") or any(_LOADS.search(name) for name in names) else "writes"
    does = f"{verb} a checkpoint{scene.where}" + (f": it {io}" if io else "")
    return Seen("checkpoint", does, frame=scene.user, evidence=(scene.kernel,))


def _find_disk_io(scene: Scene) -> Seen | None:
    """Returns the main thread's operation on a file, or its wait in uninterruptible I/O."""
    io = _io(scene)
    if io:
        return Seen("disk_io", f"{io}{scene.where}", frame=scene.user, evidence=(scene.kernel,))
    wchan = scene.condition.wchan or ""
    if scene.letter == "D":
        why = f", kernel function {clean(wchan)}" if wchan else ""
        does = f"is in uninterruptible I/O{scene.where} (state D{why})"
        return Seen("disk_io", does, frame=scene.user, evidence=(scene.kernel,))
    if _WAITS.search(wchan):
        does = f"waits for a file system{scene.where} (kernel function {clean(wchan)})"
        return Seen("disk_io", does, frame=scene.user, evidence=(scene.kernel,))
    return None


def _moves_data(scene: Scene) -> bool:
    """Returns whether the process read or wrote at least 64 KiB between the two readings of its condition."""
    return max(scene.condition.read_bytes or 0, scene.condition.write_bytes or 0) >= _MOVED_BYTES


def _checkpoint_frame(scene: Scene) -> Frame | None:
    for frame in scene.python:
        if frame.file.endswith(_FILES) or any(part in frame.file for part in _PACKAGES):
            return frame
        # The name of a function is evidence only if the process also does I/O.
        if _NAME.search(frame.func.lower()) and (_io(scene) or scene.letter == "D" or _moves_data(scene)):
            return frame
    return None


def _io(scene: Scene) -> str:
    """Returns a text such as "writes /mnt/c/a.pt (fuse.x /mnt/c)"; empty if the main thread is in no file call."""
    c = scene.condition
    verb = _VERBS.get(c.syscall or "")
    if verb is None or c.target_kind in _NO_FILES or c.target_fd == 0:
        return ""
    if c.target is None or not (c.target.startswith("/") or c.file_system or c.target_kind == "file"):
        return f"{verb} files" if c.syscall in ("sync", "msync", "syncfs") else ""
    return f"{verb} {scene.target}" + (f" ({clean(c.file_system, _PATH)})" if c.file_system else "")


_SYSTEM = re.compile(r"/(?:libc[.-]|libpthread|ld-|(?:lib)?python3)[^/]*$|^\[")
_LINE = 600
# A thread that uses a smaller share of a CPU than this only polls.
_POLLS = 0.02
# Time after the daemon's start, ns. If all samples of a thread show one line since before this time, the thread may
# have reached that line before the daemon started.
_FIRST_SAMPLES_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is doing. ``kind``: a key of ``kinds.ACTIVITIES``.

    ``why``: a clause to print, such as "its data loader waits in fetch_shard, data.py:12". ``frame``: the frame that
    shows the activity. ``since_ns``: UTC; the activity may have begun earlier. ``progressing``: whether the rank makes
    progress (its stack moves, it uses the CPU in changing frames, it writes); None if unknown. ``evidence``: lines to
    print. ``next_steps``: advice.
    """

    kind: str
    why: str
    frame: Frame | None = None
    since_ns: int | None = None
    progressing: bool | None = None
    evidence: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()


def activity_of(rank: Rank, facts: Facts) -> Activity:
    """Returns the activity of ``rank`` at the moment of ``facts``."""
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
    # A thread that makes progress has left its line since ``scene.since_ns``, so that time is not used.
    since = found.since_ns if found.since_ns is not None or progressing else scene.since_ns
    return replace(found, since_ns=since, progressing=progressing)


def _progressing(scene: Scene) -> bool | None:
    """Returns whether the process makes progress; None if unknown."""
    main = scene.main
    if _moves_data(scene) or any(t.moving and letter(t) == "R" for t in scene.threads if not t.main):
        return True
    if scene.slept and scene.letter != "R":
        return False
    if _changed(scene):
        return True
    # The stack of a polling loop moves, too, and a working loop may be at the same line in two readings.
    if main is not None and main.moving:
        return True if scene.condition.cpu_ns is None or uses_cpu(scene, _POLLS) else None
    stands = main is not None and main.moving is False and main.since_ns is not None
    return False if stands and scene.condition.cpu_ns is not None and not uses_cpu(scene) else None


def _changed(scene: Scene) -> bool:
    """Returns whether samples show that the main thread came to its line within the last ``stall_s`` seconds."""
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
    _find_checkpoint,
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
    _find_disk_io,
    find_open,
    find_computing,
)
"""The first match counts, so causes come before their effects: a stopped rank is stopped, whatever it did before."""
