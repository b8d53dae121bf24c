"""The diagnosis of the job that hangs, by the first of the simulated nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from job_members import calling

from probing.daemon.cluster import Member
from probing.daemon.diagnose.coordination.job_facts import JobFacts
from probing.daemon.diagnose.coordination.peers import Holding, Sight, job_mark
from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.diagnosis.facts import Facts
from probing.diagnosis.facts_file import from_json
from simulator.cast import Cast
from simulator.hung_job import HUNG, RUN, JobNodes

__all__ = ("coordinator",)


class _Own:
    """What the first node reads of its own ranks."""

    def __init__(self, cast: Cast) -> None:
        self._nodes = JobNodes(cast)

    def facts(self, job: str, *, run: str, deep: bool, timeout: float) -> list[Facts]:
        return [from_json(facts) for facts in self._nodes.facts(job, 0)]

    def standing(self, job: str, *, timeout: float) -> Hashable:
        return None

    def read_ahead(self, job: str, *, timeout: float) -> None: ...

    def sight(self, job: str, run: str) -> Sight:
        return Sight()

    def holding(self, job: str, run: str) -> Holding:
        return Holding(living=True)


@contextmanager
def coordinator(cast: Cast) -> Iterator[JobFacts]:
    """Yields what the first node of a running simulation knows of its jobs, by real calls to the other nodes."""
    mark, own = job_mark(HUNG, RUN, living=True), _Own(cast)
    others = [Member(cast.name(n), cast.address(n), "healthy", jobs=(mark,)) for n in range(1, cast.count)]
    with calling(cast.name(0), others) as peers:
        proofs = Proofs(cast.name(0), peers, own, grace_s=0.0, trusted=True)
        proofs.hold({(HUNG, RUN): True})
        yield JobFacts(cast.name(0), own, proofs)
