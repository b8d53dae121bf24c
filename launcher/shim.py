"""Waits until the launcher has recorded this process, then becomes the rank: ``python -I -S shim.py GO PLAN REPORT``.

The arguments are descriptors. A byte arrives on GO once the process is recorded; if the launcher ends before that,
the rank never runs. PLAN has the texts of ``plan_bytes``. REPORT gets the reason why the rank cannot run, and is closed
when the rank runs. The module imports no other module of probingd, so that it starts fast.
"""

import os
import signal
import sys
from contextlib import suppress

__all__ = ("CANNOT_RUN", "NOT_FOUND", "NOT_RECORDED", "main")

NOT_RECORDED, CANNOT_RUN, NOT_FOUND = 125, 126, 127
"""Exit statuses: the launcher ended before it recorded the process; the command cannot be run; the command does not
exist. The last two are as in a shell."""


def main() -> None:
    """Becomes the rank, or ends."""
    go, plan, report = map(int, sys.argv[1:4])
    os.set_inheritable(report, False)
    with open(plan, "rb") as file:
        header, directory, number, *texts = file.read().split(b"\0")
    if os.read(go, 1) != b"g":
        os._exit(NOT_RECORDED)
    words, variables = texts[: int(number)], texts[int(number) :]
    with os.scandir("/proc/self/fd") as entries:
        fds = [int(entry.name) for entry in entries]
    for fd in fds:
        if fd > 2 and fd != report:
            _close(fd)
    # Python ignores these signals, and the rank would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.write(1, header.replace(b"PID", b"%d" % os.getpid(), 1) + b"\n")
    env = dict(variable.split(b"=", 1) for variable in variables)
    what, missing = "directory " + os.fsdecode(directory), CANNOT_RUN
    try:
        os.chdir(directory)
        what, missing = "command " + os.fsdecode(words[0]), NOT_FOUND
        os.execvpe(words[0], words, env)  # noqa: S606
    except OSError as e:
        text = f"the {what} cannot be used: {e.strerror}".encode("utf-8", "backslashreplace")
        os.write(1, text + b"\n")
        # The launcher may have ended: the write must not raise SIGPIPE.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        with suppress(OSError):
            os.write(report, text[:4096])
        os._exit(missing if isinstance(e, FileNotFoundError) else CANNOT_RUN)


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)


if __name__ == "__main__":
    main()
