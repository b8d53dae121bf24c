"""The Python client: asks one node, or many nodes as if they were one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from probing.api.errors import NotFound
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.deletions import require_no_deletion
from probing.client.jobs import has_ended, job_named
from probing.client.messages import (
    Change,
    Evaluated,
    Failure,
    Setting,
    Thread,
    Value,
    evaluated_of,
    failure_of,
    setting_of,
    thread_of,
    value_of,
)
from probing.client.queries import Queries
from probing.client.wire.node import Node
from probing.federation.execution.answer import Answer

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack

__all__ = ("Cluster", "Evaluations", "Stacks", "Variables", "processes_sql")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Stacks:
    """The threads of the processes that could be read, and the processes that could not."""

    threads: list[Thread]
    failures: list[Failure]


@dataclass(frozen=True, slots=True)
class Variables:
    """The values of the variables that were found, and the processes that could not be read."""

    values: list[Value]
    failures: list[Failure]


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The results of code from the processes that ran it, and the processes in which the code did not run."""

    results: list[Evaluated]
    failures: list[Failure]


class Cluster(Queries):
    """Asks nodes for rows, processes, stacks, variables, settings and status. ``Nodes`` explains the arguments.

    ``job`` is a name, the end of a name, a run, or a pid, as for ``--job``. A method raises NotFound for a job that no
    node knows and for a job that has ended (the message says when), and UsageError if several jobs fit ``job``.
    """

    def ps(self) -> pa.Table:
        """Returns the training processes, with the columns of process.processes."""
        return self.processes().table

    def processes(self, where: str = "") -> Answer:
        """Returns the rows of process.processes that meet the SQL condition ``where``; all rows if it is empty."""
        return self.answer(processes_sql(where))

    def stacks(
        self, pids: Sequence[int] = (), job: str = "", *, native: bool = False, local_variables: bool = False
    ) -> Stacks:
        """Returns the stacks of all threads of the processes. Raises NotFound for a process that no node has."""

        def ask(name: str) -> list[pb.StacksReply]:
            # Each node gets a request of its own, because the call writes a deadline into the request.
            return self.some(
                lambda node, seconds: node.stacks(
                    pb.StacksRequest(pids=pids, job=name, native=native, locals=local_variables), seconds
                )
            )

        replies = self._of_job(job, ask)
        return Stacks(
            [
                thread_of(reply.node, thread, native=native, local_variables=local_variables)
                for reply in replies
                for thread in reply.threads
            ],
            [failure_of(reply.node, failed) for reply in replies for failed in reply.failures],
        )

    def variables(self, names: Sequence[str], pids: Sequence[int] = (), job: str = "") -> Variables:
        """Returns values of the dotted ``names`` in the processes. Raises NotFound for a process that no node has."""

        def ask(name: str) -> list[pb.VarsReply]:
            return self.some(lambda node, left: node.variables(pb.VarsRequest(pids=pids, job=name, names=names), left))

        replies = self._of_job(job, ask)
        return Variables(
            [value_of(reply.node, value) for reply in replies for value in reply.values],
            [failure_of(reply.node, failed) for reply in replies for failed in reply.failures],
        )

    def evaluate(
        self,
        code: str,
        pids: Sequence[int] = (),
        job: str = "",
        *,
        rank: int | None = None,
        seconds: float = 5.0,
        session: str = "",
        ends: bool = False,
    ) -> Evaluations:
        """Runs ``code`` in the processes whose nodes allow it to run. The code must start and end within ``seconds``.

        Code of a ``session`` sees the names that earlier code of the same session assigned; with ``ends``, these names
        are dropped once this code has run. Raises NotFound for a process that no node has.
        """

        def ask(name: str) -> list[pb.EvalReply]:
            request = pb.EvalRequest(
                pids=pids, job=name, rank=rank, code=code, limit_ms=limit_ms, session=session, ends=ends
            )
            return self.some(lambda node, left: node.evaluate(request, left))

        limit_ms = max(1, round(seconds * 1000))
        replies = self._of_job(job, ask)
        return Evaluations(
            [evaluated_of(reply.node, result) for reply in replies for result in reply.results],
            [failure_of(reply.node, failed) for reply in replies for failed in reply.failures],
        )

    def annotate(
        self, labels: Mapping[str, str], pids: Sequence[int] = (), job: str = "", *, rank: int | None = None
    ) -> list[tuple[str, int]]:
        """Sets labels of the ranks that the other arguments select; an empty value removes a label. Returns (node,
        number of selected ranks) for each node that has any. Raises NotFound if no node has a selected rank.
        """

        def ask(name: str) -> list[pb.AnnotateReply]:
            request = pb.AnnotateRequest(labels=labels, pids=pids, job=name, rank=rank)
            return self.some(lambda node, left: node.annotate(request, left))

        return [(reply.node, reply.ranks) for reply in self._of_job(job, ask)]

    def groups(self, request: pb.GroupRequest) -> list[bytes]:
        """Makes the change in ``request``. Returns the records of groups that the nodes have after the change, as
        JSON."""
        replies = self.some(lambda node, left: node.group(request, left))
        return [record for reply in replies for record in reply.groups]

    def group_log(self, name: str, rank: int, start: int) -> tuple[bytes, int]:
        """Returns a part of the log of a rank, and the position after that part. Raises NotFound if no node has the
        rank.

        The part begins at position ``start``; a negative ``start`` counts bytes back from the end of the log.
        """
        request = pb.GroupLogRequest(name=name, rank=rank)
        setattr(request, "from", start)
        [reply] = self.some(lambda node, left: node.group_log(request, left))
        return reply.data, reply.end

    def facts(self, job: str = "", *, run: str = "", hardware: bool = False) -> list[tuple[str, list[bytes]]]:
        """Returns, for each node that answers, its name and the facts of each run of ``job`` (empty: of all jobs) as
        JSON.

        ``hardware`` limits the facts to those about the node's hardware. Nodes that do not know the job are left out.
        Raises NotFound if no node that answers knows the job.
        """

        def ask(name: str) -> list[pb.FactsReply]:
            request = pb.FactsRequest(job=name, run=run, hardware=hardware)
            return self.some(lambda node, seconds: node.facts(request, seconds))

        replies = self._of_job(job, ask)
        return [(reply.node, list(reply.facts)) for reply in replies]

    def config(self, key: str = "", value: str | None = None, **change: Unpack[Change]) -> list[Setting]:
        """Sets the setting ``key`` to ``value`` if a value is given, and returns that setting; without a key, returns
        all settings.

        Raises NotFound if no node has the job, the process or the key, and UsageError for a wrong value. Unless
        ``change`` has ``yes``, raises UsageError for a value that would delete rows, before any node changes anything.
        """
        name, length = change.pop("node", None), change.pop("seconds", 0.0)

        def ask(job: str) -> list[pb.ConfigReply]:
            request = pb.ConfigRequest(
                key=key,
                value=value,
                job=job or None,
                pid=change.get("pid"),
                for_ms=round(length * 1000),
                persist=change.get("persist"),
                reset=reset,
                yes=yes,
            )
            return self.some(lambda node, left: configured(node, request, left))

        async def configured(node: Node, request: pb.ConfigRequest, left: float) -> pb.ConfigReply:
            if name is not None and (await node.status(left)).node != name:
                raise NotFound(f"there is no node {name}")
            return await node.config(request, left)

        yes, reset = change.get("yes"), change.get("reset")
        if key.startswith("store.") and not yes and (value is not None or reset):
            proposal = pb.ConfigRequest(key=key, propose_value=value, propose_reset=reset)
            require_no_deletion(key, value, self.some(lambda node, left: configured(node, proposal, left)))
        replies = self._of_job(change.get("job") or "", ask)
        return [setting_of(reply.node, s) for reply in replies for s in reply.settings]

    def status(self) -> list[tuple[str, pb.StatusReply]]:
        """Returns the address and the status of each node that answers."""

        async def ask(node: Node, seconds: float) -> tuple[str, pb.StatusReply]:
            reply = await node.status(seconds)
            return reply.node, reply

        return [(a.address, a.value) for a in self.each(ask).answered]

    def pause(self, paused: bool) -> list[tuple[str, bool]]:
        """Stops or resumes all probes. Returns, for each address, whether its node is paused now."""

        async def ask(node: Node, seconds: float) -> tuple[str, bool]:
            return node.address, (await node.pause(paused, seconds)).paused

        return [(a.address, a.value) for a in self.each(ask).answered]

    def _of_job(self, job: str, ask: Callable[[str], _T]) -> _T:
        """Returns ``ask(job)``. If no node has a job of that name, finds the job by the end of its name, its run or a
        pid, and asks again.
        """
        try:
            return ask(job)
        except NotFound:
            if not job:
                raise
            whole = job_named(self, job)
            try:
                if whole != job:
                    return ask(whole)
            except NotFound:
                pass
            if (ended := has_ended(self, whole)) is not None:
                raise ended from None
            raise


def processes_sql(where: str = "") -> str:
    """Returns the SELECT for ``Cluster.processes``."""
    condition = f"WHERE {where} " if where else ""
    order = "job, run, role = 'trainer' DESC, rank, node, pid"
    return f"SELECT * FROM process.processes {condition}ORDER BY {order}"
