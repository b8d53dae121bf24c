"""Tells which processes share the CPUs that a process may use, while other CPUs of the node are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from probing.api.text import listed, numbers_text, share_text
from probing.diagnosis.facts import Condition, Facts
from probing.diagnosis.words import clean

__all__ = ("cpus_of", "crowd_text", "process_text")

_MOST_CPUS = 4096
# If the other threads of a process use a smaller share of a CPU than this, they do not hinder the thread that trains.
_THREADS = 0.2
_HELPERS = {"data_loader": "a data-loader worker of rank {}"}
_OTHER_HELPER = "a helper of rank {}"


def cpus_of(condition: Condition | None) -> frozenset[int]:
    """Returns the CPUs that a process may use; empty if they are unknown, or if their list was cut."""
    if condition is None or not condition.cpu_list or condition.cpus_allowed is None:
        return frozenset()
    found: set[int] = set()
    for part in condition.cpu_list.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) >= _MOST_CPUS:
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found if len(found) == condition.cpus_allowed else ())


def crowd_text(facts: Facts, node: str, pid: int, condition: Condition) -> str:
    """Returns a text such as "shares CPU 3 with rank 2, while 6 other CPUs of the node are free"; empty if no CPU is
    free, or if no process of the job is limited to the same CPUs."""
    own = cpus_of(condition)
    idle = next((one.idle_cpus for one in facts.nodes if one.node == node), None)
    free = len(frozenset(idle or ()) - own)
    if not own or not free:
        return ""
    others = [name for name, other, cpus in _confined(facts, node) if other != pid and cpus <= own]
    crowded = listed(_counted(others)) if len(others) >= len(own) else ""
    if not crowded and len(own) == 1 and _threads_share(condition) >= _THREADS:
        crowded = f"its own other threads, which use {share_text(_threads_share(condition))} of it"
    if not crowded:
        return ""
    rest = "1 other CPU of the node is" if free == 1 else f"{free} other CPUs of the node are"
    return f"shares CPU{'' if len(own) == 1 else 's'} {numbers_text(own)} with {crowded}, while {rest} free"


def process_text(facts: Facts, node: str, name: str, pid: int) -> str:
    """Returns a name for a process of the node: "rank 2 (python, pid 17)"; "hog (pid 18)" if it does not belong to the
    job.
    """
    role = next((role for role, other in _known(facts, node) if other == pid), "")
    return f"{role} ({clean(name)}, pid {pid})" if role else f"{clean(name)} (pid {pid})"


def _known(facts: Facts, node: str) -> Iterator[tuple[str, int]]:
    """Yields a name and the pid of each process of the job on a node."""
    for rank in facts.ranks:
        if rank.node == node:
            yield f"rank {rank.rank}", rank.pid
            for helper in rank.helpers:
                yield _HELPERS.get(helper.role, _OTHER_HELPER).format(rank.rank), helper.pid
    for process in facts.processes:
        if process.node == node:
            yield "the launcher" if process.role == "launcher" else "another process of the job", process.pid


def _confined(facts: Facts, node: str) -> Iterator[tuple[str, int, frozenset[int]]]:
    """Yields the processes of the job on a node with the CPUs that they may use."""
    conditions: dict[int, Condition | None] = {}
    for rank in facts.ranks:
        if rank.node == node and rank.exit is None:
            conditions[rank.pid] = rank.condition
            conditions |= {helper.pid: helper.condition for helper in rank.helpers if helper.exit is None}
    for name, pid in _known(facts, node):
        if cpus := cpus_of(conditions.get(pid)):
            yield name, pid, cpus


def _counted(names: Sequence[str]) -> Iterator[str]:
    """Yields each of ``names`` once; for a repeated name a text such as "2 data-loader workers of rank 1"."""
    for name, count in Counter(names).items():
        yield name if count == 1 else f"{count} {name.removeprefix('a ').replace(' of ', 's of ', 1)}"


def _threads_share(condition: Condition) -> float:
    """Returns the share of a CPU that threads of the process use, without the thread that trains."""
    if not condition.interval_ns or condition.process_cpu_ns is None or condition.cpu_ns is None:
        return 0.0
    return max(0, condition.process_cpu_ns - condition.cpu_ns) / condition.interval_ns
