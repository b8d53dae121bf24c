"""Creates the sockets, directories and BPF file system that the processes need.

The supervisor creates them before the first start, for the users that need them, so that no other process needs the
right to create them.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from probing.api.errors import ProbingError, StateLocked, StoreError
from probing.daemon.bpf.pins import prepare, require_writable
from probing.daemon.config import CONTROL, PUBLIC, Config
from probing.daemon.supervisor.control import Lock, owner_of
from probing.daemon.supervisor.node_key import HANDED, hand_key
from probing.daemon.supervisor.rights import Account, RightsTable

__all__ = ("INETD_SOCKETS", "INJECTOR", "Runtime", "make_state_dir", "pins_of", "service_config")

log = logging.getLogger("probingd.supervisor")
# The sockets on which a connection starts a process. The process that connects owns the socket: the service owns the
# sockets of _OF_SERVICE, the collector all others.
INETD_SOCKETS = ("reader", "parser", "maintenance", "sql", "hook", "interpreter", "nvml")
REMAINS_S = 5.0
_POLL_S = 0.1
_OF_SERVICE = ("sql", "hook", "interpreter")
# The socket of injectors exists only with ``inject.enabled``.
INJECTOR = "injector"


class Runtime:
    """The runtime directory of one daemon, held by a lock while this process lives."""

    def __init__(self, config: Config, rights: RightsTable) -> None:
        self._config = config
        self._rights = rights
        self._lock: Lock | None = None
        self._directory = Path(config.runtime_dir)
        self._made_state_dir = False
        self.listeners: dict[str, socket.socket] = {}

    def prepare(self) -> None:
        """Creates sockets, directories and the pins' directory. Raises StateLocked, StoreError or PrivilegeError; then
        the sockets and directories that it has created stay.
        """
        if not (parent := Path(self._config.socket).parent).exists():
            _make(parent, None, 0o755)
        elif parent.stat().st_mode & 0o022:
            log.warning("other users may write to %s: any of them can keep this daemon from starting", parent)
        self._take_lock()
        self._clear()
        self._listen()
        self._make_state_dir()
        self._make_pin_dir()
        account = self._rights.service.account
        owner = (account.uid, account.gid) if account else None
        # The key comes last, so that a failure before it leaves no key behind.
        hand_key(Path(self._config.state_dir), self._public().parent, owner)

    def close(self) -> None:
        """Removes the sockets and releases the lock. State and pins stay, but an empty state directory that this
        process made is removed.
        """
        for listener in self.listeners.values():
            listener.close()
        self.listeners.clear()
        if self._lock:
            self._clear()
            self._lock.release()
            self._lock = None
        if self._made_state_dir:
            # A start that failed has stored nothing.
            with suppress(OSError):
                Path(self._config.state_dir).rmdir()

    def keep_state_dir(self) -> None:
        """Creates a deleted state directory again, which the collector has no right to do."""
        if not Path(self._config.state_dir).exists():
            try:
                self._make_state_dir()
                log.warning("the state directory %s was deleted: it is made again", self._config.state_dir)
            except StoreError as e:
                log.error("%s", e.message)

    def _take_lock(self) -> None:
        lock = Lock.take(self._config)
        if lock is None:
            raise self._taken(f"probingd, pid {owner_of(self._config)}")
        # No daemon holds the lock: a process that still answers remains from a killed daemon, and ends soon.
        deadline = time.monotonic() + REMAINS_S
        while _answers(self._config.socket):
            if time.monotonic() > deadline:
                lock.release()
                raise self._taken("another process")
            time.sleep(_POLL_S)
        self._lock = lock

    def _taken(self, by: str) -> ProbingError:
        hint = f"end it with `probingd stop --socket {self._config.socket}`, or give this one its own --socket"
        return StateLocked(f"socket {self._config.socket} is taken by {by}", hint=hint)

    def _clear(self) -> None:
        # Only sockets and our link are removed: a wrong --socket must not delete other files.
        for directory in (self._directory / "public", self._directory / CONTROL, self._directory):
            if directory.is_dir() and not directory.is_symlink():
                for path in directory.iterdir():
                    if path.is_socket() or (path.name == HANDED and directory.name == "public"):
                        path.unlink(missing_ok=True)
                if not any(directory.iterdir()):
                    directory.rmdir()
        public = Path(self._config.socket)
        if public.is_socket() or (public.is_symlink() and public.readlink() == self._public()):
            public.unlink(missing_ok=True)
        elif public.exists() or public.is_symlink():
            raise StoreError(f"{public} exists and is not a socket", hint="choose another --socket")

    def _public(self) -> Path:
        return Path(service_config(self._config).socket)

    def _listen(self) -> None:
        # The directory is closed to all others until every socket has its owner, so nobody can put another file in its
        # place. It may exist already, with the file that pauses all probes.
        _own(self._directory, None, 0o700)
        names = (*INETD_SOCKETS, INJECTOR) if self._config.inject.enabled else INETD_SOCKETS
        owners = dict.fromkeys(names, self._rights.collector)
        owners |= dict.fromkeys(_OF_SERVICE, self._rights.service)
        for name in names:
            path = self._directory / f"{name}.sock"
            self.listeners[name] = _bind(path)
            if account := owners[name].account:
                os.chown(path, account.uid, account.gid, follow_symlinks=False)
        # The service may not write to the public directory, so it listens in a directory of its own behind a link.
        _own(self._public().parent, self._rights.service.account, 0o755)
        # Only the collector and, by its group, the service may enter the directory of the control socket.
        collector, service = self._rights.collector.account, self._rights.service.account
        _own(self._directory / CONTROL, collector, 0o710 if service else 0o700, group=service.gid if service else None)
        Path(self._config.socket).symlink_to(self._public())
        _give(self._directory, self._rights.collector.account, 0o755)

    def _make_state_dir(self) -> None:
        path = Path(self._config.state_dir)
        account = self._rights.collector.account
        if not path.exists():
            make_state_dir(path, account)
            self._made_state_dir = True
        elif not path.is_dir():
            raise StoreError(f"state directory {path} is a file", hint="choose another --state-dir")
        elif account and _is_free(path):
            _give(path, account, 0o750)
        writable = account.may_create_in(path) if account else os.access(path, os.W_OK | os.X_OK)
        if not writable:
            user = self._config.users.collector if account else f"uid {os.getuid()}"
            hint = "make that user its owner, and let the user enter every directory above it"
            raise StoreError(f"state directory {path} is not writable for {user}", hint=hint)

    def _make_pin_dir(self) -> None:
        account, root = self._rights.collector.account, Path(self._config.probes.bpffs)
        pins = pins_of(self._config)
        require_writable(root)
        if account and pins.is_dir() and pins.stat().st_uid != account.uid:
            _give_tree(pins, account)
        owner = (account.uid, account.gid) if account else None
        prepare(self._config.instance, root, owner)


def make_state_dir(path: Path, account: Account | None) -> None:
    """Creates a state directory as the daemon does at its start. Raises StoreError."""
    _make(path, account, 0o750)


def service_config(config: Config) -> Config:
    """Returns the service's configuration, with the socket in the directory that it may write to."""
    return config._replace(socket=f"{config.runtime_dir}/{PUBLIC}")


def pins_of(config: Config) -> Path:
    return Path(config.pin_dir)


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
    """Returns whether the owner of root's directory may be changed: it contains no other directory, so it is no home
    and not /etc.
    """
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


def _own(path: Path, account: Account | None, mode: int, group: int | None = None) -> None:
    """Creates ``path``, or makes ``account`` the owner of an existing directory (None: this process). Raises
    StoreError.
    """
    if not path.exists() and not path.is_symlink():
        _make(path, account, mode)
    elif path.is_symlink() or not path.is_dir():
        raise StoreError(f"{path} exists and is not a directory", hint="remove it, or choose another --socket")
    else:
        try:
            _give(path, account or Account(os.geteuid(), os.getegid(), ()), mode)
        except OSError as e:
            hint = "it was left by a daemon of another user: remove it, or choose another --socket"
            raise StoreError(f"cannot take {path} over: {e.strerror}", hint=hint) from e
    if group is not None:
        os.chown(path, -1, group, follow_symlinks=False)
        path.chmod(mode)


def _give(path: Path, account: Account | None, mode: int) -> None:
    if account:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
    path.chmod(mode)


def _give_tree(path: Path, account: Account) -> None:
    os.chown(path, account.uid, account.gid, follow_symlinks=False)
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            os.chown(f"{directory}/{name}", account.uid, account.gid, follow_symlinks=False)
