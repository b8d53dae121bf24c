"""Plans an export: its tables, times and job, and the SQL for a day of a table."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TypedDict

from probing.api.errors import NotFound, UsageError
from probing.api.text import sql_table, sql_text, utc
from probing.client.render.rows import Record, rows_of
from probing.client.times import bound
from probing.federation.execution.answer import Reply

__all__ = ("COLUMNS", "TABLES", "Day", "Found", "Plan", "Wanted", "wanted")

DAY_NS = 86_400_000_000_000
TABLES = "SELECT table_schema, table_name, live FROM probing.table_docs"
COLUMNS = "SELECT table_schema, table_name, column_name FROM probing.column_docs WHERE column_name IN ('ts', 'job')"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}\.[a-z_][a-z0-9_]{0,62}")
# Samples refer by id to stacks, whose table has no column ``job``. A stack is stored once in each hour in which it is
# seen, so an export reads stacks from _STACKS_BEFORE_NS before its begin on.
_STACKS, _SAMPLES = "python.stacks", "python.samples"
_STACKS_BEFORE_NS = 70 * 60 * 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Day:
    """A day of an export: its UTC ``date`` as YYYY-MM-DD, and the SQL for its rows."""

    date: str
    sql: str


@dataclass(frozen=True, slots=True)
class Found:
    """A table of a node. ``live``: the table is live; ``timed``: it has a column ``ts``; ``jobs``: it has a column
    ``job``.
    """

    name: str
    live: bool
    timed: bool
    jobs: bool


class Plan(TypedDict):
    """The request as export.json repeats it; None: no limit."""

    since: str | None
    until: str
    job: str | None
    tables: list[str] | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows to export. ``begin`` (None: the first row) and ``end`` (exclusive) are UTC ns; empty ``tables``: all
    stored tables.
    """

    begin: int | None
    end: int
    tables: tuple[str, ...]
    job: str | None

    def choose(self, tables: Reply, columns: Reply) -> tuple[list[Found], list[str]]:
        """Returns the tables to export, and the names of the tables that are left out, from the answers to TABLES and
        COLUMNS.
        """
        known = self._known(tables, columns)
        if missing := [name for name in self.tables if name not in known]:
            raise NotFound(f"there is no table {missing[0]}", hint="`probingctl tables` lists the tables")
        names = self.tables or tuple(sorted(name for name, table in known.items() if not table.live))
        kept = [known[name] for name in names if self.job is None or known[name].jobs or name == _STACKS]
        return kept, [name for name in names if name not in {table.name for table in kept}]

    @staticmethod
    def _known(tables: Reply, columns: Reply) -> dict[str, Found]:
        has: dict[str, set[str]] = {}
        for row in rows_of(columns.table):
            has.setdefault(_full(row), set()).add(str(row["column_name"]))
        return {
            name: Found(name, row["live"] != "no", "ts" in has.get(name, ()), "job" in has.get(name, ()))
            for row in rows_of(tables.table)
            # Names of tables become names of files, and nodes are not trusted.
            if _NAME.fullmatch(name := _full(row)) is not None
        }

    def span(self, table: Found) -> tuple[int | None, int]:
        """Returns the begin and the end of the rows of ``table``, UTC ns."""
        if table.name == _STACKS and self.begin is not None and (not self.tables or _SAMPLES in self.tables):
            return self.begin - _STACKS_BEFORE_NS, self.end
        return self.begin, self.end

    def days_sql(self, table: Found) -> str:
        """Returns SQL for the days on which ``table`` has rows, as numbers of days since 1970."""
        # A cast to DATE would first round to microseconds, perhaps into the next day.
        day = f"epoch_ns(ts) // {DAY_NS}"
        return f"SELECT DISTINCT {day} AS day FROM {sql_table(table.name)}{self._where(table, *self.span(table))}"

    def days(self, table: Found, answer: Reply | None) -> list[Day]:
        """Returns the days of ``table`` from the answer to ``days_sql``. The answer is None for a table without ``ts``,
        which has one day: today.
        """
        if answer is None:
            sql = f"SELECT * FROM {sql_table(table.name)}{self._where(table, None, None)}"
            return [Day(_date(self.end // DAY_NS), sql)]
        begin, end = self.span(table)
        found = []
        for day in sorted({int(row["day"]) for row in rows_of(answer.table) if row["day"] is not None}):
            first = day * DAY_NS if begin is None else max(day * DAY_NS, begin)
            where = self._where(table, first, min((day + 1) * DAY_NS, end))
            found.append(Day(_date(day), f"SELECT * FROM {sql_table(table.name)}{where}"))
        return found

    def _where(self, table: Found, begin: int | None, end: int | None) -> str:
        parts = [f"ts >= {_time(begin)}"] if begin is not None else []
        parts += [f"ts < {_time(end)}"] if end is not None else []
        parts += [f"job = {sql_text(self.job)}"] if self.job is not None and table.jobs else []
        return f" WHERE {' AND '.join(parts)}" if parts else ""

    def plan(self) -> Plan:
        since = None if self.begin is None else utc(self.begin)
        return {"since": since, "until": utc(self.end), "job": self.job, "tables": list(self.tables) or None}


def _full(row: Record) -> str:
    return f"{row['table_schema']}.{row['table_name']}"


def _time(ns: int) -> str:
    text = utc(ns).replace("T", " ").rstrip("Z")
    return f"CAST('{text}' AS TIMESTAMP_NS)"


def _date(day: int) -> str:
    try:
        return f"{(_EPOCH + timedelta(days=day)):%Y-%m-%d}"
    except OverflowError:
        raise UsageError(
            f"a row has an impossible date: day {day} since 1970", hint="give --since and --until"
        ) from None


def _table_names(text: str | None) -> tuple[str, ...]:
    """Returns the names of tables in a text such as ``A,B,C``."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in (text or "").split(",") if part.strip()))
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{name} is not a valid name of a table", hint="for example --tables comm.ops,python.samples"
            )
    return names


def wanted(
    since: str | None, until: str | None, tables: str | None, job: str | None, now_ns: int | None = None
) -> Wanted:
    """Returns the rows to export according to the options. Raises UsageError for an empty interval, and for an invalid
    name or time.
    """
    now = time.time_ns() if now_ns is None else now_ns
    begin = None if since is None else bound(since, now).ns(now)
    end = now if until is None else bound(until, now).ns(now)
    if begin is not None and end <= begin:
        raise UsageError(f"--until {until or 'now'} is not after --since {since}")
    return Wanted(begin, end, _table_names(tables), job)
