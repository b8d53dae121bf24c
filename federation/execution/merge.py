"""Sends the parts of one or several plans to many nodes, and merges the answers into a table for each plan."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import duckdb
import pyarrow as pa

from probing.api.errors import TOO_LARGE, EngineDiffers, PeerError, QueryMemory, QueryTimeout
from probing.api.text import size, sql_table
from probing.federation.execution.answer import (
    SAME_VERSION,
    Answer,
    Answered,
    Failed,
    Gather,
    Gathered,
    Reply,
    other_columns,
)
from probing.federation.planning.catalog import create_table, open_database
from probing.federation.planning.split import Part, Plan
from probing.federation.sql.errors import from_duckdb

__all__ = ("create_part", "run_all")

# Answers of fewer bytes than this are copied into one chunk, see ``_load``.
_SMALL = 32 << 20
# The factor by which answers may grow when they are cast to the required types.
_GROWN = 2
# The maximum number of rows of a batch. Answers are cast, and the bytes of the last step's rows are counted, one batch
# at a time.
_BATCH_ROWS = 50_000
# The maximum that DuckDB may spill to disk, as a multiple of its memory limit.
_SPILLED = 8


def run_all(
    plans: Mapping[str, Plan],
    addresses: Sequence[str],
    gather: Gather,
    *,
    timeout: float = 30.0,
    max_bytes: int = 256 << 20,
    strict: bool = False,
    watch: Callable[[Gathered[tuple[Reply, ...]]], None] = lambda _: None,
) -> dict[str, Answer]:
    """Sends the parts of ``plans`` to every address by one ``gather``. Returns the combined rows of each plan.

    ``max_bytes`` limits all answers together (Arrow, in memory); beyond it QueryMemory is raised. A node that fails one
    part fails as a whole. If a node refuses states because its engine has another version, all nodes get the classic
    plans.
    Raises PartialAnswer under ``strict`` if not every node answered, and the nodes' own error if no node answered.
    ``watch`` gets the outcome even if one of these errors is raised.
    """
    began = time.monotonic()
    budget = _Budget(max_bytes)
    statements = {_part_name(name, plan, part): part.sql for name, plan in plans.items() for part in plan.parts}
    gathered = gather(addresses if statements else (), statements, timeout, budget.take)
    refused = any(isinstance(failed.error, EngineDiffers) for failed in gathered.failed)
    if refused and any(plan.classic for plan in plans.values()):
        left = max(timeout - (time.monotonic() - began), 0.001)
        classic = {name: plan.classic or plan for name, plan in plans.items()}
        return run_all(classic, addresses, gather, timeout=left, max_bytes=max_bytes, strict=strict, watch=watch)
    _fail_lacking(gathered, [part for plan in plans.values() for part in plan.parts])
    watch(gathered)
    # A single node's answer may be too large; then the query fails, too.
    if any(failed.error.code == TOO_LARGE for failed in gathered.failed):
        raise _too_large(max_bytes)
    gathered.require(strict=strict)
    memory = max(256, 2 * (max_bytes >> 20))
    with (
        tempfile.TemporaryDirectory(prefix="probing-merge-") as spill,
        open_database(memory_limit=f"{memory}MiB", spill=spill, spill_limit=f"{_SPILLED * memory}MiB") as db,
    ):
        schemas = [_part_schema(db, part) for plan in plans.values() for part in plan.parts]
        try:
            fitted = _fitted_all(gathered, schemas, _Budget(_GROWN * max_bytes))
        except QueryMemory:
            raise _too_large(max_bytes) from None
        gathered.require(strict=strict)
        answers: dict[str, Answer] = {}
        for name, plan in plans.items():
            number = len(plan.parts)
            _load(db, plan, [tables[:number] for tables in fitted])
            answers[name] = Answer(_final(db, plan, timeout, memory << 20), gathered)
            _drop(db, plan.parts)
            fitted = [tables[number:] for tables in fitted]
    return answers


def _fail_lacking(gathered: Gathered[tuple[Reply, ...]], parts: Sequence[Part]) -> None:
    """Counts each node that lacks a table as failed. Exception: the node is kept, without rows, if another node has the
    table, and the part has no rows without that table (``Part.source``).
    """
    had = {
        part.source for a in gathered.answered for part, reply in zip(parts, a.value, strict=True) if not reply.lacks
    }
    kept: list[Answered[tuple[Reply, ...]]] = []
    for answered in gathered.answered:
        errors = [
            reply.lacks
            for part, reply in zip(parts, answered.value, strict=True)
            if reply.lacks is not None and (not part.source or part.source not in had)
        ]
        if errors:
            gathered.failed.append(Failed(answered.address, answered.node, errors[0]))
        else:
            kept.append(answered)
    gathered.answered = kept


def _part_name(name: str, plan: Plan, part: Part) -> str:
    return name if len(plan.parts) == 1 else f"{name} {part.table}".strip()


class _Budget:
    """A limit on the total number of bytes of all nodes' answers."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._lock = threading.Lock()

    def take(self, reply: Reply) -> Reply:
        self.hold(reply.table.nbytes)
        return reply

    def hold(self, number: int) -> None:
        """Counts ``number`` bytes. Raises QueryMemory if the total is above the limit."""
        with self._lock:
            self._left -= number
            if self._left < 0:
                raise QueryMemory("the answers are too large together", code=TOO_LARGE)


def _too_large(max_bytes: int) -> QueryMemory:
    return QueryMemory(
        f"the nodes' answers are larger than {size(max_bytes)} together",
        hint="narrow the time range, or aggregate; only rows without ORDER BY, DISTINCT and LIMIT are streamed",
    )


def _part_schema(db: duckdb.DuckDBPyConnection, part: Part) -> pa.Schema:
    schema = create_part(db, part)
    _drop(db, [part])
    return schema


def _drop(db: duckdb.DuckDBPyConnection, parts: Sequence[Part]) -> None:
    for part in parts:
        db.execute(f"DROP TABLE {sql_table(part.table)}")


def _fitted_all(
    gathered: Gathered[tuple[Reply, ...]], schemas: Sequence[pa.Schema], budget: _Budget
) -> list[list[pa.Table]]:
    """Returns the tables of each node in the required types; a node whose answer cannot be cast counts as failed.
    Raises QueryMemory if the tables are larger than ``budget``.
    """
    fitted: list[list[pa.Table]] = []
    kept: list[Answered[tuple[Reply, ...]]] = []
    for answered in gathered.answered:
        tables = _fitted(answered, schemas, budget)
        if isinstance(tables, PeerError):
            gathered.failed.append(Failed(answered.address, answered.node, tables))
        else:
            kept.append(answered)
            fitted.append(tables)
    gathered.answered = kept
    return fitted


def _load(db: duckdb.DuckDBPyConnection, plan: Plan, nodes: Sequence[Sequence[pa.Table]]) -> None:
    """Puts the nodes' tables into a table for each part."""
    for number, part in enumerate(plan.parts):
        create_part(db, part)
        if nodes:
            # One insert for all nodes: a statement costs more than the few rows of an answer.
            answers = pa.concat_tables([tables[number] for tables in nodes])
            # DuckDB reads many small chunks slowly, so a small answer is copied into one chunk.
            db.register("arrow_answers", answers.combine_chunks() if answers.nbytes < _SMALL else answers)
            db.execute(f"INSERT INTO {sql_table(part.table)} SELECT * FROM arrow_answers")
            db.unregister("arrow_answers")


def create_part(db: duckdb.DuckDBPyConnection, part: Part) -> pa.Schema:
    """Creates the part's table. Returns its Arrow schema, with the columns named c0, c1 and so on."""
    create_table(db, part.table, part.columns)
    schema: pa.Schema = db.sql(f"SELECT * FROM {sql_table(part.table)}").to_arrow_table().schema
    return pa.schema([pa.field(f"c{i}", field.type) for i, field in enumerate(schema)])


def _fitted(
    answered: Answered[tuple[Reply, ...]], schemas: Sequence[pa.Schema], budget: _Budget
) -> list[pa.Table] | PeerError:
    """Returns the node's tables in the types of their parts, or the error if they cannot be cast."""
    fitted = []
    for reply, schema in zip(answered.value, schemas, strict=True):
        table = schema.empty_table() if reply.lacks else reply.table
        if table.num_columns != len(schema):
            return other_columns(table.num_columns, len(schema))
        try:
            fitted.append(_cast(table.rename_columns(schema.names), schema, budget))
        except pa.ArrowException:
            return PeerError("its rows do not have the types of this version", hint=SAME_VERSION)
    return fitted


def _cast(table: pa.Table, schema: pa.Schema, budget: _Budget) -> pa.Table:
    """Returns ``table`` in the types of ``schema``.

    A cast can make a small table large: NULLs without a type have no bytes, and a dictionary has equal values only
    once. So rows are cast, and their bytes counted, in batches.
    """
    if table.schema.types == schema.types:
        return table.cast(schema)
    batches = []
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        batches.append(batch.cast(schema))
        budget.hold(batches[-1].nbytes)
    return pa.Table.from_batches(batches, schema)


def _final(db: duckdb.DuckDBPyConnection, plan: Plan, timeout: float, max_bytes: int) -> pa.Table:
    """Returns the rows of the last step of ``plan``. Raises QueryMemory if they have more than ``max_bytes``; DuckDB's
    own memory limit does not count them.
    """
    timer = threading.Timer(timeout, db.interrupt)
    timer.daemon = True
    timer.start()
    try:
        reader = db.sql(plan.final).to_arrow_reader(_BATCH_ROWS)
        batches, held = [], 0
        for batch in reader:
            batches.append(batch)
            held += batch.nbytes
            if held > max_bytes:
                raise QueryMemory(f"the answer is larger than {size(max_bytes)}")
        return pa.Table.from_batches(batches, reader.schema)
    except (duckdb.Error, pa.ArrowException, OSError) as e:
        # An error after the first batch is raised by Arrow: its class differs, but its text is DuckDB's.
        if str(e).startswith("INTERRUPT Error"):
            raise QueryTimeout(f"combining the answers took longer than {timeout:g} s") from None
        if str(e).startswith("Out of Memory Error"):
            raise QueryMemory(
                "combining the answers takes more memory and temporary space than is allowed",
                hint="narrow the time range, join fewer rows, or aggregate before the join",
            ) from None
        raise from_duckdb(e) from None
    finally:
        timer.cancel()
