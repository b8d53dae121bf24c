"""The last step of a query over many nodes: one table of all answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import duckdb
import pyarrow as pa

from probing.api.errors import PeerError, QueryMemory, QueryTimeout
from probing.federation.answer import Answer, Reply
from probing.federation.catalog import create_table, open_database, quoted
from probing.federation.errors import from_duckdb
from probing.federation.fanout import Answered, Failed, Gathered, fan_out
from probing.federation.split import Part, Plan

__all__ = ("Ask", "run")


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
    """Asks every address for its parts of ``plan`` by ``ask(address, sql, seconds)`` and combines what comes.

    ``max_bytes`` bounds all answers together (Arrow, in memory); beyond it QueryMemory is raised. PartialAnswer under
    ``strict`` when not every node answered; the nodes' own error when none did. ``watch`` gets the account of who
    answered even when one of these is raised.
    """
    budget = _Budget(max_bytes)

    def parts(address: str, seconds: float) -> tuple[str, tuple[Reply, ...]]:
        replies = tuple(budget.take(ask(address, part.sql, seconds)) for part in plan.parts)
        return (replies[0].node if replies else address), replies

    gathered = fan_out(addresses if plan.parts else (), parts, timeout)
    watch(gathered)
    if budget.exceeded:
        raise QueryMemory(
            f"the nodes' answers are larger than {max_bytes >> 20} MB together",
            hint="narrow the time range, or aggregate; a join or window over all nodes brings its rows here",
        )
    gathered.require(strict=strict)
    with open_database(memory_limit=f"{max(512, 4 * (max_bytes >> 20))}MiB") as db:
        _load(db, plan, gathered)
        gathered.require(strict=strict)
        return Answer(_final(db, plan, timeout), gathered)


class _Budget:
    """Bytes that all nodes share."""

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
    """Puts the answers into one table a part; a node whose answer does not fit is counted as failed."""
    for part in plan.parts:
        create_table(db, part.table, part.columns)
    kept: list[Answered[tuple[Reply, ...]]] = []
    for answered in gathered.answered:
        db.execute("BEGIN")
        try:
            for part, reply in zip(plan.parts, answered.value, strict=True):
                _insert(db, part, reply.table)
        except (duckdb.Error, pa.ArrowException, PeerError) as e:
            db.execute("ROLLBACK")
            why = e.message if isinstance(e, PeerError) else "its rows do not have the types of this version"
            error = PeerError(why, hint="run the same version of probingd on all nodes")
            gathered.failed.append(Failed(answered.address, answered.node, error))
            continue
        db.execute("COMMIT")
        kept.append(answered)
    gathered.answered = kept


def _insert(db: duckdb.DuckDBPyConnection, part: Part, table: pa.Table) -> None:
    if table.num_columns != len(part.columns):
        raise PeerError(f"it answered {table.num_columns} columns for {len(part.columns)}")
    db.register("arrow_answer", table.rename_columns([f"c{i}" for i in range(table.num_columns)]))
    try:
        db.execute(f"INSERT INTO {quoted(part.table)} SELECT * FROM arrow_answer")
    finally:
        db.unregister("arrow_answer")


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
