"""Manages pinned maps, programs and links: PIN_ROOT/INSTANCE/LAYOUT/{meta_v1,map_*,prog_*,link_*}.

``meta_v1`` is a map whose one value is JSON: it describes the records of the rings and the entries of the maps, so that
another version of the daemon can read them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from probing.api.errors import FormatError, PrivilegeError, StateLocked, UsageError
from probing.daemon.bpf import attach, syscalls

__all__ = (
    "META",
    "MOUNT_HINT",
    "PIN_ROOT",
    "cleanup",
    "existing",
    "layouts",
    "lock",
    "possible",
    "prepare",
    "read_meta",
    "remove_layout",
    "remove_links",
    "require_writable",
    "take_lock",
    "write_meta",
)

PIN_ROOT = Path("/sys/fs/bpf/probingd")
MOUNT_HINT = "mount -t bpf bpf /sys/fs/bpf; in a container, mount the host's /sys/fs/bpf there"
_READ_ONLY_HINT = "mount -o remount,rw {}; in a container, mount the host's /sys/fs/bpf there without readOnly"
META = "meta_v1"
_BPF_FS_MAGIC = 0xCAFE4A11
# fsopen(2) has this number on all architectures.
_FSOPEN = 430
_MAP_ARRAY = 2
_MAX_META = 1 << 20
_INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def prepare(instance: str, pin_root: Path = PIN_ROOT, owner: tuple[int, int] | None = None) -> Path:
    """Creates the instance's folder for ``owner`` (uid, gid), and returns it; mounts a bpffs if there is none.

    Raises PrivilegeError for a missing right or a read-only bpffs, UsageError for an invalid name.
    """
    if not _INSTANCE.fullmatch(instance):
        raise UsageError(f"instance {instance!r} is not a valid name", hint="use letters, digits, - and _")
    require_writable(pin_root)
    try:
        _mount(pin_root)
        folder = pin_root / instance
        folder.mkdir(parents=True, exist_ok=True)
        if owner is not None and os.geteuid() == 0:
            os.chown(folder, *owner)
            folder.chmod(0o700)
            _let_through(pin_root)
    except PermissionError as e:
        raise PrivilegeError(
            f"cannot create {pin_root / instance}: {e.strerror}", hint="`systemctl start probingd` creates it as root"
        ) from e
    return folder


def require_writable(pin_root: Path = PIN_ROOT) -> None:
    """Raises PrivilegeError if ``pin_root`` is on a bpffs that is mounted read-only."""
    folder = existing(pin_root)
    if _filesystem(folder) == _BPF_FS_MAGIC and os.statvfs(folder).f_flag & os.ST_RDONLY:
        mounted = next(path for path in (folder, *folder.parents) if path.is_mount())
        message = f"the BPF file system at {mounted} is read-only: probes cannot be pinned in it, nor removed"
        raise PrivilegeError(message, hint=_READ_ONLY_HINT.format(mounted))


def possible(pin_root: Path = PIN_ROOT) -> bool:
    """Returns whether ``pin_root`` is on a writable bpffs, or a bpffs could be mounted. Changes nothing."""
    folder = existing(pin_root)
    if _filesystem(folder) == _BPF_FS_MAGIC:
        return os.access(folder, os.W_OK)
    # fsopen(2), from Linux 5.2 on, needs the same rights as mount(2).
    fd = int(ctypes.CDLL(None).syscall(_FSOPEN, b"bpf", 0))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def existing(pin_root: Path) -> Path:
    """Returns ``pin_root`` or the nearest folder above it that exists."""
    return next(path for path in (pin_root, *pin_root.parents) if path.exists())


def _mount(pin_root: Path) -> None:
    if _filesystem(existing(pin_root)) == _BPF_FS_MAGIC:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # The bpffs is mounted on /sys/fs/bpf if the folder lies below it, otherwise on the folder itself.
    usual = Path("/sys/fs/bpf")
    place = usual if usual in (pin_root, *pin_root.parents) else pin_root
    if place == pin_root:
        place.mkdir(parents=True, exist_ok=True)
    if libc.mount(b"bpf", os.fsencode(place), b"bpf", 0, b"mode=0711"):
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.EACCES):
            raise PermissionError(number, os.strerror(number))
        raise PrivilegeError(f"no bpffs can be mounted on {place}: {os.strerror(number)}", hint=MOUNT_HINT)


def _let_through(pin_root: Path) -> None:
    """Lets the owner of a folder in the bpffs pass its top folder, which systemd mounts with mode 0700."""
    for folder in (pin_root, *pin_root.parents):
        if _filesystem(folder) != _BPF_FS_MAGIC:
            return
        mode = folder.stat().st_mode
        if not mode & 0o001:
            folder.chmod((mode & 0o7777) | 0o011)


def _filesystem(path: Path) -> int:
    data = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), data):
        return 0
    return int.from_bytes(data.raw[:4], "little")


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Locks the instance until the process ends. Raises StateLocked."""
    fd = take_lock(folder)
    try:
        yield
    finally:
        os.close(fd)


def take_lock(folder: Path) -> int:
    """Locks the instance, and returns the descriptor that holds the lock. Raises StateLocked."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(fd)
        hint = "stop it, or give this daemon another --instance"
        raise StateLocked(f"another daemon holds the instance {folder.name}", hint=hint) from e
    return fd


def layouts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    text = json.dumps(meta, separators=(",", ":")).encode()
    fd = syscalls.create_map(_MAP_ARRAY, 4, len(text), 1, "probing_meta")
    try:
        syscalls.map_update(fd, bytes(4), text)
        syscalls.object_pin(path, fd)
    finally:
        os.close(fd)


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the description of the layout in the map pinned at ``path``. Raises FormatError, FileNotFoundError."""
    fd = syscalls.object_get(path)
    try:
        size = syscalls.map_info(fd).value_size
        text = syscalls.map_lookup(fd, bytes(4), size) if size <= _MAX_META else None
    finally:
        os.close(fd)
    try:
        meta = json.loads(text or b"")
    except ValueError as e:
        raise FormatError(f"the description in {path.parent} is damaged", hint="run `probingd cleanup`") from e
    if not isinstance(meta, dict):
        raise FormatError(f"the description in {path.parent} is damaged", hint="run `probingd cleanup`")
    return meta


def remove_links(layout: Path) -> int:
    """Removes the pinned links of a layout, and waits for their end; the rings stay. Returns the number of links."""
    pins = [path for path in layout.iterdir() if path.name.startswith("link_")]
    attach.wait_for_end([program for path in pins if (program := _end(path)) is not None])
    return len(pins)


def _end(path: Path) -> int | None:
    """Removes the pin of a link. Returns the id of the program of a perf event in a map, which ends soon."""
    try:
        fd = syscalls.object_get(path)
    except OSError:
        # A link that cannot be opened must not keep the layout from being removed.
        path.unlink(missing_ok=True)
        return None
    try:
        # Closing a link's last descriptor ends it at once; removing its last pin ends it only some time later, and what
        # its program writes after the rings are drained would be lost.
        path.unlink(missing_ok=True)
        return attach.program_in_map(fd)
    finally:
        os.close(fd)


def remove_layout(layout: Path) -> None:
    """Removes a layout: links first, so that no program runs on removed maps."""
    remove_links(layout)
    for path in list(layout.iterdir()):
        path.unlink(missing_ok=True)
    layout.rmdir()


def cleanup(instance: str | None = None, pin_root: Path = PIN_ROOT) -> int:
    """Removes all pins of an instance (None: of every instance), which ends their programs and links.

    Returns the number of layouts. Raises StateLocked while a daemon uses one of them, PrivilegeError.
    """
    if instance is not None and not _INSTANCE.fullmatch(instance):
        raise UsageError(f"instance {instance!r} is not a valid name", hint="use letters, digits, - and _")
    count = 0
    try:
        if not pin_root.is_dir():
            return 0
        require_writable(pin_root)
        for folder in sorted(pin_root.iterdir()) if instance is None else [pin_root / instance]:
            if folder.is_dir():
                with lock(folder):
                    for layout in layouts(folder):
                        remove_layout(layout)
                        count += 1
                with contextlib.suppress(PermissionError):
                    folder.rmdir()
    except PermissionError as e:
        raise PrivilegeError(f"cannot remove the pins: {e.strerror}", hint="run it as root") from e
    return count
