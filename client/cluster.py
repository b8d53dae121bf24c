"""The Python client: asks one node, or many as if they were one.

::

    with Cluster("unix:/run/probingd/probingd.sock", all_nodes=True) as cluster:
        table = cluster.query("SELECT node, count(*) FROM comm.ops GROUP BY node")
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from probing.api.errors import NotFound
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_STATEMENTS
from probing.client.messages import (
    Change,
    Failure,
    Setting,
    Thread,
    Value,
    failure_of,
    setting_of,
    thread_of,
    value_of,
)
from probing.client.settings import DEFAULT_TARGET
from probing.client.wire.connection import Connection
from probing.federation.execution.answer import Answer, Reply, Rows
from probing.federation.execution.fanout import Answered, Gathered, fan_out

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack

    from probing.api.tables.schema import View
    from probing.client.wire.stream import Stream
    from probing.federation.planning.split import Plan

__all__ = ("Cluster", "Stacks", "Variables")

T = TypeVar("T")
_R = TypeVar("_R", pb.StacksReply, pb.VarsReply, pb.ConfigReply)
_USER_TABLE = re.compile(r'\buser"?\s*\.', re.IGNORECASE)
_USER_COLUMNS = "SELECT table_name, column_name, type FROM probing.column_docs WHERE table_schema = 'user'"
_VIEWS = "SELECT name, sql, doc, problem FROM probing.views"


@dataclass(frozen=True, slots=True)
class Stacks:
    """Threads of the processes that could be read, and the processes that could not."""

    threads: list[Thread]
    failures: list[Failure]


@dataclass(frozen=True, slots=True)
class Variables:
    """Values of the variables that were found, and the processes that could not be read."""

    values: list[Value]
    failures: list[Failure]


class Cluster:
    """Asks ``target``, or ``nodes``, or with ``all_nodes`` the peers that ``target`` knows. ``timeout`` in seconds.

    With ``strict`` PartialAnswer is raised where a node fails or lacks rows; else ``outcomes`` records which failed.
    ``max_bytes`` (Arrow) bounds an answer in memory, not one that is streamed. ``watch`` is called with the address of
    a node and the progress of its query. Safe to use from several threads.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        nodes: Sequence[str] = (),
        all_nodes: bool = False,
        strict: bool = False,
        token: str = "",
        timeout: float = 30.0,
        max_bytes: int = 256 << 20,
    ) -> None:
        self.target = target
        self.timeout = timeout
        self.strict = strict
        self.max_bytes = max_bytes
        self.outcomes: list[Gathered[Any]] = []
        self.watch: Callable[[str, pb.QueryProgress], None] | None = None
        self._nodes = tuple(nodes)
        self._all_nodes = all_nodes
        self._token = token
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    @property
    def many(self) -> bool:
        """Whether questions go to more nodes than the target."""
        return bool(self._nodes) or self._all_nodes

    def connection(self, address: str) -> Connection:
        with self._lock:
            if address not in self._connections:
                self._connections[address] = Connection(address, token=self._token)
            return self._connections[address]

    def addresses(self) -> tuple[str, ...]:
        """Returns the addresses that are asked. Raises PeerError where the target does not answer for its peers."""
        if not self.many:
            return (self.target,)
        if not self._nodes:
            self._nodes = self._peers()
        return self._nodes

    def asked(self, sql: str) -> tuple[str, ...]:
        """Returns the addresses that ``sql`` is merged from, all where it has ``global.`` tables; none: the target."""
        from probing.federation.sql.names import wants_all_nodes

        if self.many:
            return self.addresses()
        return self._peers() if wants_all_nodes(sql) else ()

    def _peers(self) -> tuple[str, ...]:
        target = self.connection(self.target)
        own = target.status(self.timeout).node
        peers = target.peers(self.timeout).peers
        others = [peer.address for peer in peers if peer.address and peer.node != own]
        return tuple(dict.fromkeys([self.target, *others]))

    def cancel(self) -> None:
        """Ends the queries in flight, here and at the nodes."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.cancel()

    def query(self, sql: str, params: Mapping[str, Any] | None = None) -> pa.Table:
        """Returns the rows of one SELECT: of the target, or over the union of all nodes' tables.

        ``params`` are the values of ``$name`` in it, of the types that federation.parameters.bind lists.
        """
        return self.answer(sql, params).table

    def stream(self, sql: str, params: Mapping[str, Any] | None = None) -> Rows:
        """As ``query``, but returns an iterator of record batches: close it, or use it in ``with``.

        Rows of many nodes are streamed where they need not be merged; a merged answer (ORDER BY, DISTINCT, LIMIT,
        aggregates, joins) is held in memory, and bounded by ``max_bytes``.
        """
        text = _bound(sql, params)
        asked = self.asked(text)
        if not asked:
            return self._stream_one(text)
        from probing.federation.execution.streams import concatenates, pour

        split = self.plan(text)
        if not concatenates(split):
            return _held(self._merged(split, asked))
        return pour(
            split, asked, self._open, timeout=self.timeout, strict=self.strict, watch=self.outcomes.append
        )

    def _stream_one(self, sql: str) -> Rows:
        stream = self._open(self.target, sql, self.timeout)
        warnings: list[str] = []

        def batches() -> Generator[pa.RecordBatch, None, None]:
            with stream:
                yield from stream
            gathered: Gathered[int] = Gathered((self.target,))
            gathered.answered.append(Answered(self.target, stream.node, stream.rows))
            self.outcomes.append(gathered)
            warnings.extend(f"{stream.node}: {warning}" for warning in dict.fromkeys(stream.warnings))

        try:
            return Rows(stream.schema, batches(), warnings, stream.close)
        except BaseException:
            stream.close()
            raise

    def _open(self, address: str, sql: str, seconds: float) -> Stream:
        return self.connection(address).stream(sql, seconds, watch=self._watching(address), strict=self.strict)

    def _watching(self, address: str) -> Callable[[pb.QueryProgress], None] | None:
        watch = self.watch
        return None if watch is None else lambda progress: watch(address, progress)

    def query_each(self, sql: str) -> list[pa.Table]:
        """Returns the rows of one SELECT for each node by itself, unmerged."""
        if not self.many:
            return [self.query(sql)]

        def ask(connection: Connection, seconds: float) -> tuple[str, pa.Table]:
            reply = connection.query(sql, seconds, self.max_bytes, strict=self.strict)
            return reply.node, reply.table

        return [answered.value for answered in self.each(ask).answered]

    def query_all(self, statements: Mapping[str, str], *, each: Container[str] = ()) -> dict[str, pa.Table]:
        """Returns the rows of each of ``statements`` (SQL by name), by one request to each node over one snapshot.

        Many nodes answer over the union of their tables, as in ``query``; the statements named in ``each`` are answered
        by each node alone, as in ``query_each``, and their rows are concatenated. No statement may name ``global.``
        tables.
        """
        if self.many:
            return self._merged_all(statements, each)
        replies = self._node_all(self.target, statements, self.timeout)
        gathered: Gathered[tuple[Reply, ...]] = Gathered((self.target,))
        gathered.answered.append(Answered(self.target, replies[0].node, tuple(replies)))
        self.outcomes.append(gathered)
        return {name: reply.table for name, reply in zip(statements, replies, strict=True)}

    def _merged_all(self, statements: Mapping[str, str], each: Container[str]) -> dict[str, pa.Table]:
        from probing.federation.execution.merge import run_all
        from probing.federation.planning.split import each_node

        now_ns = time.time_ns()
        plans = {
            name: each_node(sql, now_ns) if name in each else self.plan(sql, now_ns)
            for name, sql in statements.items()
        }  # fmt: skip
        answers = run_all(
            plans, self.addresses(), self._node_all, timeout=self.timeout, max_bytes=self.max_bytes,
            strict=self.strict, watch=self.outcomes.append,
        )  # fmt: skip
        return {name: answer.table for name, answer in answers.items()}

    def _node_all(self, address: str, statements: Mapping[str, str], seconds: float) -> list[Reply]:
        """Asks one node; more than MAX_STATEMENTS statements take several requests."""
        names = list(statements)
        if len(names) == 1:
            return [self._node(address, statements[names[0]], seconds)]
        deadline = time.monotonic() + seconds
        replies: list[Reply] = []
        for first in range(0, len(names), MAX_STATEMENTS):
            asked = {name: statements[name] for name in names[first : first + MAX_STATEMENTS]}
            left = max(deadline - time.monotonic(), 0.001)
            replies += self.connection(address).query_all(
                asked, left, self.max_bytes, self._watching(address), strict=self.strict
            )
        return replies

    def answer(self, sql: str, params: Mapping[str, Any] | None = None) -> Answer:
        """As ``query``, with the outcome of each node."""
        text = _bound(sql, params)
        if asked := self.asked(text):
            return self._merged(self.plan(text), asked)
        reply = self._node(self.target, text, self.timeout)
        gathered: Gathered[tuple[Reply, ...]] = Gathered((self.target,))
        gathered.answered.append(Answered(self.target, reply.node, (reply,)))
        self.outcomes.append(gathered)
        return Answer(reply.table, gathered)

    def _merged(self, split: Plan, asked: tuple[str, ...]) -> Answer:
        from probing.federation.execution.merge import run_all

        return run_all(
            {"": split}, asked, self._node_all, timeout=self.timeout, max_bytes=self.max_bytes,
            strict=self.strict, watch=self.outcomes.append,
        )[""]  # fmt: skip

    def plan(self, sql: str, now_ns: int | None = None) -> Plan:
        """Returns how a query of many nodes is split; ``now_ns`` (UTC ns) replaces the present time in it.

        Raises QueryRejected, NotFound, QueryError.
        """
        from probing.api.tables.views import VIEWS
        from probing.federation.planning.split import plan
        from probing.federation.sql.names import names_user_views

        now = time.time_ns() if now_ns is None else now_ns
        views = {**VIEWS, **self._views()} if names_user_views(sql) else VIEWS
        if not any(_USER_TABLE.search(text) for text in (sql, *(view.sql for view in views.values()))):
            return plan(sql, now, views=views)
        # Only the nodes know the tables of users' probes.
        from probing.federation.planning.catalog import Catalog, api_schemas

        catalog = Catalog({**api_schemas(), **self._user_schemas()})
        try:
            return plan(sql, now, catalog, views)
        finally:
            catalog.close()

    def _views(self) -> dict[str, View]:
        """Returns the target's views of users; all nodes are asked by their definitions."""
        from probing.federation.sql.views import views_from

        return views_from(self._node(self.target, _VIEWS, self.timeout).table.to_pylist())

    def _user_schemas(self) -> dict[str, pa.Schema]:
        """Returns the union of the nodes' columns for each table of a user's probe."""
        from pyarrow import schema, type_for_alias

        columns: dict[str, dict[str, pa.DataType]] = {}
        for table in self.query_each(_USER_COLUMNS):
            for name, column, kind in zip(*(found.to_pylist() for found in table.columns), strict=True):
                columns.setdefault(f"user.{name}", {}).setdefault(column, type_for_alias(kind))
        return {name: schema(list(own.items())) for name, own in columns.items()}

    def _node(self, address: str, sql: str, seconds: float) -> Reply:
        return self.connection(address).query(
            sql, seconds, self.max_bytes, self._watching(address), strict=self.strict
        )

    def each(self, ask: Callable[[Connection, float], tuple[str, T]]) -> Gathered[T]:
        """Calls ``ask(connection, seconds)``, which returns a node's name and answer, for every node at once."""
        gathered = fan_out(self.addresses(), lambda a, seconds: ask(self.connection(a), seconds), self.timeout)
        self.outcomes.append(gathered)
        gathered.require(strict=self.strict)
        return gathered

    def ps(self) -> pa.Table:
        """Returns the training processes, with the columns of process.processes."""
        return self.processes().table

    def processes(self, where: str = "") -> Answer:
        """Returns the rows of process.processes that meet the SQL condition ``where``, all if it is empty."""
        condition = f"WHERE {where} " if where else ""
        order = "job, run, role = 'trainer' DESC, rank, node, pid"
        return self.answer(f"SELECT * FROM process.processes {condition}ORDER BY {order}")

    def stacks(
        self, pids: Sequence[int] = (), job: str = "", *, native: bool = False, local_variables: bool = False
    ) -> Stacks:
        """Returns the stacks of all threads of the processes. Raises NotFound where no node has one of them."""
        # A request for each node: its call writes a deadline into it.
        replies = self._some(
            lambda connection, seconds: connection.stacks(
                pb.StacksRequest(pids=pids, job=job, native=native, locals=local_variables), seconds
            )
        )
        return Stacks(
            [
                thread_of(reply.node, thread, native=native, local_variables=local_variables)
                for reply in replies
                for thread in reply.threads
            ],
            [failure_of(reply.node, failed) for reply in replies for failed in reply.failures],
        )

    def variables(self, names: Sequence[str], pids: Sequence[int] = (), job: str = "") -> Variables:
        """Returns values of the dotted ``names`` in the processes. Raises NotFound where no node has one of them."""
        replies = self._some(
            lambda connection, seconds: connection.variables(
                pb.VarsRequest(pids=pids, job=job, names=names), seconds
            )
        )
        return Variables(
            [value_of(reply.node, value) for reply in replies for value in reply.values],
            [failure_of(reply.node, failed) for reply in replies for failed in reply.failures],
        )

    def config(self, key: str = "", value: str | None = None, **change: Unpack[Change]) -> list[Setting]:
        """Returns the settings, all or that of ``key``, which is first set to ``value`` if given.

        Raises NotFound where no node has the job, the process or the key, UsageError for a wrong value.
        """
        node, length = change.pop("node", None), change.pop("seconds", 0.0)
        request = pb.ConfigRequest(
            key=key, value=value, job=change.get("job"), pid=change.get("pid"), for_ms=round(length * 1000),
            persist=change.get("persist"), reset=change.get("reset"),
        )  # fmt: skip

        def ask(connection: Connection, left: float) -> pb.ConfigReply:
            if node is not None and connection.status(left).node != node:
                raise NotFound(f"there is no node {node}")
            return connection.config(request, left)

        return [setting_of(reply.node, s) for reply in self._some(ask) for s in reply.settings]

    def _some(self, ask: Callable[[Connection, float], _R]) -> list[_R]:
        """Returns the replies of the nodes that do not raise NotFound. Raises it where all do."""
        missing: list[NotFound] = []

        def attempt(connection: Connection, seconds: float) -> tuple[str, _R | None]:
            try:
                reply = ask(connection, seconds)
            except NotFound as e:
                # Another node may have it.
                missing.append(e)
                return connection.address, None
            return reply.node, reply

        replies = [a.value for a in self.each(attempt).answered if a.value is not None]
        if not replies and missing:
            raise missing[0]
        return replies

    def status(self) -> list[tuple[str, pb.StatusReply]]:
        """Returns address and status of every node that answers."""
        gathered = self.each(lambda connection, seconds: _named(connection.status(seconds)))
        return [(a.address, a.value) for a in gathered.answered]

    def pause(self, paused: bool) -> list[tuple[str, bool]]:
        """Stops or resumes all probes; returns each address and whether its node is paused now."""

        def ask(connection: Connection, seconds: float) -> tuple[str, bool]:
            return connection.address, connection.pause(paused, seconds).paused

        return [(a.address, a.value) for a in self.each(ask).answered]


def _named(reply: pb.StatusReply) -> tuple[str, pb.StatusReply]:
    return reply.node, reply


def _bound(sql: str, params: Mapping[str, Any] | None) -> str:
    if not params and "$" not in sql:
        return sql
    from probing.federation.sql.parameters import bind

    return bind(sql, params or {})


def _held(answer: Answer) -> Rows:
    def batches() -> Generator[pa.RecordBatch, None, None]:
        yield from answer.table.to_batches()

    return Rows(answer.table.schema, batches(), answer.warnings)
