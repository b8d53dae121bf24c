"""What must lie in the file system before the first process starts: sockets, directories, the BPF file system.

All of it is made by the supervisor and given to the user who needs it, so no other process needs a right for that.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from probing.api.errors import PrivilegeError, ProbingError, StateLocked, StoreError
from probing.daemon.config import Config
from probing.daemon.supervisor.rights import Account, RightsTable

__all__ = ("INETD_SOCKETS", "Runtime", "lock_path", "owner_of", "pins_of")

# Who connects decides the owner of a socket: readers and parsers serve the collector, SQL workers the service.
INETD_SOCKETS = ("reader", "parser", "sql")
BPF_FS_MAGIC = 0xCAFE4A11  # include/uapi/linux/magic.h
_FLOCK = struct.Struct("hhqqi4x")
_STATFS_WORDS = 64


class Runtime:
    """The runtime directory of one daemon, held by a lock while this process lives."""

    def __init__(self, config: Config, rights: RightsTable) -> None:
        self._config = config
        self._rights = rights
        self._lock = -1
        self._directory = Path(config.runtime_dir)
        self.listeners: dict[str, socket.socket] = {}

    def prepare(self) -> None:
        """Make everything. Raises StateLocked, StoreError or PrivilegeError; what was made then stays."""
        self._make_parent()
        self._take_lock()
        self._clear()
        self._listen()
        self._make_state_dir()
        self._make_pin_dir()

    def close(self) -> None:
        """Remove the sockets and let the lock go. State and pins stay."""
        for listener in self.listeners.values():
            listener.close()
        self.listeners.clear()
        if self._lock >= 0:
            self._clear()
            lock_path(self._config).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def _make_parent(self) -> None:
        parent = Path(self._config.socket).parent
        service = self._rights.service.account
        if not parent.exists():
            _make(parent, service and Account(service.uid, self._rights.group, ()), 0o750)
        if service and not service.may_create_in(parent):
            raise StoreError(
                f"user {self._config.users.service} cannot make a socket in {parent}",
                hint="name a directory that does not exist yet, below one that everybody may pass through",
            )

    def _take_lock(self) -> None:
        path = lock_path(self._config)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._lock = os.open(path, flags, 0o644)
        except OSError as e:
            raise StoreError(f"cannot make {path}: {e.strerror}", hint="choose another --socket") from e
        try:
            # A POSIX lock: the kernel tells anyone who asks the pid of its holder.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            owner = owner_of(self._config)
            raise self._taken(f"by probingd, pid {owner}") from e
        if _answers(self._config.socket):
            raise self._taken("by another process")

    def _taken(self, whom: str) -> ProbingError:
        hint = f"end it with `probingd stop --socket {self._config.socket}`, or give this one its own --socket"
        return StateLocked(f"socket {self._config.socket} is taken {whom}", hint=hint)

    def _clear(self) -> None:
        # Only sockets: a wrong --socket must not cost anybody a file.
        if self._directory.is_dir() and not self._directory.is_symlink():
            for path in self._directory.iterdir():
                if path.is_socket():
                    path.unlink(missing_ok=True)
            if not any(self._directory.iterdir()):
                self._directory.rmdir()
        public = Path(self._config.socket)
        if public.is_socket():
            public.unlink(missing_ok=True)
        elif public.exists() or public.is_symlink():
            raise StoreError(f"{public} is there and is no socket", hint="choose another --socket")

    def _listen(self) -> None:
        # Closed to all others until every socket has its owner: nobody can put another file in its place.
        _make(self._directory, None, 0o700)
        owners = {"reader": self._rights.collector, "parser": self._rights.collector, "sql": self._rights.service}
        for name in INETD_SOCKETS:
            path = self._directory / f"{name}.sock"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.setblocking(False)
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen(64)
            if account := owners[name].account:
                os.chown(path, account.uid, account.gid, follow_symlinks=False)
            self.listeners[name] = listener
        collector, service = self._rights.collector.account, self._rights.service.account
        if collector and service:
            # The service comes in by its own group: the public group must not reach these sockets.
            _give(self._directory, Account(collector.uid, service.gid, ()), 0o750)

    def _make_state_dir(self) -> None:
        path = Path(self._config.state_dir)
        account = self._rights.collector.account
        if not path.exists():
            _make(path, account, 0o750)
        elif not path.is_dir():
            raise StoreError(f"state directory {path} is a file", hint="choose another --state-dir")
        elif account and path.stat().st_uid == 0 and not any(path.iterdir()):
            _give(path, account, 0o750)
        writable = account.may_create_in(path) if account else os.access(path, os.W_OK | os.X_OK)
        if not writable:
            user = self._config.users.collector if account else f"uid {os.getuid()}"
            hint = "give it to that user, and let it pass through every directory above"
            raise StoreError(f"state directory {path} is not writable for {user}", hint=hint)

    def _make_pin_dir(self) -> None:
        root = Path(self._config.probes.bpffs)
        mount = root
        while not mount.exists():
            mount = mount.parent
        if not _is_bpffs(mount) and root.is_relative_to("/sys/fs/bpf"):
            _mount_bpffs(Path("/sys/fs/bpf"))
            mount = Path("/sys/fs/bpf")
        if not _is_bpffs(mount):
            hint = "mount one: `mount -t bpf bpf /sys/fs/bpf`"
            raise PrivilegeError(f"{root} is on no BPF file system", hint=hint)
        pins = pins_of(self._config)
        if not root.exists():
            _make(root, None, 0o755)
        if not pins.exists():
            _make(pins, self._rights.collector.account, 0o700)
        elif (account := self._rights.collector.account) and pins.stat().st_uid != account.uid:
            _give_tree(pins, account)


def lock_path(config: Config) -> Path:
    """The file whose POSIX lock the supervisor holds."""
    return Path(config.socket + ".lock")


def pins_of(config: Config) -> Path:
    return Path(config.pin_dir)


def owner_of(config: Config) -> int | None:
    """The pid of the supervisor of this configuration's socket, from the kernel; None when there is none."""
    try:
        fd = os.open(lock_path(config), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StoreError(f"cannot read {lock_path(config)}: {e.strerror}", hint="ask as root") from e
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else pid


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
        return True


def _make(path: Path, account: Account | None, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode)
        _give(path, account, mode)
    except OSError as e:
        hint = "run it as a user that may write there, or choose another directory"
        raise StoreError(f"cannot make {path}: {e.strerror}", hint=hint) from e


def _give(path: Path, account: Account | None, mode: int) -> None:
    path.chmod(mode)
    if account:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)


def _give_tree(path: Path, account: Account) -> None:
    os.chown(path, account.uid, account.gid, follow_symlinks=False)
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            os.chown(f"{directory}/{name}", account.uid, account.gid, follow_symlinks=False)


def _is_bpffs(path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    # struct statfs begins with f_type, a long; the rest is not looked at.
    buffer = (ctypes.c_long * _STATFS_WORDS)()
    return libc.statfs(os.fsencode(path), buffer) == 0 and buffer[0] & 0xFFFFFFFF == BPF_FS_MAGIC


def _mount_bpffs(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not stat.S_ISDIR(path.stat().st_mode) or libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, None) != 0:
        reason = os.strerror(ctypes.get_errno())
        hint = f"as root: `mount -t bpf bpf {path}`"
        raise PrivilegeError(f"no BPF file system at {path}, and it cannot be mounted: {reason}", hint=hint)
