"""One group on one launcher: its record, what was started, and what is to be done next."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from probing.api.errors import ProbingError
from probing.api.text import utc_second
from probing.diagnosis.ranks import Worker
from probing.groups.group import Group
from probing.groups.spec import Spec, environment
from probing.launcher.census import Leader, Owner
from probing.launcher.decisions import ended_below, fence_times
from probing.launcher.ending import Ending
from probing.launcher.logs import log_path
from probing.launcher.processes import Clock
from probing.launcher.spawn import Plan
from probing.launcher.state import History, Run

__all__ = ("Held",)


class Held:
    """A group whose records this launcher accepted.

    ``ranks``: the workers of this launcher that have a rank in the record's generation. ``problem``: why the record is
    no longer obeyed. ``obstacle``: why the last attempt to start the generation failed. ``looked``: the newest
    generation whose record was known when the processes were last listed. ``cleared``: the newest generation for
    which no processes of older generations are left. ``fenced``: the lease at whose end the ranks were ended.
    """

    def __init__(self, history: History, workers: Collection[str], directory: Path) -> None:
        self.history = history
        self._workers, self._directory = workers, directory
        self.group: Group | None = None
        self.table: list[Worker] = []
        self.ranks: list[Worker] = []
        self.problem = self.obstacle = ""
        self.ending: Ending | None = None
        self.looked = self.cleared = -1
        self.fenced: tuple[str, int, int] | None = None
        self._written_ns = 0

    @property
    def spec(self) -> Spec | None:
        """The specification in the record; None without a record."""
        return self.group.spec if self.group else None

    def take(self, group: Group, clock: Clock) -> None:
        """Makes ``group``, which must be an accepted record, the record of the group."""
        self.group, self.problem, self.obstacle = group, "", ""
        self.table = group.ranks() if group.phase in ("running", "finished") else []
        self.ranks = [worker for worker in self.table if worker.worker in self._workers]
        history = self.history
        if history.since is None or group.generation > history.generation:
            history.since = (clock.boot_id, clock.boot_ns())
        history.version, history.generation, history.phase = group.spec.version, group.generation, group.phase
        history.order = group.order.generation if group.order else 0
        history.record = group.to_json().decode()

    def forget_deleted(self) -> bool:
        """Forgets a deleted group, except for its numbers, if no process of the group is left. Returns whether the
        group was forgotten.
        """
        history = self.history
        if history.phase != "deleted" or not history.record or self.cleared < history.generation:
            return False
        history.record = history.ran = ""
        history.runs = []
        return True

    def renewed(self, lease: tuple[str, int, int], least_ns: int) -> bool:
        """Accepts a lease that ends later than the last lease; returns whether it must be written to the state file.

        Leases come often, so not every lease is written: after a crash, the lease in the file may
        end up to ``least_ns`` earlier than the last lease.
        """
        last = self.history.lease
        if last is not None and last[0] == lease[0] and last[2] == lease[2] and lease[1] <= last[1]:
            return False
        self.history.lease = lease
        if last is not None and last[2] == lease[2] and lease[1] - self._written_ns < least_ns:
            return False
        self._written_ns = lease[1]
        return True

    def log_path(self, rank: int) -> Path:
        """Returns the log file of a rank."""
        return log_path(self._directory, self.history.name, rank)

    def fence_times(self) -> tuple[int, int] | None:
        """Returns when SIGTERM and SIGKILL are due, in ns since boot, so that all processes are dead when the lease is
        over. None if no lease ends the processes.
        """
        lease, spec = self.history.lease, self.spec
        if spec is None or not spec.fenced or lease is None or lease == self.fenced:
            return None
        return fence_times(spec, lease[1])

    @property
    def below(self) -> int:
        """The generation below which all processes are to be ended."""
        return ended_below(self.history.generation, self.history.phase)

    @property
    def leaders(self) -> list[Leader]:
        """The first process of each run in the history, including runs that have ended."""
        name = self.history.name
        return [Leader(Owner(name, run.generation), run.pid, run.start_ns) for run in self.history.runs if run.pid]

    def run_of(self, worker: str) -> Run | None:
        """Returns the last run of a worker."""
        return next((run for run in reversed(self.history.runs) if run.worker == worker), None)

    def saves(self) -> bool:
        """Whether the save step runs before older generations are ended. It runs if this generation begins with a
        restart that the owner did not order.
        """
        group, spec = self.group, self.spec
        if group is None or spec is None or not spec.save or not group.attempts or group.phase != "ending":
            return False
        return group.attempts[-1].generation == group.generation

    def plan(self, worker: Worker, unix_ns: int, own: dict[str, str]) -> Plan:
        """Returns what to run as ``worker``. ``own``: the environment of the launcher."""
        assert self.group is not None
        assert self.spec is not None
        generation = self.group.generation
        given = environment(self.spec, self.table, worker, generation, self.group.restarts)
        return self._plan(self.spec.command, worker, generation, {**own, **given}, unix_ns)

    def save_plan(self, pids: Collection[int], run: Run, unix_ns: int, own: dict[str, str]) -> Plan | None:
        """Returns the save step's command, with the environment of ``run``, the lowest rank here; None if that
        environment is unknown. ``pids``: the pids of the ranks here.
        """
        assert self.spec is not None
        try:
            ran = Group.from_json(self.history.ran.encode())
            table = ran.ranks()
            worker = next(worker for worker in table if worker.rank == run.rank)
        except (ProbingError, StopIteration):
            return None
        given = environment(ran.spec, table, worker, run.generation, ran.restarts)
        env = {**own, **given, "PROBING_SAVE_PIDS": " ".join(map(str, sorted(pids)))}
        return self._plan(self.spec.save, worker, run.generation, env, unix_ns, "save step, ")

    def _plan(
        self, words: tuple[str, ...], worker: Worker, generation: int, env: dict[str, str], unix_ns: int, what: str = ""
    ) -> Plan:
        assert self.spec is not None
        name, rank = self.history.name, worker.rank
        mark = {variable: env[variable] for variable in ("PROBING_GROUP", "PROBING_WORKER", "RANK")}
        header = f"=== {utc_second(unix_ns)} pid PID: {what}group {name}, generation {generation}, rank {rank} ==="
        cwd = self.spec.cwd or _home()
        return Plan(words, env, mark, cwd, header, self.log_path(rank))


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return "/"
