"""Merges the answers of many nodes into one table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import duckdb
import pyarrow as pa

from probing.api.errors import PeerError, ProbingError, QueryMemory, QueryTimeout
from probing.federation.answer import Answer, Reply
from probing.federation.catalog import create_table, open_database, quoted
from probing.federation.errors import from_duckdb
from probing.federation.fanout import Answered, Failed, Gathered, fan_out
from probing.federation.split import Part, Plan

__all__ = ("SAME_VERSION", "Ask", "create_part", "run")

SAME_VERSION = "run the same version of probingd on all nodes"

Ask = Callable[[str, str, float], Reply]


def run(
    plan: Plan,
    addresses: Sequence[str],
    ask: Ask,
    *,
    timeout: float = 30.0,
    max_bytes: int = 256 << 20,
    strict: bool = False,
    watch: Callable[[Gathered[tuple[Reply, ...]]], None] = lambda _: None,
) -> Answer:
    """Asks every address for its parts of ``plan`` by ``ask(address, sql, seconds)`` and merges the answers.

    Raises QueryMemory where all answers together are larger than ``max_bytes`` (Arrow, in memory), PartialAnswer under
    ``strict`` where a node failed, and the nodes' own error where all did. ``watch`` gets the outcome in any case.
    """
    budget = _Budget(max_bytes)

    def parts(address: str, seconds: float) -> tuple[str, tuple[Reply, ...]]:
        replies = tuple(budget.take(ask(address, part.sql, seconds)) for part in plan.parts)
        return (replies[0].node if replies else address), replies

    gathered = fan_out(addresses if plan.parts else (), parts, timeout)
    watch(gathered)
    if budget.exceeded or any(_too_large(failed.error) for failed in gathered.failed):
        raise QueryMemory(
            f"the nodes' answers are larger than {max_bytes >> 20} MB together",
            hint="narrow the time range, or aggregate; only rows without ORDER BY, DISTINCT and LIMIT are streamed",
        )
    gathered.require(strict=strict)
    with open_database(memory_limit=f"{max(512, 4 * (max_bytes >> 20))}MiB") as db:
        _load(db, plan, gathered)
        gathered.require(strict=strict)
        return Answer(_final(db, plan, timeout), gathered)


def _too_large(error: ProbingError) -> bool:
    """Whether the answer of one node alone exceeds the bound, which fails the query."""
    return isinstance(error, QueryMemory) and error.message.startswith("the answer is larger than ")


class _Budget:
    """Bytes that the answers of all nodes may have together."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._lock = threading.Lock()

    @property
    def exceeded(self) -> bool:
        return self._left < 0

    def take(self, reply: Reply) -> Reply:
        with self._lock:
            self._left -= reply.table.nbytes
        if self.exceeded:
            raise QueryMemory("the answers are too large together")
        return reply


def _load(db: duckdb.DuckDBPyConnection, plan: Plan, gathered: Gathered[tuple[Reply, ...]]) -> None:
    """Loads the answers into one table for each part; a node whose answer has other types has failed."""
    schemas = [create_part(db, part) for part in plan.parts]
    loads: list[list[pa.Table]] = [[] for _ in plan.parts]
    kept: list[Answered[tuple[Reply, ...]]] = []
    for answered in gathered.answered:
        fitted = _fitted(answered, schemas)
        if isinstance(fitted, PeerError):
            gathered.failed.append(Failed(answered.address, answered.node, fitted))
            continue
        kept.append(answered)
        for load, table in zip(loads, fitted, strict=True):
            load.append(table)
    gathered.answered = kept
    for part, load in zip(plan.parts, loads, strict=True):
        if load:
            # One insert for all nodes: a statement costs more than the few rows of an answer.
            db.register("arrow_answers", pa.concat_tables(load))
            db.execute(f"INSERT INTO {quoted(part.table)} SELECT * FROM arrow_answers")
            db.unregister("arrow_answers")


def create_part(db: duckdb.DuckDBPyConnection, part: Part) -> pa.Schema:
    """Creates the part's table and returns its Arrow schema, whose columns are named by number."""
    create_table(db, part.table, part.columns)
    schema: pa.Schema = db.sql(f"SELECT * FROM {quoted(part.table)}").to_arrow_table().schema
    return pa.schema([pa.field(f"c{i}", field.type) for i, field in enumerate(schema)])


def _fitted(answered: Answered[tuple[Reply, ...]], schemas: Sequence[pa.Schema]) -> list[pa.Table] | PeerError:
    """Returns the node's tables in the types of their parts, or why a cast fails."""
    fitted = []
    for reply, schema in zip(answered.value, schemas, strict=True):
        table = reply.table
        if table.num_columns != len(schema):
            return PeerError(f"it answered {table.num_columns} columns for {len(schema)}", hint=SAME_VERSION)
        try:
            fitted.append(table.rename_columns(schema.names).cast(schema))
        except pa.ArrowException:
            return PeerError("its rows do not have the types of this version", hint=SAME_VERSION)
    return fitted


def _final(db: duckdb.DuckDBPyConnection, plan: Plan, timeout: float) -> pa.Table:
    timer = threading.Timer(timeout, db.interrupt)
    timer.daemon = True
    timer.start()
    try:
        table: pa.Table = db.sql(plan.final).to_arrow_table()
        return table
    except duckdb.InterruptException:
        raise QueryTimeout(f"combining the answers took longer than {timeout:g} s") from None
    except duckdb.Error as e:
        raise from_duckdb(e) from None
    finally:
        timer.cancel()
