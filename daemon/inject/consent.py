"""Checks whether code may be put into a process, before anything is done to the process. A refusal names its reason.

The reasons come from the kernel and the process itself: how it was started, who traces it, what restricts it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import PrivilegeError, TargetError, UnsupportedTarget
from probing.daemon.processes.memory import Memory
from probing.daemon.processes.procfs import Mapping, parse_cmdline, parse_stat
from probing.daemon.processes.target import Target

__all__ = ("Facts", "facts_of")

_MAX_STATUS = _MAX_CMDLINE = 64 << 10
_MAX_ENVIRONMENT = 1 << 20
_INSTEAD = "use `probingctl vars` or `stacks`, which put nothing into the process"
_DISABLE = b"PYTHON_DISABLE_REMOTE_DEBUG"
# Options of python(1) that take a value.
_WITH_WORD = b"WX"
_LOOKS, _LOOK_S = 10, 0.02


class Facts(NamedTuple):
    """The facts about a process into which code may be put. ``pid`` is its pid in its own pid namespace, and ``uid`` is
    its real user id. ``filtered`` says whether seccomp filters its system calls.
    """

    pid: int
    uid: int
    filtered: bool


def facts_of(target: Target, memory: Memory, maps: list[Mapping]) -> Facts:
    """Returns the facts of a process into which code may be put.

    Raises PrivilegeError if the process forbids it, TargetError if it cannot run code now, UnsupportedTarget if it can
    never run code.
    """
    status = _untraced_status(target)
    _refuse_state(target, status)
    _refuse_start(target, memory)
    if b"shstk" in status.get(b"x86_Thread_features", b""):
        raise UnsupportedTarget(f"process {target.pid} has a shadow stack", hint=_INSTEAD)
    mode = int(status.get(b"Seccomp", b"0"))
    if mode == 1:
        raise UnsupportedTarget(f"process {target.pid} is in strict seccomp mode", hint=_INSTEAD)
    if not any(b"/_ctypes." in mapping.path for mapping in maps):
        _refuse_without_ctypes(target, status, filtered=mode == 2)
    pids = status.get(b"NSpid", status.get(b"Pid", b"0")).split()
    return Facts(int(pids[-1]), int(status[b"Uid"].split()[0]), mode == 2)


def _untraced_status(target: Target) -> dict[bytes, bytes]:
    """Returns /proc/PID/status, read again for up to 0.2 s while the process is traced.

    The wait tells injectors from debuggers: another injector traces the process only for a moment.
    """
    for _ in range(_LOOKS):
        status: dict[bytes, bytes] = dict(
            re.findall(rb"^(\w+):\s*(.*)$", target.read("status", _MAX_STATUS), re.MULTILINE)
        )
        if not int(status.get(b"TracerPid", b"0")):
            break
        time.sleep(_LOOK_S)
    return status


def _refuse_without_ctypes(target: Target, status: dict[bytes, bytes], *, filtered: bool) -> None:
    """Raises UnsupportedTarget if the code can write its result neither by ctypes nor by /proc/self/mem."""
    pid = target.pid
    if filtered:
        # A filter might kill the process for opening a file.
        why = f"process {pid} is in a seccomp sandbox and has not loaded ctypes: opening a file might kill it"
        raise UnsupportedTarget(why, hint=_INSTEAD)
    effective = int(status[b"Uid"].split()[1])
    if not Path(f"/proc/{pid}/root/proc/self").is_symlink() or Path(f"/proc/{pid}/mem").stat().st_uid != effective:
        why = f"process {pid} cannot open /proc/self/mem and has not loaded ctypes: code could not return a result"
        raise UnsupportedTarget(why, hint=_INSTEAD)


def _refuse_state(target: Target, status: dict[bytes, bytes]) -> None:
    pid = target.pid
    if int(status.get(b"TracerPid", b"0")):
        raise TargetError(
            f"process {pid} is traced by process {int(status[b'TracerPid'])}", hint="end the debugger and ask again"
        )
    if target.stat.pid != pid or parse_stat(target.read("stat", 4096)).state in "ZX":
        raise UnsupportedTarget(f"the main thread of process {pid} has ended", hint=_INSTEAD)
    if target.stat.state == "T":
        raise TargetError(f"process {pid} is stopped", hint="continue it (SIGCONT) and ask again")


def _refuse_start(target: Target, memory: Memory) -> None:
    pid = target.pid
    options = _options(parse_cmdline(target.read("cmdline", _MAX_CMDLINE)))
    if b"-I" in options:
        raise PrivilegeError(f"process {pid} was started in isolated mode (python -I)", hint=_INSTEAD)
    if b"-Xdisable-remote-debug" in options or b"-Xdisable_remote_debug" in options:
        raise PrivilegeError(f"process {pid} was started with -X disable-remote-debug", hint=_INSTEAD)
    if any(word.startswith(_DISABLE + b"=") and len(word) > len(_DISABLE) + 1 for word in _environment(target, memory)):
        raise PrivilegeError(f"process {pid} was started with PYTHON_DISABLE_REMOTE_DEBUG", hint=_INSTEAD)


def _options(words: list[bytes]) -> set[bytes]:
    """Returns the options of a python command line. ``-Bs`` counts as -B and -s; -X and -W include their values."""
    found: set[bytes] = set()
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith(b"-") or word.startswith(b"--") or word == b"-":
            break
        for at, letter in enumerate(word[1:], 1):
            if letter in _WITH_WORD:
                found.add(b"-" + bytes([letter]) + (word[at + 1 :] or next(rest, b"")))
                break
            if letter in b"cm":
                return found
            found.add(b"-" + bytes([letter]))
    return found


def _environment(target: Target, memory: Memory) -> list[bytes]:
    """Returns the environment as it was at exec. It is read from the process's memory, because reading
    /proc/PID/environ needs another permission.
    """
    fields = target.read("stat", 4096).rpartition(b")")[2].split()
    # env_start and env_end are fields 50 and 51 of proc_pid_stat(5). ``fields`` starts with field 3.
    start, end = int(fields[47]), int(fields[48])
    if not start or end <= start:
        return []
    data = memory.read_many([(start, min(end - start, _MAX_ENVIRONMENT))])[0]
    return (data or b"").split(b"\0")
