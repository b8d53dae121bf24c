"""The main thread waits for a file system, or moves a checkpoint."""

from __future__ import annotations

import re
from types import MappingProxyType

from probing.diagnosis.activity.scene import Scene, Seen, is_library
from probing.diagnosis.facts import Frame
from probing.diagnosis.words import clean

__all__ = ("find_checkpoint", "find_disk_io", "moves_data")

# What a process does with a file, by system call.
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


def find_checkpoint(scene: Scene) -> Seen | None:
    """Returns whether the process writes or reads a checkpoint, and the file that it waits for."""
    frame = _checkpoint_frame(scene)
    if frame is None:
        return None
    io = _io(scene)
    same = [f for f in scene.python if f is frame or (f.file == frame.file and is_library(f))]
    names = [f.func.rpartition(".")[2].lower() for f in same]
    verb = "reads" if io.startswith("reads") or any(_LOADS.search(name) for name in names) else "writes"
    does = f"{verb} a checkpoint{scene.where}" + (f": it {io}" if io else "")
    return Seen("checkpoint", does, frame=scene.user, evidence=(scene.kernel,))


def find_disk_io(scene: Scene) -> Seen | None:
    """Returns what the main thread does with a file, or that it is in uninterruptible I/O."""
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


def moves_data(scene: Scene) -> bool:
    """Returns whether the process read or wrote much between the readings of its condition."""
    return max(scene.condition.read_bytes or 0, scene.condition.write_bytes or 0) >= _MOVED_BYTES


def _checkpoint_frame(scene: Scene) -> Frame | None:
    for frame in scene.python:
        if frame.file.endswith(_FILES) or any(part in frame.file for part in _PACKAGES):
            return frame
        # A function only named like this must also do I/O.
        if _NAME.search(frame.func.lower()) and (_io(scene) or scene.letter == "D" or moves_data(scene)):
            return frame
    return None


def _io(scene: Scene) -> str:
    """Returns "writes /mnt/c/a.pt (fuse.x /mnt/c)"; empty where the main thread is in no call on a file."""
    c = scene.condition
    verb = _VERBS.get(c.syscall or "")
    if verb is None or c.target_kind in _NO_FILES or c.target_fd == 0:
        return ""
    if c.target is None or not (c.target.startswith("/") or c.file_system or c.target_kind == "file"):
        return f"{verb} files" if c.syscall in ("sync", "msync", "syncfs") else ""
    return f"{verb} {scene.target}" + (f" ({clean(c.file_system, _PATH)})" if c.file_system else "")
