"""What must lie in the file system before the first process starts: sockets, directories, the BPF file system.

All of it is made by the supervisor and given to the user who needs it, so no other process needs a right for that.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from probing.api.errors import ProbingError, StateLocked, StoreError
from probing.daemon.bpf.pins import prepare
from probing.daemon.config import PUBLIC, Config
from probing.daemon.supervisor.rights import Account, RightsTable

__all__ = ("INETD_SOCKETS", "Runtime", "lock_path", "owner_of", "pins_of", "service_config")

# Who connects decides the owner of a socket: readers and parsers serve the collector, SQL workers the service.
INETD_SOCKETS = ("reader", "parser", "sql")
_FLOCK = struct.Struct("hhqqi4x")


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
        if not (parent := Path(self._config.socket).parent).exists():
            _make(parent, None, 0o755)
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

    def _take_lock(self) -> None:
        path = lock_path(self._config)
        while True:
            fd = _open_lock(path)
            try:
                # A POSIX lock: the kernel tells anyone who asks the pid of its holder.
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                os.close(fd)
                raise self._taken(f"by probingd, pid {owner_of(self._config)}") from e
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                break
            # One that ended meanwhile took the file away.
            os.close(fd)
        if _answers(self._config.socket):
            path.unlink()
            os.close(fd)
            raise self._taken("by another process")
        self._lock = fd

    def _taken(self, whom: str) -> ProbingError:
        hint = f"end it with `probingd stop --socket {self._config.socket}`, or give this one its own --socket"
        return StateLocked(f"socket {self._config.socket} is taken {whom}", hint=hint)

    def _clear(self) -> None:
        # Only sockets and our own link: a wrong --socket must not cost anybody a file.
        for directory in (self._directory / "public", self._directory):
            if directory.is_dir() and not directory.is_symlink():
                for path in directory.iterdir():
                    if path.is_socket():
                        path.unlink(missing_ok=True)
                if not any(directory.iterdir()):
                    directory.rmdir()
        public = Path(self._config.socket)
        if public.is_socket() or (public.is_symlink() and public.readlink() == self._public()):
            public.unlink(missing_ok=True)
        elif public.exists() or public.is_symlink():
            raise StoreError(f"{public} is there and is no socket", hint="choose another --socket")

    def _public(self) -> Path:
        return Path(service_config(self._config).socket)

    def _listen(self) -> None:
        # Closed to all others until every socket has its owner: nobody can put another file in its place.
        _make(self._directory, None, 0o700)
        owners = {"reader": self._rights.collector, "parser": self._rights.collector, "sql": self._rights.service}
        for name in INETD_SOCKETS:
            path = self._directory / f"{name}.sock"
            self.listeners[name] = _bind(path)
            if account := owners[name].account:
                os.chown(path, account.uid, account.gid, follow_symlinks=False)
        # The service has no right to the public directory, so it listens in one of its own behind a link.
        _make(self._public().parent, self._rights.service.account, 0o755)
        Path(self._config.socket).symlink_to(self._public())
        _give(self._directory, self._rights.collector.account, 0o755)

    def _make_state_dir(self) -> None:
        path = Path(self._config.state_dir)
        account = self._rights.collector.account
        if not path.exists():
            _make(path, account, 0o750)
        elif not path.is_dir():
            raise StoreError(f"state directory {path} is a file", hint="choose another --state-dir")
        elif account and _is_free(path):
            _give(path, account, 0o750)
        writable = account.may_create_in(path) if account else os.access(path, os.W_OK | os.X_OK)
        if not writable:
            user = self._config.users.collector if account else f"uid {os.getuid()}"
            hint = "give it to that user, and let it pass through every directory above"
            raise StoreError(f"state directory {path} is not writable for {user}", hint=hint)

    def _make_pin_dir(self) -> None:
        account = self._rights.collector.account
        pins = pins_of(self._config)
        if account and pins.is_dir() and pins.stat().st_uid != account.uid:
            _give_tree(pins, account)
        owner = (account.uid, account.gid) if account else None
        prepare(self._config.instance, Path(self._config.probes.bpffs), owner)


def service_config(config: Config) -> Config:
    """What the service is told: to listen where it may make a socket."""
    return dataclasses.replace(config, socket=f"{config.runtime_dir}/{PUBLIC}")


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


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as e:
        raise StoreError(f"cannot make {path}: {e.strerror}", hint="choose another --socket") from e


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(64)
    return listener


def _is_free(path: Path) -> bool:
    """Whether a directory of root's may be given away: one that holds no others, so nobody's home or /etc."""
    found = path.stat()
    if found.st_uid != 0 or found.st_mode & stat.S_ISVTX:
        return False
    return not any(inner.is_dir() for inner in path.iterdir() if inner.name != "lost+found")


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
    if account:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
    path.chmod(mode)


def _give_tree(path: Path, account: Account) -> None:
    os.chown(path, account.uid, account.gid, follow_symlinks=False)
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            os.chown(f"{directory}/{name}", account.uid, account.gid, follow_symlinks=False)
