"""Queries one node, or many nodes as if they were one."""

from __future__ import annotations

import re
import time
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from probing.client.nodes import Nodes
from probing.client.wire.loop import Work, begin, wait
from probing.client.wire.stream import Room, Stream, batches
from probing.federation.execution.answer import (
    Answer,
    Answered,
    Gathered,
    Reply,
    Rows,
    Take,
    held_back,
    other_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.api.tables.schema import View
    from probing.federation.planning.split import Plan

__all__ = ("Queries",)

# Tables that only nodes know, not this client: tables of users' probes, and tables that jobs fill.
_USER_TABLE = re.compile(r'\b(user|python)"?\s*\.\s*"?(\w*)', re.IGNORECASE)
_USER_COLUMNS = """
SELECT table_schema || '.' || table_name, column_name, type FROM probing.column_docs
WHERE table_schema IN ('user', 'python')
"""
_VIEWS = "SELECT name, sql, doc, problem FROM probing.views"


class Queries(Nodes):
    """Answers SQL over the tables of the nodes."""

    def query(self, sql: str, params: Mapping[str, Any] | None = None) -> pa.Table:
        """Returns the rows of one SELECT, over the tables of the target or over the union of all nodes' tables.

        ``params``: the value of each ``$name`` in ``sql``, of a type that federation.sql.parameters.bind lists.
        """
        return self.answer(sql, params).table

    def stream(self, sql: str, params: Mapping[str, Any] | None = None) -> Rows:
        """Does the same as ``query``, but returns an iterator of record batches; close it, or use it in ``with``.

        Under ``strict`` the first batch comes when all nodes have answered with all of their rows.

        Rows of many nodes are streamed if they need not be merged. A merged answer (ORDER BY, DISTINCT, LIMIT,
        aggregates, joins) is held in memory; its maximum size is ``max_bytes``.
        """
        rows = self._stream(_bound(sql, params))
        return held_back(rows) if self.strict else rows

    def _stream(self, text: str) -> Rows:
        asked = self.asked(text)
        if not asked:
            return self._stream_one(text)
        from probing.federation.execution.streams import concatenates, pour

        split = self.plan(text)
        if not concatenates(split):
            return _held(self._merged(split, asked))
        return pour(
            split,
            asked,
            self._open,
            lambda work: Work(work).cancel,
            timeout=self.timeout,
            strict=self.strict,
            watch=self.outcomes.append,
        )

    def _stream_one(self, sql: str) -> Rows:
        stream = wait(self._open(self.target, sql, self.timeout))
        warnings: list[str] = []

        def rows() -> Generator[pa.RecordBatch, None, None]:
            try:
                yield from batches(stream)
            finally:
                stream.close()
            gathered: Gathered[int] = Gathered((self.target,))
            gathered.answered.append(Answered(self.target, stream.node, stream.rows))
            self.outcomes.append(gathered)
            warnings.extend(f"{stream.node}: {warning}" for warning in dict.fromkeys(stream.warnings))

        try:
            schema = begin(stream.schema())
            # pyarrow is imported while the node works on the query, so the import takes no extra time.
            import pyarrow  # noqa: F401

            return Rows(schema.result(), rows(), warnings, stream.close)
        except BaseException:
            stream.close()
            raise

    async def _open(self, address: str, sql: str, seconds: float) -> Stream:
        return await self.node(address).stream(sql, seconds, watch=self.watching(address), strict=self.strict)

    def query_each(self, sql: str, columns: Sequence[str] = ()) -> list[pa.Table]:
        """Returns the rows of one SELECT for each node by itself, unmerged.

        ``columns``: new names of the columns. A node that answers with another number of columns counts as failed.
        """
        if not self.many:
            return [_named(self.query(sql), columns)]

        def take(reply: Reply) -> Reply:
            if reply.lacks is not None:
                raise reply.lacks
            return replace(reply, table=_named(reply.table, columns))

        gathered = self._gather(self.addresses(), {"": sql}, self.timeout, take)
        self.outcomes.append(gathered)
        gathered.require(strict=self.strict)
        return [answered.value[0].table for answered in gathered.answered]

    def query_all(self, statements: Mapping[str, str], *, each: Container[str] = ()) -> dict[str, pa.Table]:
        """Returns the rows of each of ``statements`` (SQL by name). Each node gets one request and answers it from one
        snapshot.

        Many nodes answer over the union of their tables, as in ``query``; the statements named in ``each`` are answered
        by each node alone, as in ``query_each``, and their rows are concatenated. No statement may name ``global.``
        tables.
        """
        return {name: answer.table for name, answer in self.answer_all(statements, each=each).items()}

    def answer_all(self, statements: Mapping[str, str], *, each: Container[str] = ()) -> dict[str, Answer]:
        """Does the same as ``query_all``, and also returns the outcome of each node."""
        if self.many:
            return self._merged_all(statements, each)
        replies = self._node(self.target, statements)
        gathered: Gathered[tuple[Reply, ...]] = Gathered((self.target,))
        gathered.answered.append(Answered(self.target, replies[0].node, tuple(replies)))
        self.outcomes.append(gathered)
        return {name: Answer(reply.table, gathered) for name, reply in zip(statements, replies, strict=True)}

    def _merged_all(self, statements: Mapping[str, str], each: Container[str]) -> dict[str, Answer]:
        from probing.federation.execution.merge import run_all
        from probing.federation.planning.split import each_node

        now_ns = time.time_ns()
        plans = {
            name: each_node(sql, now_ns) if name in each else self.plan(sql, now_ns) for name, sql in statements.items()
        }
        return run_all(
            plans,
            self.addresses(),
            self._gather,
            timeout=self.timeout,
            max_bytes=self.max_bytes,
            strict=self.strict,
            watch=self.outcomes.append,
        )

    def _gather(
        self, addresses: Sequence[str], statements: Mapping[str, str], timeout: float, take: Take
    ) -> Gathered[tuple[Reply, ...]]:
        # pyarrow is imported before the event loop needs it, because the loop must not wait for an import.
        import pyarrow  # noqa: F401

        from probing.client.wire.many import Question

        question = Question(
            self._wire,
            statements,
            take,
            max_bytes=self.max_bytes,
            strict=self.strict,
            watch=self.watch,
            policy=self.policy,
            done=self.done,
            may_lack=any(map(_names_user_tables, statements.values())),
        )
        gathered = self.keep_names(wait(question.ask(addresses, timeout)))
        now_ns = time.monotonic_ns()
        gathered.answered = [
            replace(a, clock=self.clocks.add(a.node, a.value[0].clock, now_ns)) for a in gathered.answered
        ]
        return gathered

    def _node(self, address: str, statements: Mapping[str, str]) -> list[Reply]:
        """Returns the replies of one node."""
        replies = begin(
            self.node(address).replies(
                statements, self.timeout, Room(self.max_bytes), watch=self.watching(address), strict=self.strict
            )
        )
        # pyarrow is imported while the node works on the query, so the import takes no extra time.
        import pyarrow  # noqa: F401

        return replies.result()

    def answer(self, sql: str, params: Mapping[str, Any] | None = None) -> Answer:
        """Does the same as ``query``, and also returns the outcome of each node."""
        text = _bound(sql, params)
        if asked := self.asked(text):
            return self._merged(self.plan(text), asked)
        (reply,) = self._node(self.target, {"": text})
        gathered: Gathered[tuple[Reply, ...]] = Gathered((self.target,))
        clock = self.clocks.add(reply.node, reply.clock, time.monotonic_ns())
        gathered.answered.append(Answered(self.target, reply.node, (reply,), clock))
        self.outcomes.append(gathered)
        return Answer(reply.table, gathered)

    def _merged(self, split: Plan, asked: tuple[str, ...]) -> Answer:
        from probing.federation.execution.merge import run_all

        return run_all(
            {"": split},
            asked,
            self._gather,
            timeout=self.timeout,
            max_bytes=self.max_bytes,
            strict=self.strict,
            watch=self.outcomes.append,
        )[""]

    def plan(self, sql: str, now_ns: int | None = None) -> Plan:
        """Returns the plan that splits the query ``sql`` among many nodes. ``now_ns`` (UTC ns) is the value of now().

        Raises QueryRejected, NotFound, QueryError.
        """
        from probing.api.tables.views import VIEWS
        from probing.federation.planning.split import plan
        from probing.federation.sql.names import names_user_views

        now = time.time_ns() if now_ns is None else now_ns
        views = {**VIEWS, **self._views()} if names_user_views(sql) else VIEWS
        if not any(map(_names_user_tables, (sql, *(view.sql for view in views.values())))):
            return plan(sql, now, views=views)
        from probing.federation.planning.catalog import Catalog, api_schemas

        schemas, uneven = self._user_schemas()
        catalog = Catalog({**api_schemas(), **schemas}, uneven)
        try:
            return plan(sql, now, catalog, views)
        finally:
            catalog.close()

    def _views(self) -> dict[str, View]:
        """Returns the views of users at the target; their definitions are used for all nodes."""
        from probing.federation.sql.views import views_from

        (reply,) = self._node(self.target, {"": _VIEWS})
        return views_from(reply.table.to_pylist())

    def _user_schemas(self) -> tuple[dict[str, pa.Schema], dict[str, set[str]]]:
        """Returns, for each table of a user's probe or of a job, the union of the nodes' columns, and the columns that
        differ between the nodes that have the table.

        A column gets the widest of its types on the nodes, because each node reports the type of the values that its
        own jobs wrote.
        """
        from pyarrow import schema

        from probing.api.tables import TABLES
        from probing.api.tables.views import VIEWS

        columns: dict[str, dict[str, pa.DataType]] = {}
        # The columns of each table on each node that has it.
        known: dict[str, list[dict[str, pa.DataType]]] = {}
        for table in self.query_each(_USER_COLUMNS, ("table", "column", "type")):
            here: dict[str, dict[str, pa.DataType]] = {}
            for name, column, kind in zip(*(values.to_pylist() for values in table.columns), strict=True):
                found = _type_of(name, column, kind)
                if found is not None and name not in TABLES and name not in VIEWS:
                    own = columns.setdefault(name, {})
                    own[column] = _wider(own.get(column, found), found)
                    here.setdefault(name, {})[column] = found
            for name, of_node in here.items():
                known.setdefault(name, []).append(of_node)
        uneven = {
            name: {column for column, kind in own.items() if any(node.get(column) != kind for node in known[name])}
            for name, own in columns.items()
        }
        return {name: schema(list(own.items())) for name, own in columns.items()}, uneven


def _type_of(table: str | None, column: str | None, kind: Any) -> pa.DataType | None:
    """Returns the type of a column of a user's probe or of a job. Returns None if a node's answer does not describe
    such a column.
    """
    import pyarrow as pa

    from probing.api.tables.user import USER_NAME

    name = str(table).partition(".")[2]
    if kind is None or not USER_NAME.fullmatch(name) or not USER_NAME.fullmatch(str(column)):
        return None
    try:
        found: pa.DataType = pa.type_for_alias(kind)
    except ValueError:
        return None
    return found


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if one == other:
        return one
    try:
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        widest: pa.DataType = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        return widest
    except pa.ArrowException:
        return pa.string()


def _named(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Returns ``table`` with its columns renamed to ``columns``; unchanged if ``columns`` is empty. Raises PeerError if
    the number of columns differs.
    """
    if not columns:
        return table
    if table.num_columns != len(columns):
        raise other_columns(table.num_columns, len(columns))
    return table.rename_columns(list(columns))


def _names_user_tables(sql: str) -> bool:
    from probing.api.tables import TABLES
    from probing.api.tables.views import VIEWS

    names = (f"{schema}.{name}".lower() for schema, name in _USER_TABLE.findall(sql))
    return any(name not in TABLES and name not in VIEWS for name in names)


def _bound(sql: str, params: Mapping[str, Any] | None) -> str:
    if not params and "$" not in sql:
        return sql
    from probing.federation.sql.parameters import bind

    return bind(sql, params or {})


def _held(answer: Answer) -> Rows:
    def batches() -> Generator[pa.RecordBatch, None, None]:
        yield from answer.table.to_batches()

    return Rows(answer.table.schema, batches(), answer.warnings)
