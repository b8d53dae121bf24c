"""The launcher of one node: obeys the records of groups, and reports what became of the ranks.

It does not communicate: its caller hands it records and leases, and sends its reports. All methods except ``wake`` must
be called from one thread, and only ``wait`` blocks. While a launcher exists, its process must start no other children,
because the launcher reaps all children.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from probing.api.errors import ProbingError
from probing.groups.group import Group
from probing.groups.report import WorkerRow
from probing.groups.spec import MAX_GROUPS
from probing.launcher.allowed import Rules
from probing.launcher.census import set_subreaper
from probing.launcher.children import Child, Children
from probing.launcher.decisions import Facts, Verdict, recent_restarts, record_problem, start_verdict
from probing.launcher.ending import Ending
from probing.launcher.held import Held
from probing.launcher.logs import rotate
from probing.launcher.processes import Clock
from probing.launcher.reports import Refusals, row
from probing.launcher.saving import Saves
from probing.launcher.starting import start
from probing.launcher.state import History, StateFile, lock, state_directory
from probing.launcher.watch import Watch

__all__ = ("NODE_VARIABLE", "Launcher")

NODE_VARIABLE = "PROBING_LAUNCHER_NODE"
"""Environment variable with the node's name, set by ``reexec`` for the new program, because the daemon may not
answer when the new program starts."""

_SECOND_NS, _NEVER_NS = 1_000_000_000, 1 << 62
_MAX_ROWS = 1024
# The maximum size of all records, in characters. A record may take four times as much in the state file, and at most
# 96 MiB of that file are read.
_MAX_RECORDS = 16 << 20
_IDLE = ("idle", "ended", "fenced")


class Launcher:
    """Starts, watches and ends the ranks of groups on one node.

    ``node``: the node's name. ``workers``: names NODE-N that this launcher serves. ``state_dir``: the state directory,
    which only one launcher can use at a time; ranks of an earlier launcher are found again. ``rules``: the records and
    commands that the launcher obeys.
    """

    def __init__(
        self, node: str, workers: Sequence[str], state_dir: Path, rules: Rules, clock: Clock | None = None
    ) -> None:
        """Raises ConfigError, and StateLocked if another launcher uses ``state_dir``."""
        self.node, self.workers, self._rules = node, tuple(workers), rules
        self._directory = state_directory(state_dir)
        self._lock = lock(self._directory)
        self._clock = clock or Clock()
        self._file = StateFile(self._directory)
        self._state, self._damage = self._file.read()
        self._children = Children(self._clock)
        self._watch = Watch(node, self._children, self._clock, self._state.found)
        self._saves = Saves()
        self._refusals = Refusals(self.workers)
        self._dirty = bool(self._damage)
        self._next_tick_ns = self._next_write_ns = 0
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._held = {history.name: self._resumed(history) for history in self._state.groups}
        set_subreaper(True)
        with suppress(ValueError):
            # This process may have been started with SIGCHLD ignored; then no exit status would be known.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @property
    def problem(self) -> str:
        """Why nothing can be started now; else what was wrong with the state file; else empty."""
        return self._file.problem or self._watch.problem or self._damage

    def apply(self, group: Group) -> str:
        """Accepts a record, which ``step`` carries out. Returns why the record is refused, or an empty string.

        A refusal is also in the report.
        """
        try:
            spec = group.spec
            group.ranks()
        except ProbingError as e:
            return e.message
        held = self._held.get(spec.name)
        problem = record_problem(group, held.history if held else None, self._rules)
        problem = problem or self._space_problem(group, held)
        if problem:
            self._refusals.add(group, problem, held is not None)
            return problem
        self._refusals.forget(spec.name)
        if held is None:
            history = History(spec.name, group.key, spec.id)
            if self._state.lost and group.phase in ("running", "finished"):
                # An earlier launcher may have started the generation, and the ranks may have ended since.
                history.started = group.generation
            self._state.groups.append(history)
            held = self._held[spec.name] = Held(history, self.workers, self._directory)
        if group != held.group:
            held.take(group, self._clock)
            self._watch.due = self._dirty = True
        return ""

    def renew(self, name: str, generation: int, until: float) -> None:
        """Renews the lease of a generation: a majority of the group's nodes lets it run until ``until``, in seconds
        since boot. A launcher starts and runs the ranks of a fenced group only under a lease.
        """
        held = self._held.get(name)
        if held is None or held.spec is None or generation != held.history.generation:
            return
        fence_ns = round(held.spec.fence_s * _SECOND_NS)
        now_ns = self._clock.boot_ns()
        left_ns = min(round(until * _SECOND_NS) - now_ns, fence_ns)
        lease = (self._clock.boot_id, now_ns + left_ns, generation)
        if left_ns > 0 and held.renewed(lease, fence_ns // 10):
            self._dirty = True

    def step(self) -> None:
        """Does all that is due now: starts and signals ranks, writes the state file, rotates logs."""
        if self._children.poll():
            self._watch.due = self._dirty = True
        now_ns, groups = self._clock.boot_ns(), list(self._held.values())
        for held in groups:
            self._fence(held, now_ns)
        if now_ns >= self._watch.due_ns(groups):
            self._dirty |= self._watch.look(groups)
        for held in groups:
            self._end_older(held, now_ns)
        self._write(now_ns)
        for held in groups:
            self._start(held, now_ns)
        if now_ns >= self._next_tick_ns:
            self._next_tick_ns = now_ns + _SECOND_NS
            self._tick()

    def wait(self, timeout_s: float) -> None:
        """Waits until ``step`` has something to do, ``wake`` was called, or ``timeout_s`` is over."""
        poll = select.poll()
        for fd in (self._waker, *self._children.fds(), *self._saves.fds()):
            poll.register(fd, select.POLLIN)
        poll.poll(min(timeout_s, self._due_s()) * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._waker)

    def wake(self) -> None:
        """Ends ``wait``. May be called from any thread and from signal handlers."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._waker, 1)

    def report(self) -> list[WorkerRow]:
        """Returns a row for each group and each of the group's workers here.

        ``clear``: no process of a generation older than ``seen`` is left, and none will be started. A deleted group has
        rows until it is clear. A group whose records were all refused has rows. If other records of the group were
        accepted, a refused record has rows in one report only, with the generation 0. At most 1,024 rows of groups are
        returned: rows of active ranks first, then the newest.
        """
        now_ns = self._clock.boot_ns()
        rows = [row for held in self._held.values() for row in self._rows(held, now_ns)]
        if len(rows) > _MAX_ROWS:
            rows.sort(key=lambda row: (row.state in _IDLE, -row.since_ns))
        return [*self._refusals.rows(), *rows[:_MAX_ROWS]]

    def log(self, name: str, rank: int) -> Path | None:
        """Returns the log file of a rank of group ``name`` that runs or ran here; None if the rank did not run here."""
        held = self._held.get(name)
        runs = [run for run in held.history.runs if run.rank == rank] if held else []
        return Path(runs[-1].log) if runs else None

    def clear(self, name: str, generation: int) -> bool:
        """Returns whether no process of a generation older than ``generation`` is left, and none will be started."""
        held = self._held.get(name)
        return held is not None and held.cleared >= generation

    def reexec(self) -> NoReturn:
        """Executes the program of this process again, with the same command line and pid: its ranks stay its children.

        The new program finds the node's name in NODE_VARIABLE. Raises OSError if the program cannot be executed.
        """
        self._dirty = True
        self._write(_NEVER_NS)
        os.environ[NODE_VARIABLE] = self.node
        handler = signal.getsignal(signal.SIGHUP)
        with suppress(ValueError):
            # A SIGHUP must not end the new program before that has its own handler.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
        except OSError:
            del os.environ[NODE_VARIABLE]
            with suppress(ValueError):
                signal.signal(signal.SIGHUP, handler)
            raise

    def close(self) -> None:
        """Releases the state directory; ranks keep running."""
        self._write(_NEVER_NS)
        self._children.close()
        for fd in (self._lock, self._waker):
            os.close(fd)

    def _resumed(self, history: History) -> Held:
        held = Held(history, self.workers, self._directory)
        for run in history.runs:
            self._children.adopt(run)
        if history.record:
            with suppress(ProbingError):
                group = Group.from_json(history.record.encode())
                held.take(group, self._clock)
                # The key of the record may no longer be trusted.
                held.problem = record_problem(group, history, self._rules)
        return held

    def _rows(self, held: Held, now_ns: int) -> list[WorkerRow]:
        verdict = self._verdict(held, now_ns)
        restarts = recent_restarts(held.history, self._clock.boot_id, now_ns)
        rows = []
        for worker in self._workers_of(held):
            run = held.run_of(worker)
            members = self._watch.members(held, run.generation) if run else ()
            child = self._children.of(run) if run else None
            rows.append(row(held, worker, child, verdict, restarts=restarts, members=members))
        return rows

    def _workers_of(self, held: Held) -> list[str]:
        named = {child.run.worker for child in self._watch.ranks(held)}
        others = sorted(named.difference(self.workers))
        if held.group is not None and (held.group.phase != "deleted" or held.cleared < held.history.generation):
            named.update(held.group.spec.workers, held.group.occupied, (run.worker for run in held.history.runs))
        return [*(worker for worker in self.workers if worker in named), *others]

    def _space_problem(self, group: Group, held: Held | None) -> str:
        if held is None and len(self._held) >= MAX_GROUPS and not self._forget_deleted():
            return f"this launcher has {MAX_GROUPS:,} groups: delete some"
        if held is not None and group.spec.version <= held.history.version:
            # The record brings an order. If it were refused, an owner with too many records could not delete any.
            return ""
        others = (history for history in self._state.groups if held is None or history is not held.history)
        size = sum(len(history.record) for history in others) + len(group.spec_text)
        return "the records of this launcher's groups are too large: delete some" if size > _MAX_RECORDS else ""

    def _forget_deleted(self) -> bool:
        """Forgets one deleted group of which no process is left; returns whether there was one."""
        for held in self._held.values():
            history = held.history
            if history.phase == "deleted" and held.cleared >= history.generation and not self._watch.ranks(held):
                self._state.groups.remove(history)
                del self._held[history.name]
                return True
        return False

    def _due_s(self) -> float:
        now_ns = self._clock.boot_ns()
        ticks = list(self._children) or any(held.obstacle for held in self._held.values())
        due = [
            self._watch.due_ns(self._held.values()),
            self._next_tick_ns if ticks else _NEVER_NS,
            self._next_write_ns if self._dirty else _NEVER_NS,
            *(times[0] for held in self._held.values() if (times := held.fence_times())),
        ]
        return max(0, min(due) - now_ns) / _SECOND_NS

    def _fence(self, held: Held, now_ns: int) -> None:
        """Begins to end the ranks of a group here if their lease is nearly over."""
        spec, history, ranks = held.spec, held.history, self._watch.ranks(held)
        if spec and spec.fenced and ranks and (history.lease is None or history.lease[0] != self._clock.boot_id):
            # The lease is not known, because the state file was lost: the fence time begins again.
            fence_ns = round(spec.fence_s * _SECOND_NS)
            history.lease = (self._clock.boot_id, now_ns + fence_ns, history.started)
            self._dirty = True
        times = held.fence_times()
        if spec is None or times is None or now_ns < times[0]:
            return
        held.fenced = history.lease
        if held.ending is None or held.ending.below <= history.started:
            for child in ranks:
                child.run.fenced = True
                child.run.reason = f"fenced: no word from a majority of the group's nodes for {spec.fence_s:g} s"
            held.ending = Ending(history.started + 1, now_ns, times[1] - now_ns)
            self._watch.due = self._dirty = True
        held.ending.limit(times[1])

    def _end_older(self, held: Held, now_ns: int) -> None:
        below = max(held.below, held.ending.below if held.ending else 0)
        older, ranks = self._watch.older(held, below), self._watch.ranks(held)
        if not older and all(child.run.generation >= below for child in ranks):
            held.ending = None
            self._saves.forget(held.history.name)
            return
        if held.ending is None:
            held.ending = self._begun_ending(held, ranks, below, now_ns)
        held.ending.below = below
        if not held.saves() or self._saves.is_over(held.history.name, ranks):
            held.ending.saved(now_ns)
        held.ending.signal(now_ns, older)

    def _begun_ending(self, held: Held, ranks: list[Child], below: int, now_ns: int) -> Ending:
        save_ns = self._saves.begin(held, ranks, self._clock)
        for child in ranks:
            child.run.reason = child.run.reason or f"ended for generation {held.history.generation}"
        self._dirty = True
        return Ending(below, now_ns, round((held.spec.grace_s if held.spec else 10.0) * _SECOND_NS), save_ns)

    def _verdict(self, held: Held, now_ns: int) -> Verdict:
        if held.group is None:
            return Verdict("idle", "this launcher has no valid record of the group")
        older = tuple(sorted(stat.pid for stat in self._watch.older(held)))
        problem = held.problem or self._file.problem or held.obstacle
        clock, unknown = self._clock, self._watch.problem
        facts = Facts(self.node, clock.boot_id, now_ns, len(held.ranks), older, problem, unknown)
        return start_verdict(held.group, held.history, self._rules, facts)

    def _start(self, held: Held, now_ns: int) -> None:
        history = held.history
        # The generations that were seen have to be on the disk first: no older generation must start after a crash.
        if self._dirty or held.looked < history.generation or held.ending is not None:
            return
        held.cleared, held.obstacle = history.generation, ""
        self._dirty = held.forget_deleted()
        if history.started < history.generation and self._verdict(held, now_ns).state == "start":
            start(held, self._state, self._file, self._children, self._clock)
            self._dirty |= bool(self._file.problem)

    def _write(self, now_ns: int) -> None:
        if self._dirty and now_ns >= self._next_write_ns:
            self._state.found = self._watch.found
            self._dirty = not self._file.write(self._state)
            self._next_write_ns = now_ns + _SECOND_NS if self._dirty else 0

    def _tick(self) -> None:
        """Does what is due each second while ranks run."""
        self._watch.notice_orphans()
        for child in self._children:
            held = next((held for held in self._held.values() if child.run in held.history.runs), None)
            if held is not None and held.spec is not None:
                rotate(Path(child.run.log), held.spec.log_bytes)
