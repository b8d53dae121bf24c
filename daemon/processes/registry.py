"""Assigns identities to processes from their facts. It does no I/O, and uses no thread and no clock."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from probing.daemon.fairness import crowding, in_turn
from probing.daemon.processes.environment import ALLOWED_NAMES
from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Job, Ranks, job_of, on_one_node, restarts_of
from probing.daemon.processes.owners import JobNames, container_of
from probing.daemon.processes.ranking import SOURCES, Membership, ModuleState, Ranking, RunEvidence
from probing.daemon.processes.redaction import command_text
from probing.daemon.processes.roles import NATIVE_LAUNCHERS, launches, roles
from probing.daemon.processes.runs import Runs, anchor_of
from probing.daemon.source import Identity, ProcessKey

__all__ = ("MAX_DEAD", "MAX_OF_OWNER", "Process", "Registry", "settled")

MAX_DEAD = 4_096
# The maximum number of watched live processes of one owner, and of live processes of one owner whose facts are kept. A
# limit is needed, because each change of a process examines the facts of all processes. A node of 16 GPUs has 16 ranks
# with 32 data loaders each.
MAX_OF_OWNER = 2_048
# Sources of ranks that are evaluated anew each time, because their evidence is kept with the facts.
_FROM_ENVIRON = ("environment", "exec", "scheduler", "")
_VERSION = re.compile(r"python([23]\.[0-9]{1,2})")


@dataclass(slots=True)
class Process:
    """A watched process. ``started``, ``published``: whether the rows of its start and its identity were written."""

    facts: Facts
    identity: Identity
    job_source: str
    ranks: Ranks | None
    container: str | None
    pod: str | None
    command: str
    python: str | None
    backends: set[str] = field(default_factory=set)
    started: bool = False
    published: bool = False
    ended: bool = False

    @property
    def key(self) -> ProcessKey:
        return self.facts.key


class Registry:
    """The processes of the node. Not thread-safe, except ``get`` and ``newest``. ``boot_id``: the boot since which
    start times are counted.
    """

    def __init__(self, node: str, boot_id: str) -> None:
        self._node = node
        self._boot_id = boot_id
        self._runs = Runs(boot_id)
        self._names = JobNames()
        # Facts of Python processes, of launchers, and of dead processes that have a live descendant.
        self._facts: dict[ProcessKey, Facts] = {}
        self._watched: dict[ProcessKey, Process] = {}
        self._dead: OrderedDict[ProcessKey, Process] = OrderedDict()
        self._newest: dict[int, Process] = {}
        self._restored: dict[ProcessKey, Mapping[str, Any]] = {}
        self._ranking = Ranking()
        # Processes that called exec and have not been read since then.
        self._replaced: set[ProcessKey] = set()
        self._pythons: dict[ProcessKey, str] = {}
        self._train_tids: dict[ProcessKey, int] = {}
        # Computed for each assignment of identities: the evidence about each run, and the newest trainer below each
        # process.
        self._evidence: dict[tuple[str, str], RunEvidence] = {}
        self._below: dict[ProcessKey, Process] = {}
        # The pids of ``alive``; None once they may have changed.
        self._pids: frozenset[int] | None = None

    def __contains__(self, key: ProcessKey) -> bool:
        return key in self._facts and not self._gone(key)

    def live(self) -> list[Process]:
        """Returns the live processes. Those of different owners alternate: the first N are then a fair choice."""
        live = [process for process in self._watched.values() if not process.ended]
        return in_turn(live, lambda process: process.identity.owner)

    def shown(self) -> list[Process]:
        """Returns all live processes, and dead trainers whose run has a live process."""
        runs = {_run_of(p) for p in self.live() if p.identity.role == "trainer"}
        lost = [p for p in self._watched.values() if p.ended and p.identity.role == "trainer" and _run_of(p) in runs]
        return [*self.live(), *lost]

    def get(self, key: ProcessKey) -> Process | None:
        """Returns a watched process, or None. Thread-safe: ``_watched`` is read again at the end, because the process
        may have moved from ``_dead`` to ``_watched`` meanwhile.
        """
        return self._watched.get(key) or self._dead.get(key) or self._watched.get(key)

    def newest(self, pid: int) -> Process | None:
        """Returns the last watched process with this pid, dead or alive. Thread-safe."""
        return self._newest.get(pid)

    def facts_of(self, key: ProcessKey) -> Facts | None:
        return self._facts.get(key)

    def over(self, key: ProcessKey) -> bool:
        """Returns whether the process is known to have ended."""
        return self._gone(key) or (key in self._dead and key not in self._restored)

    def alive(self) -> list[ProcessKey]:
        """Returns all live processes with facts, watched or not, and the restored processes that were not read yet."""
        return [key for key in self._facts if not self._gone(key)] + list(self._restored.keys() - self._facts.keys())

    def lives(self, pid: int) -> bool:
        """Returns whether a process of ``alive`` has this pid. The pids are kept until a process starts or ends."""
        if self._pids is None:
            self._pids = frozenset(key.pid for key in self.alive())
        return pid in self._pids

    def update(self, found: Iterable[Facts]) -> list[Process]:
        """Adds facts of processes. Returns the processes with a new identity, the oldest first.

        New processes of an owner who already has MAX_OF_OWNER are left out. For a process with a framework only watched
        processes count, so that other Pythons of the owner cannot keep it out.
        """
        self._pids = None
        known = Counter(facts.owner for key, facts in self._facts.items() if not self._gone(key))
        watched = Counter(process.identity.owner for process in self._watched.values() if not process.ended)
        for facts in found:
            if facts.key not in self._facts:
                if (watched if facts.framework else known)[facts.owner] >= MAX_OF_OWNER:
                    continue
                known[facts.owner] += 1
                watched[facts.owner] += facts.framework
            self._facts[facts.key] = self._with_earlier(facts)
        return self._assign()

    def _with_earlier(self, facts: Facts) -> Facts:
        before, process = self._facts.get(facts.key), self._watched.get(facts.key)
        if before is not None and before.owner != facts.owner:
            self._owner_changed(facts.key, before.owner)
        if facts.key in self._replaced:
            self._replaced.discard(facts.key)
            self._ranking.forget(facts.key)
            if process is not None:
                process.ranks, process.backends = None, set()
                if process.identity.role == "launcher":
                    # A rank that was read between fork and exec looked like its launcher, so the role is reset.
                    process.identity = process.identity._replace(role="other")
            return replace(facts, ancestors=before.ancestors or facts.ancestors) if before is not None else facts
        if before is None:
            before = self._from_earlier_daemon(facts)
        return facts.after(before) if before is not None else facts

    def _owner_changed(self, key: ProcessKey, before: int) -> None:
        """Releases the job name that a process got under its earlier owner, unless other trainers of this owner use the
        name. The owner changes, for example, when a process gives up root's rights.
        """
        self._runs.ended(key)
        process = self._watched.get(key)
        if process is None:
            return
        others = (other.identity for other in self.live() if other.key != key and other.identity.role == "trainer")
        if not any(who.owner == before and who.job == process.identity.job for who in others):
            self._names.release(process.identity.job, before)

    def _from_earlier_daemon(self, facts: Facts) -> Facts | None:
        restored = self._restored.get(facts.key, {})
        environ = restored.get("environ")
        if restored.get("exe") != facts.exe or not isinstance(environ, dict):
            return None
        return Facts(*facts.key, environ={name: str(environ[name]) for name in ALLOWED_NAMES & environ.keys()})

    def note_backends(self, key: ProcessKey, backends: Iterable[str]) -> list[Process]:
        """Adds collective backends that a process uses. They prove that the process is in a process group."""
        facts = self._facts.get(key)
        names = frozenset(f"pt_{name}" for name in backends)
        if facts is None or names <= facts.threads:
            return []
        self._facts[key] = replace(facts, threads=facts.threads | names)
        process = self._watched.get(key)
        if process is not None:
            process.backends.update(backends)
        return self._assign()

    def note_membership(self, key: ProcessKey, membership: Membership) -> list[Process]:
        """Adds a communicator of a process. If the communicator spans the job, it gives a rank that the environment
        lacks.
        """
        return self.note_memberships([(key, membership)])

    def note_memberships(self, found: Iterable[tuple[ProcessKey, Membership]]) -> list[Process]:
        """Adds communicators of processes, as ``note_membership`` does."""
        new = [self._ranking.note_membership(key, membership) for key, membership in found]
        return self._assign() if any(new) else []

    def note_module(self, key: ProcessKey, state: ModuleState) -> list[Process]:
        """Adds the rank, and the coordinator of the job, from the Python modules of a process."""
        facts = self._facts.get(key)
        if facts is None or not self._ranking.note_module(key, state):
            return []
        self._facts[key] = replace(facts, coordinator=state.coordinator)
        return self._assign()

    def note_thread(self, key: ProcessKey, tid: int) -> list[Process]:
        """Sets which thread of a process trains."""
        if self._train_tids.get(key) == tid or key not in self._watched:
            return []
        self._train_tids[key] = tid
        return self._assign()

    def _train_tid(self, key: ProcessKey) -> int | None:
        tid = self._train_tids.get(key)
        if tid is None and key in self._restored:
            tid = self._dead[key].identity.train_tid if key in self._dead else None
        return None if tid == key.pid else tid

    def note_python(self, key: ProcessKey, version: str | None) -> list[Process]:
        """Sets the CPython version of a watched process."""
        process = self._watched.get(key)
        if process is None or not version:
            return []
        self._pythons[key] = version
        if process.python == version:
            return []
        process.python, process.published = version, False
        return [process]

    def end(self, key: ProcessKey) -> Process | None:
        """Marks a process as ended. Returns the process if it was watched and alive."""
        if key in self._facts or key in self._restored:
            self._pids = None
        self._runs.ended(key)
        self._pythons.pop(key, None)
        self._train_tids.pop(key, None)
        self._replaced.discard(key)
        process = self._watched.get(key)
        if process is None:
            self._facts.pop(key, None)
            self._ranking.forget(key)
            # An earlier daemon watched the process, which ended before this daemon read it.
            return self._dead.get(key) if self._restored.pop(key, None) else None
        self._restored.pop(key, None)
        if process.ended:
            return None
        process.ended = True
        self._forget_unrelated()
        return process

    def restore(self, detail: Mapping[str, Any], process: Process, *, ended: bool) -> None:
        """Adds a process that an earlier daemon of this boot watched. Unless ``ended``, it counts as alive, but its
        identity is kept with the dead processes until the process is read again.
        """
        if not ended:
            self._restored[process.key] = detail
            self._pids = None
        process.started = process.published = process.ended = True
        if process.identity.role == "trainer":
            self._names.restore(process.identity.job, process.identity.owner)
        self._bury(process)

    def replaced(self, key: ProcessKey) -> None:
        """Notes that a process called exec. Facts of its earlier program are dropped now or at the next read."""
        self._pythons.pop(key, None)
        self._train_tids.pop(key, None)
        if key in self._facts:
            self._replaced.add(key)

    def _gone(self, key: ProcessKey) -> bool:
        process = self._watched.get(key)
        return process is not None and process.ended

    def _bury(self, process: Process) -> None:
        # Thousands of dead processes are kept, so most of their facts are dropped. The identity stays.
        facts = process.facts
        process.facts = Facts(facts.pid, facts.start_ns, facts.ppid, facts.uid, facts.owner)
        self._dead[process.key] = process
        self._dead.move_to_end(process.key)
        while len(self._dead) > MAX_DEAD:
            # The owner with the most dead processes loses the oldest of them; other owners lose none.
            owner = crowding(dead.identity.owner for dead in self._dead.values())
            key = next(key for key, dead in self._dead.items() if dead.identity.owner == owner)
            gone = self._dead.pop(key)
            if self._newest.get(key[0]) is gone:
                del self._newest[key[0]]

    def _forget_unrelated(self) -> None:
        """Moves dead processes to ``_dead`` if no table shows them and no live process descends from them."""
        alive = [facts for key, facts in self._facts.items() if not self._gone(key)]
        needed = {(pid, start) for facts in alive for pid, start, _ in facts.ancestors}
        needed |= {process.key for process in self.shown()}
        for key in [key for key, process in self._watched.items() if process.ended and key not in needed]:
            self._facts.pop(key, None)
            self._ranking.forget(key)
            self._bury(self._watched[key])
            del self._watched[key]

    def _assign(self) -> list[Process]:
        assigned = roles(self._facts.values())
        for key, process in self._watched.items():
            # A launcher stays a launcher after its ranks have ended.
            if process.identity.role == "launcher" and assigned.get(key) == "trainer":
                assigned[key] = "launcher"
            # A trainer that called exec and now runs a program of another kind no longer trains.
            if process.identity.role == "trainer" and not process.ended:
                assigned.setdefault(key, "other")
        order = sorted(assigned, key=lambda key: (key[1], len(self._facts[key].ancestors), key[0]))
        self._look_through_runs()
        changed = [p for key in order if assigned[key] == "trainer" and (p := self._place(key, assigned))]
        # Ranks depend on all trainers of a run, so they are computed in a second pass, when the runs are known.
        self._look_through_runs()
        ranked = [p for key in order if assigned[key] == "trainer" and (p := self._place(key, assigned))]
        changed = [p for p in changed if p.key not in {p.key for p in ranked}] + ranked
        self._look_through_runs()
        # A launcher gets the job of its newest trainer; helpers get the job of the process above them.
        changed += [p for key in order if assigned[key] == "launcher" and (p := self._place(key, assigned))]
        changed += [
            p for key in order if assigned[key] not in ("trainer", "launcher") and (p := self._place(key, assigned))
        ]
        return sorted(changed, key=lambda process: process.key[::-1])

    def _look_through_runs(self) -> None:
        """Computes the evidence about each run, and the newest trainer below each process."""
        peers: dict[tuple[str, str], dict[ProcessKey, Facts]] = {}
        self._below = {}
        for key, process in self._watched.items():
            if process.identity.role != "trainer":
                continue
            peers.setdefault(_run_of(process), {})[key] = self._facts.get(key, process.facts)
            for pid, start, _ in process.facts.ancestors:
                above = ProcessKey(pid, start)
                if above not in self._below or self._below[above].key[::-1] < key[::-1]:
                    self._below[above] = process
        self._evidence = {run: self._ranking.run(trainers) for run, trainers in peers.items()}

    def _place(self, key: ProcessKey, assigned: Mapping[ProcessKey, str]) -> Process | None:
        """Assigns a process its identity. Returns the process if the identity changed."""
        before = self._watched.get(key)
        if before is not None and before.ended:
            return None
        facts, role = self._facts[key], assigned[key]
        container, pod = container_of(facts.cgroup)
        ranks = self._ranks(facts) if role == "trainer" else None
        job, run, owner = self._job_and_run(facts, role, assigned, ranks, container, pod)
        numbers = (ranks.rank, ranks.local_rank, ranks.world_size, ranks.node_rank) if ranks else ()
        identity = Identity(*key, job.name, run, role, *numbers)._replace(owner=owner)
        if role == "trainer":
            identity = identity._replace(train_tid=self._train_tid(key))
        if before is not None and before.identity == identity:
            before.facts, before.ranks = facts, ranks
            return None
        restored = self._dead.get(key)
        process = Process(
            facts,
            identity,
            job.source,
            ranks,
            container,
            pod,
            command_text(facts.cmdline),
            self._python(facts),
            before.backends if before else set(),
            started=before is not None or key in self._restored,
            published=restored is not None and restored.identity == identity,
        )
        self._watched[key] = self._newest[key[0]] = process
        self._dead.pop(key, None)
        return process

    def _ranks(self, facts: Facts) -> Ranks | None:
        """Returns the ranks of a trainer according to the best evidence of all readings so far."""
        process, one_node, run = self._watched.get(facts.key), False, None
        if process is not None:
            run = self._evidence.get(_run_of(process))
            one_node = on_one_node(facts.environ, Job(process.identity.job, process.job_source), facts.coordinator)
        now = self._ranking.ranks(facts, run, one_node=one_node)
        before = process or (self._dead.get(facts.key) if facts.key in self._restored else None)
        earlier = before.ranks if before is not None else None
        if earlier is None or earlier.source in _FROM_ENVIRON:
            return now
        return now if now is not None and SOURCES.index(now.source) <= SOURCES.index(earlier.source) else earlier

    def _job_and_run(
        self,
        facts: Facts,
        role: str,
        assigned: Mapping[ProcessKey, str],
        ranks: Ranks | None,
        container: str | None,
        pod: str | None,
    ) -> tuple[Job, str, int]:
        """Returns the job, the run, and the uid of the job's owner."""
        before = self._watched.get(facts.key)
        launcher = self._launcher_above(facts, assigned)
        if role != "trainer" and (leader := self._leader(facts, role, assigned)):
            who = leader.identity
            return Job(who.job, leader.job_source), who.run, who.owner
        job = job_of(facts.environ, self._node, pod is not None, facts.coordinator, facts.cgroup)
        if role == "launcher" and before is not None and job is None:
            who = before.identity
            return Job(who.job, before.job_source), who.run, who.owner
        if job is None:
            job = Job(f"pid:{launcher[0] if launcher else facts.pid}", "pid")
        job = job._replace(name=self._names.name(job, facts.owner))
        return job, self._run_of_job(facts, role, job, launcher, ranks, container), facts.owner

    def _run_of_job(
        self,
        facts: Facts,
        role: str,
        job: Job,
        launcher: ProcessKey | None,
        ranks: Ranks | None,
        container: str | None,
    ) -> str:
        before = self._watched.get(facts.key)
        if before is not None and (before.identity.role, before.identity.job) == (role, job.name):
            return before.identity.run
        restored = self._restored.get(facts.key, {})
        if restored.get("job") == job.name and restored.get("run"):
            if role == "trainer":
                self._runs.restore(facts, job, ranks.rank if ranks else None, container, str(restored["run"]))
            return str(restored["run"])
        if role == "trainer":
            run = self._run_above(facts, job)
            return run or self._runs.name(facts, job, launcher, ranks.rank if ranks else None, container)
        return f"{restarts_of(facts.environ)}-{anchor_of(self._boot_id, f'{facts.pid}:{facts.start_ns}')}"

    def _run_above(self, facts: Facts, job: Job) -> str | None:
        """Returns the run of the rank that started a process; None if no rank started it. Lightning's rank 0 starts
        other ranks.
        """
        for pid, start, _ in facts.ancestors:
            above = self._watched.get(ProcessKey(pid, start))
            if above is not None and (above.identity.role, above.identity.job) == ("trainer", job.name):
                return above.identity.run
        return None

    def _leader(self, facts: Facts, role: str, assigned: Mapping[ProcessKey, str]) -> Process | None:
        """Returns the process whose job a process shares: for a launcher the newest trainer below it, for a helper the
        nearest trainer above it, or else the nearest launcher above it.
        """
        if role == "launcher":
            return self._below.get(facts.key)
        above = [ProcessKey(pid, start) for pid, start, _ in facts.ancestors]
        for wanted in ("trainer", "launcher"):
            for key in above:
                if assigned.get(key) == wanted and key in self._watched:
                    return self._watched[key]
        return None

    def _launcher_above(self, facts: Facts, assigned: Mapping[ProcessKey, str]) -> ProcessKey | None:
        for pid, start, name in facts.ancestors:
            key = ProcessKey(pid, start)
            if assigned.get(key) == "launcher" or name in NATIVE_LAUNCHERS:
                return key
        return None

    def _python(self, facts: Facts) -> str | None:
        if not facts.python:
            return None
        restored = self._restored.get(facts.key, {})
        if restored.get("exe") == facts.exe and restored.get("python"):
            self._pythons.setdefault(facts.key, str(restored["python"]))
        match = _VERSION.search(facts.program)
        return self._pythons.get(facts.key) or (match[1] if match else None)


def _run_of(process: Process) -> tuple[str, str]:
    return process.identity.job, process.identity.run


def settled(facts: Facts, process: Process | None) -> bool:
    """Returns whether the identity of a process is final. A process with a final identity is not read again, until it
    gets a new process group.

    Ranks from a scheduler's variables are not final, because the process may have inherited the variables from the
    process that the scheduler started.
    """
    if process is None:
        return not facts.python
    if process.identity.role == "trainer":
        sure = process.ranks is not None and process.ranks.source != "scheduler"
        return facts.framework and (sure or facts.in_group)
    return process.identity.role == "data_loader" or launches(facts)
