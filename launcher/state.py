"""What a launcher remembers: which records it saw, which generations it started, and the processes of its ranks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ConfigError, StateLocked
from probing.api.typed import typed_json
from probing.groups.group import Phase
from probing.groups.spec import MAX_GROUPS, NAME

__all__ = ("Found", "History", "Run", "State", "StateFile", "lock", "state_directory")

_FORMAT = 1
_MAX_STATE = 96 << 20
_MAX_RUNS, _MAX_STAMPS, _MAX_FOUND = 16_384, 256, 4096
_MAX_NUMBER = 1 << 62
_LOCK_S = 5.0
_NAME, _LOCK = "launcher.json", "lock"


@dataclass(slots=True)
class Run:
    """A rank that was started. ``pid`` 0: no process could be made. ``start_ns``: since the boot ``boot_id``.

    ``began_ns``, ``ended_ns``: Unix time; ``ended_ns`` 0: the rank runs. ``exit_code`` and ``signal`` are None if they
    are unknown. ``fenced``: the launcher ended the rank because the lease was over.
    """

    worker: str
    rank: int
    generation: int
    pid: int
    start_ns: int
    boot_id: str
    began_ns: int
    log: str
    ended_ns: int = 0
    exit_code: int | None = None
    signal: int | None = None
    fenced: bool = False
    reason: str = ""


@dataclass(slots=True)
class History:
    """What is remembered of a group: the highest numbers seen, and what was started.

    ``id``: the id of its specification. ``record``: its last record, as JSON. ``ran``: the record of the generation
    ``started``, if it has a save step. ``since``: boot id and ns since boot when ``generation`` was first seen.
    ``order``: the generation of the owner's newest order. ``started``: the last generation that was started here.
    ``restarts``: the value of ``since`` for each start without an order. ``lease``: boot id, ns since boot at which the
    ranks must be dead, and generation. ``saving``: boot id, ns since boot at which the last save step must end, and
    generation.
    """

    name: str
    key: str
    id: str = ""
    record: str = ""
    ran: str = ""
    version: int = 0
    generation: int = 0
    since: tuple[str, int] | None = None
    phase: Phase = "stopped"
    order: int = 0
    started: int = 0
    restarts: list[tuple[str, int]] = field(default_factory=list)
    lease: tuple[str, int, int] | None = None
    saving: tuple[str, int, int] | None = None
    runs: list[Run] = field(default_factory=list)


class Found(NamedTuple):
    """A process of a generation. ``start_ns``: since the boot ``boot_id``."""

    boot_id: str
    pid: int
    start_ns: int
    group: str
    generation: int


@dataclass(slots=True)
class State:
    """The content of the state file. ``lost``: an earlier file was damaged, so there may be generations that were
    started and are not recorded. ``found``: processes whose environment does not name their generation.
    """

    format: int = _FORMAT
    lost: bool = False
    found: list[Found] = field(default_factory=list)
    groups: list[History] = field(default_factory=list)


class StateFile:
    """The state file of a launcher. ``problem``: why the last ``write`` failed, or empty."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME
        self.problem = ""

    def read(self) -> tuple[State, str]:
        """Returns the state, and what is wrong with the file. A damaged file is renamed to launcher.json.damaged.

        Raises ConfigError if the file cannot be read.
        """
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    raise ConfigError(
                        f"other users may write to {self._path}", hint=f"remove it, or chmod 600 {self._path}"
                    )
                return _checked(typed_json(State, file.read(_MAX_STATE))), ""
        except FileNotFoundError:
            return State(), ""
        except ValueError as e:
            aside = self._path.with_name(f"{_NAME}.damaged")
            self._path.replace(aside)
            return State(lost=True), f"the state file was damaged ({e}) and is {aside} now"
        except OSError as e:
            raise ConfigError(f"the state file {self._path} cannot be read: {e.strerror}") from None

    def write(self, state: State) -> bool:
        """Replaces the file so that it survives a power cut; returns whether it was written."""
        fresh = self._path.with_name(f"{_NAME}.new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                bounded = replace(state, found=state.found[:_MAX_FOUND])
                file.write(json.dumps(asdict(bounded), separators=(",", ":")).encode())
                file.flush()
                os.fsync(fd)
            fresh.replace(self._path)
            _sync(self._path.parent)
        except OSError as e:
            self.problem = f"the state file {self._path} cannot be written: {e.strerror}"
            return False
        self.problem = ""
        return True


def state_directory(path: Path) -> Path:
    """Returns the directory ``path``, made if it is missing. Raises ConfigError if it cannot be used or if other users
    may write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as e:
        raise ConfigError(
            f"the directory {path} cannot be used: {e.strerror}", hint="give another state directory"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(f"other users may write to the directory {path}", hint=f"chmod 700 {path}")
    return path


def lock(directory: Path) -> int:
    """Returns the descriptor that holds the lock of a state directory. Raises StateLocked with the holder's pid.

    Waits up to 5 s for the lock, because the keeper may hold it for a moment.
    """
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_S
    while not (locked := _try_lock(fd)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not locked:
        holder = re.sub(rb"[^0-9]", b"", os.read(fd, 16)).decode() or "unknown"
        os.close(fd)
        raise StateLocked(
            f"another launcher (pid {holder}) uses {directory}",
            hint=f"a user has one launcher on a node: give it more workers, or end it by `kill {holder}`",
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checked(state: State) -> State:
    if state.format != _FORMAT:
        raise ValueError(f"format {state.format}, and this version reads {_FORMAT}")
    names = [history.name for history in state.groups]
    if len(names) > MAX_GROUPS or len(set(names)) != len(names) or not all(map(NAME.fullmatch, names)):
        raise ValueError("groups: too many groups, two groups with the same name, or an invalid name")
    if len(state.found) > _MAX_FOUND:
        raise ValueError("found: too many processes")
    for history in state.groups:
        if len(history.runs) > _MAX_RUNS or len(history.restarts) > _MAX_STAMPS:
            raise ValueError(f"groups: {history.name} has too many runs")
        numbers = [history.version, history.generation, history.order, history.started]
        for run in history.runs:
            numbers += (run.pid, run.rank, run.generation, run.start_ns)
        if not all(0 <= number < _MAX_NUMBER for number in numbers):
            raise ValueError(f"groups: {history.name} has a number out of range")
    return state


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
