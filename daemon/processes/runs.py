"""Names the runs of a job: ``0-1a2b3c`` is the count of restarts and a suffix that keeps equal jobs apart.

A job whose name is never reused (a Slurm step) needs only the count of restarts. A job on one node gets the suffix from
its launcher, the nearest ancestor with that role. Without a launcher the suffix comes from the oldest process of the
run: each further process joins a run with live members, unless the run already had a process with its rank. slurmstepd,
which runs a batch script, starts all training jobs of the script, one after the other, so it is not used as a launcher:
a process joins the newest run with live members, whatever its rank.

A job that spans nodes needs the same suffix on all nodes. The suffix comes from the address of the job's master, the
only value that is equal on all nodes. torchrun draws a new port for each start (c10d rendezvous), but with a fixed
port, consecutive equal jobs share a run.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Job, meeting_place, on_one_node, restarts_of
from probing.daemon.source import ProcessKey

__all__ = ("Runs", "anchor_of")

_LETTERS = 6


@dataclass(slots=True)
class _Run:
    """A run of a job. ``taken``: the ranks that its processes have or had; ``live``: its live processes."""

    name: str
    taken: set[int] = field(default_factory=set)
    live: set[ProcessKey] = field(default_factory=set)


class Runs:
    """Names runs and tracks their members. ``boot_id`` keeps equal pids of two boots apart."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._of_job: dict[tuple[str, str, str], list[_Run]] = {}

    def name(self, facts: Facts, job: Job, launcher: ProcessKey | None, rank: int | None, container: str | None) -> str:
        """Returns the name of the run of a trainer. Call it once for each process, older processes first."""
        restarts = restarts_of(facts.environ)
        if job.unique:
            return restarts
        if not on_one_node(facts.environ, job, facts.coordinator):
            place = meeting_place(facts.environ, facts.coordinator)
            return f"{restarts}-{anchor_of('master', place)}"
        of_script = launcher is not None and (*launcher, "slurmstepd") in facts.ancestors
        if launcher is not None and not of_script:
            return f"{restarts}-{self._anchor(launcher)}"
        return self._join(facts, (job.name, restarts, container or ""), rank, beside=of_script)

    def restore(self, facts: Facts, job: Job, rank: int | None, container: str | None, name: str) -> None:
        """Adds a live process whose run an earlier daemon named."""
        runs = self._of_job.setdefault((job.name, restarts_of(facts.environ), container or ""), [])
        run = next((run for run in runs if run.name == name), None)
        if run is None:
            run = _Run(name)
            runs.append(run)
        self._enter(run, facts.key, rank)

    def ended(self, key: ProcessKey) -> None:
        """Drops a process that ended, and runs without live processes: no process can join them any more."""
        for place, runs in list(self._of_job.items()):
            for run in runs:
                run.live.discard(key)
            alive = [run for run in runs if run.live]
            if alive:
                self._of_job[place] = alive
            else:
                del self._of_job[place]

    def _join(self, facts: Facts, place: tuple[str, str, str], rank: int | None, *, beside: bool) -> str:
        """Returns the name of the run that a process joins or begins. ``beside``: the process joins the newest run with
        live members, whatever its rank."""
        runs = self._of_job.setdefault(place, [])
        for run in reversed(runs):
            if run.live and (beside or (rank is not None and rank not in run.taken)):
                break
        else:
            run = _Run(f"{place[1]}-{self._anchor(facts.key)}")
            runs.append(run)
        self._enter(run, facts.key, rank)
        return run.name

    def _enter(self, run: _Run, key: ProcessKey, rank: int | None) -> None:
        run.live.add(key)
        if rank is not None:
            run.taken.add(rank)

    def _anchor(self, key: ProcessKey) -> str:
        return anchor_of(self._boot_id, f"{key[0]}:{key[1]}")


def anchor_of(scope: str, text: str) -> str:
    """Returns a hash of ``scope`` and ``text``: six hexadecimal digits."""
    return hashlib.blake2s(f"{scope}|{text}".encode(errors="replace")).hexdigest()[:_LETTERS]
