"""The main thread waits for input, for the other end of a pipe or socket, for a child process, or for a timer."""

from __future__ import annotations

from probing.diagnosis.activity.scene import Scene, Seen, innermost

__all__ = ("find_child", "find_network", "find_pipe", "find_sleep", "find_stdin")

_READS = frozenset(("read", "readv", "pread64", "poll", "ppoll", "select", "pselect6", "splice", "recvfrom", "ioctl"))
_WRITES = frozenset(("write", "writev", "pwrite64", "sendfile"))
_OPENS = frozenset(("open", "openat", "openat2"))
_SLEEPS = frozenset(("nanosleep", "clock_nanosleep"))
# Without a file to wait for, these only sleep.
_TIMED = frozenset(("select", "pselect6", "poll", "ppoll"))
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py", "/IPython/terminal/debugger.py")
_STANDARD = {1: "standard output", 2: "standard error"}


def find_stdin(scene: Scene) -> Seen | None:
    """Returns whether the process waits for input, as at a breakpoint."""
    c = scene.condition
    at_prompt = any(innermost(scene.python, name) is not None for name in _DEBUGGERS)
    reads = c.target_fd == 0 and c.syscall in _READS and c.target_kind != "file"
    if not reads and not (at_prompt and c.syscall in (*_READS, None)):
        return None
    what = "waits at a breakpoint of the debugger" if at_prompt else "waits for input on its standard input"
    return Seen("stdin", f"{what}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def find_pipe(scene: Scene) -> Seen | None:
    """Returns which pipe or FIFO the process waits for."""
    c = scene.condition
    if c.target_kind not in ("pipe", "fifo") or c.target is None:
        return None
    name = scene.target if c.target_kind == "pipe" else f"the FIFO {scene.target}"
    if c.syscall in _OPENS:
        does = f"waits until another process opens {name}"
    elif c.syscall in _WRITES:
        what = _STANDARD.get(c.target_fd or -1)
        does = f"waits until another process reads {f'its {what}' if what else 'from'} ({name})"
    elif c.syscall in _READS:
        does = f"waits for data from {name}"
    else:
        return None
    return Seen("pipe", f"{does}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def find_network(scene: Scene) -> Seen | None:
    """Returns which socket the process waits for, with its other end."""
    c = scene.condition
    if c.target_kind != "socket" or c.target is None or c.syscall is None:
        return None
    ends = scene.target.partition(" ")[2]
    other = ends.partition(" -> ")[2] or ends or scene.target
    if c.syscall == "connect":
        does = f"waits for a connection to {other}"
    elif c.syscall in ("sendto", "sendmsg", "sendmmsg", *_WRITES):
        does = f"waits until {other} takes its data"
    else:
        does = f"waits for data from {other}"
    return Seen("network", f"{does}{scene.where}", frame=scene.user, evidence=(scene.kernel,))


def find_child(scene: Scene) -> Seen | None:
    """Returns the child that the process waits for."""
    if scene.condition.target_kind != "child" or scene.condition.target is None:
        return None
    child = "any of its children" if scene.target == "any child" else f"its child {scene.target}"
    runs = True if scene.condition.target.endswith(", state R)") else None
    does = f"waits for {child}{scene.where}"
    return Seen("child", does, frame=scene.user, progressing=runs, evidence=(scene.kernel,))


def find_sleep(scene: Scene) -> Seen | None:
    """Returns whether the main thread sleeps for a chosen time."""
    c = scene.condition
    waits_for_nothing = c.syscall in _TIMED and c.target is None and c.target_fd is None
    if c.syscall not in _SLEEPS and not waits_for_nothing and not scene.runs_in("time_sleep", "pysleep"):
        return None
    return Seen("sleeping", f"sleeps{scene.where}", frame=scene.user, evidence=(scene.kernel,))
