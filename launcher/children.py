"""The first processes of ranks: started or found again, watched by pidfds, and reaped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from probing.api.text import escape
from probing.launcher.processes import Clock, Handle
from probing.launcher.shim import NOT_RECORDED
from probing.launcher.spawn import Plan, Started, spawn
from probing.launcher.state import Run

__all__ = ("Child", "Children")

_MAX_REASON = 300
_NO_CHILD = "it ended while it was not a child of the launcher"
_MAX_REAPED = 4096


@dataclass(slots=True)
class Child:
    """A rank that runs. ``report``: a descriptor that yields the reason if the rank cannot run its command; -1: the
    command runs, or the reason was read.
    """

    run: Run
    handle: Handle
    report: int = -1
    problem: str = ""
    started: Started | None = None


class Children:
    """The running ranks of all groups."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._children: dict[int, Child] = {}
        self._statuses: dict[int, int] = {}

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def of(self, run: Run) -> Child | None:
        """Returns the child of a run; None if it has ended."""
        child = self._children.get(run.pid)
        return child if child is not None and child.run is run else None

    def close(self) -> None:
        """Forgets the children, which keep running."""
        for child in self:
            child.handle.close()
            if child.report >= 0:
                os.close(child.report)
        self._children.clear()

    def fds(self) -> list[int]:
        """Returns descriptors that are readable when a child has ended, begun or failed to begin."""
        return [fd for child in self for fd in (child.handle.fileno(), child.report) if fd >= 0]

    def spawn(self, run: Run, plan: Plan) -> None:
        """Starts the process of ``run``, which waits for ``release``. A failure ends the run."""
        try:
            started = spawn(plan)
        except (OSError, ValueError) as e:
            reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            self._end(run, f"it could not be started: {reason}")
            return
        run.pid, run.start_ns, run.boot_id = started.handle.pid, started.handle.start_ns, self._clock.boot_id
        self._children[run.pid] = Child(run, started.handle, started.report, started=started)

    def release(self, run: Run, problem: str = "") -> None:
        """Lets a spawned process run its command, or ends the process if there is a ``problem``."""
        child = self.of(run)
        if child is not None and child.started is not None:
            if problem:
                child.problem = problem
                child.started.cancel()
            else:
                child.started.run()
            child.started = None

    def adopt(self, run: Run) -> None:
        """Finds the process of a run that an earlier launcher started; if the process is gone, the run has ended."""
        if run.ended_ns:
            return
        handle = Handle.open(run.pid, run.start_ns) if run.pid and run.boot_id == self._clock.boot_id else None
        if handle is None:
            here = run.boot_id == self._clock.boot_id
            self._end(run, _NO_CHILD if here else "the machine was started again")
        else:
            self._children[run.pid] = Child(run, handle)

    def poll(self) -> bool:
        """Reads the reports of children, reaps ended children and records their ends. Returns whether a run changed."""
        changed = False
        for child in self:
            changed |= child.report >= 0 and self._read(child)
        # Repeated until no status is left: the next process that is started may get the pid of a reaped process.
        while True:
            self._reap()
            ended = [child for child in self if child.run.pid in self._statuses or child.handle.ended()]
            if not ended:
                return changed
            changed = True
            for child in ended:
                self._finish(child)

    def _read(self, child: Child) -> bool:
        try:
            text = os.read(child.report, 4096)
        except BlockingIOError:
            return False
        os.close(child.report)
        child.report = -1
        child.problem = child.problem or escape(text, _MAX_REASON)
        return True

    def _finish(self, child: Child) -> None:
        # The process may have ended after ``poll`` reaped.
        self._reap()
        status = self._statuses.pop(child.run.pid, None)
        if child.report >= 0:
            self._read(child)
        if child.report >= 0:
            os.close(child.report)
        if child.started is not None:
            child.started.cancel()
        del self._children[child.run.pid]
        child.handle.close()
        if status is None:
            self._end(child.run, _NO_CHILD)
            return
        if os.WIFSIGNALED(status):
            child.run.signal = os.WTERMSIG(status)
            reason = f"ended by {_signal_name(child.run.signal)}"
        else:
            child.run.exit_code = os.WEXITSTATUS(status)
            reason = f"exited with {child.run.exit_code}"
        if child.run.exit_code == NOT_RECORDED and child.problem:
            reason = "it was not started"
        self._end(child.run, f"{reason}: {child.problem}" if child.problem else reason)

    def _end(self, run: Run, reason: str) -> None:
        run.ended_ns = self._clock.unix_ns()
        run.reason = f"{run.reason}; {reason}" if run.reason else reason

    def _reap(self) -> None:
        """Reaps all children that have ended: processes of ranks, and orphans that became children of this process."""
        for _ in range(_MAX_REAPED):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._statuses[pid] = status


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
