"""The gate: parses a query, checks it and prints it again. DuckDB gets only the printed text.

Accepts exactly one SELECT (or a UNION, EXCEPT, INTERSECT or WITH of SELECTs) over the tables of ``probing.api.tables``,
made of allowed nodes and functions, with bounded sizes. The gate is the first of two defences: the second is the
worker's process.

A node parses a query four times on purpose, because each parser checks the text that the next parser will run:

1. ``check`` parses the caller's text with sqlglot, checks the tree, expands views and prints it;
2. ``_check_printed`` parses the printed text, which must be allowed and must print as the same text: otherwise DuckDB
   could run another query than the checked tree;
3. the worker's ``extract_statements`` lets DuckDB's parser confirm that the text is one SELECT;
4. ``connection.sql`` parses it once more to run it.

For a query over several nodes the client first parses the text to plan its parts (``federation/planning/split.py``).
"""

from __future__ import annotations

import difflib
import logging
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache

from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.errors import ErrorLevel, SqlglotError

from probing.api.errors import NO_TABLE, QueryRejected
from probing.api.tables import TABLES, Table
from probing.api.tables.schema import View
from probing.api.tables.user import JOB_SCHEMA
from probing.api.tables.user import SCHEMA as USER
from probing.api.tables.views import VIEWS
from probing.daemon.query.answer import Checked
from probing.daemon.query.pruning import needs_of
from probing.federation.sql.allowed import check_node, check_sizes, function_refused
from probing.federation.sql.dialect import evaluates_code, needs_helper
from probing.federation.sql.filters import names_whole_rows
from probing.federation.sql.headings import with_headings
from probing.federation.sql.names import GLOBAL, USER_VIEWS
from probing.federation.sql.reading import statements
from probing.federation.sql.states import has_states, with_states
from probing.federation.sql.times import fix_times
from probing.federation.sql.views import expand, known_columns

__all__ = ("check",)

# Tables whose rows reveal nothing about jobs: callers that are limited to jobs may see all rows.
_OPEN = frozenset(("cluster.members", "probing.column_docs", "probing.table_docs"))
# A LIMIT that no table reaches. DuckDB does not push conditions down below a LIMIT. Otherwise a condition could be
# evaluated on another job's row, and its error could show a value of that row.
_ALL_ROWS = (1 << 62) - 1
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_KEPT_PARTS = ("joins", "laterals", "sample")

MAX_NODES = 10_000
# The maximum number of SELECTs in a query: DuckDB plans queries recursively.
MAX_QUERIES = 200
# Expanding views may make a query at most this many times larger.
MAX_GROWTH = 4
_TABLE_ARGS = frozenset(("this", "db", "alias", "joins", "laterals", "sample"))
_TABLE_FUNCTIONS = (exp.GenerateSeries, exp.Unnest)
_SHOW_TABLES = (
    "list the tables with SELECT * FROM probing.table_docs, columns with SELECT * FROM probing.column_docs; in the"
    " shell with \\d and \\d TABLE"
)
_PIVOT = "for a column of each value write count(*) FILTER (WHERE op = 'barrier') AS barriers, and so on"
_HINTS: dict[type[exp.Expr], str] = {
    exp.Show: _SHOW_TABLES,
    exp.Describe: _SHOW_TABLES,
    exp.Summarize: "write the figures: min(x), max(x), avg(x), quantile_cont(x, 0.9), count(DISTINCT x)",
    exp.Pivot: _PIVOT,
    exp.Set: "`probingctl config KEY=VALUE` changes a setting, and SELECT * FROM probing.settings lists the settings",
}
_ONE_NODE = "global. means the rows of all nodes, but only this node was asked: ask with --all-nodes"

_WORDS = {"describe": _SHOW_TABLES, "show": _SHOW_TABLES, "pivot": _PIVOT, "unpivot": _PIVOT}
# sqlglot logs what the error of a query already says.
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)


def check(
    sql: str,
    now_ns: int,
    users: Callable[[], Mapping[str, Table]] = dict,
    views: Callable[[], Mapping[str, View]] = dict,
    jobs: Collection[str] | None = None,
) -> Checked:
    """Returns ``sql`` checked, with ``now_ns`` (UTC ns) in place of ``now()`` and the like. ``jobs``: the caller may
    see only the rows of these jobs.

    ``users`` returns the tables of users' probes and of jobs, ``views`` the views of the schema ``view``; each is
    called only if the query names such a table or view. Raises QueryRejected, which names the refused part, and the
    errors of ``users`` and ``views``.
    """
    users, views = cache(users), cache(views)
    try:
        root = _parse(sql)
        if not has_states(root):
            root = with_headings(root, sql)
        _check_count(root, 1)
        warnings = _expand(root, users, views)
        for node in _check_count(root, MAX_GROWTH):
            check_node(node)
        check_sizes(root)
        root = fix_times(root, now_ns)
        # The tables are resolved last, because the steps above copy parts of the tree. The result is a list of pairs,
        # not a dict, because nodes of equal text are equal to sqlglot.
        tables = [(table, name) for table in root.find_all(exp.Table) if (name := _resolve(table, users, views))]
        needs = needs_of(tables)
        if jobs is not None:
            _limit_to_jobs(tables, {**TABLES, **(users() if needs.keys() - TABLES.keys() else {})}, jobs)
        printed = _print(root)
        _check_printed(printed)
    except RecursionError:
        raise QueryRejected("the query is nested too deeply", hint="use WITH for its parts") from None
    except SqlglotError as e:
        raise QueryRejected(f"not understood: {_one_line(str(e))}") from None
    user_tables = {name: users()[name] for name in needs if name not in TABLES}
    names = frozenset(identifier.name.lower() for identifier in root.find_all(exp.Identifier))
    columns = None if names_whole_rows(root) else names
    return Checked(with_states(root) if has_states(root) else printed, needs, user_tables, warnings, columns)


def _expand(
    root: exp.Query, users: Callable[[], Mapping[str, Table]], views: Callable[[], Mapping[str, View]]
) -> tuple[str, ...]:
    """Expands the views in ``root``. Returns a warning if ``root`` names tables of the catalog ``global``: their
    rows come from this node only.
    """
    tables = list(root.find_all(exp.Table))
    named = [(table.catalog.lower(), table.db.lower()) for table in tables]
    user_views = views() if any(schema == USER_VIEWS for _, schema in named) else {}
    more = users() if any(table.catalog.lower() == GLOBAL and _is_run_time(table) for table in tables) else {}
    known = {**VIEWS, **user_views}
    expand(root, known, known_columns(known, {name: [c.name for c in table.columns] for name, table in more.items()}))
    return (_ONE_NODE,) if any(catalog == GLOBAL for catalog, _ in named) else ()


def _check_count(root: exp.Query, times: int) -> list[exp.Expr]:
    """Returns all nodes of ``root``. Raises QueryRejected if ``root`` has more than ``times`` * MAX_NODES nodes or
    ``times`` * MAX_QUERIES queries.
    """
    nodes = list(root.walk())
    if len(nodes) > MAX_NODES * times or sum(isinstance(node, exp.Query) for node in nodes) > MAX_QUERIES * times:
        raise QueryRejected(f"more than {MAX_NODES} parts or {MAX_QUERIES} SELECTs", hint="split the query")
    return nodes


def _print(root: exp.Expr) -> str:
    return root.sql(dialect=DuckDB, comments=False, unsupported_level=ErrorLevel.RAISE)


def _check_printed(printed: str) -> None:
    """Raises QueryRejected unless ``printed`` parses to an allowed tree that prints as the same text."""
    again = _parse(printed, MAX_GROWTH)
    for node in _check_count(again, MAX_GROWTH):
        check_node(node)
    if _print(again) != printed:
        hint = "the cause is rare syntax, or arguments that a function does not take: write this part in another way"
        raise QueryRejected("a part of the query has no clear meaning", hint=hint)


def _parse(sql: str, times: int = 1) -> exp.Query:
    """Returns the tree of ``sql``. Raises QueryRejected unless it is one SELECT of at most ``times`` the usual
    length.
    """
    if any(c < " " and c not in "\t\n\r" for c in sql):
        raise QueryRejected("the query has control characters")
    try:
        parsed = statements(sql, times)
    except SqlglotError as e:
        word = sql.split(maxsplit=1)[0].lower() if sql.strip() else ""
        raise evaluates_code(sql) or QueryRejected(f"syntax: {_syntax(e)}", hint=_WORDS.get(word, "")) from None
    if len(parsed) != 1:
        raise QueryRejected("more than one statement" if parsed else "no statement", hint="send one SELECT")
    root = parsed[0]
    if not isinstance(root, exp.Query):
        kind = "EXPLAIN and the like" if isinstance(root, exp.Command) else type(root).__name__.upper()
        hint = _HINTS.get(type(root), "")
        raise QueryRejected(f"{kind} is not allowed, only SELECT", hint=hint)
    return root


def _resolve(
    table: exp.Table, users: Callable[[], Mapping[str, Table]], views: Callable[[], Mapping[str, View]]
) -> str | None:
    """Returns SCHEMA.NAME of a known table; None for a CTE or an allowed table function."""
    if isinstance(table.this, _TABLE_FUNCTIONS):
        return None
    if not isinstance(table.this, exp.Identifier):
        raise function_refused(table.this.name or type(table.this).__name__)
    if table.catalog:
        raise _unknown_table(f"{table.catalog}.{table.db}.{table.name}".lower(), TABLES)
    if extra := [key for key, value in table.args.items() if value and key not in _TABLE_ARGS]:
        raise QueryRejected(f"{', '.join(extra)} is not allowed on a table")
    if not table.db:
        if _folded(table.name) in _ctes_in_scope(table):
            return None
        raise _unknown_table(table.name, [*TABLES, *VIEWS])
    name = f"{table.db}.{table.name}".lower()
    known = {**TABLES, **users()} if _is_run_time(table) else TABLES
    if name not in known:
        code = NO_TABLE if _is_run_time(table) else ""
        raise _unknown_table(name, [*known, *VIEWS, *(views() if table.db.lower() == USER_VIEWS else ())], code)
    return name


def _is_run_time(table: exp.Table) -> bool:
    """Returns whether ``table`` can be a table of a user's probe or of a job; only the daemon knows these tables."""
    schema, name = table.db.lower(), f"{table.db}.{table.name}".lower()
    return schema == USER or (schema == JOB_SCHEMA and name not in TABLES and name not in VIEWS)


def _unknown_table(name: str, known: Iterable[str], code: str = "") -> QueryRejected:
    lower, known = name.lower(), list(known)
    near = [full for full in known if full.split(".")[1] == lower.split(".")[-1]]
    near += [full for full in difflib.get_close_matches(lower, known, 3) if full not in near]
    meant = f"did you mean {' or '.join(near)}?" if near else ""
    if needs := needs_helper(name, meant):
        return needs
    hint = meant or "`probingctl tables` lists the tables"
    return QueryRejected(f"there is no table {name[:80]}", hint=hint, code=code)


def _folded(name: str) -> str:
    """Returns ``name`` as DuckDB compares names: only ASCII letters are put in lower case. DuckDB does not turn
    the Kelvin sign into a k. If the gate did, it could take a name for the name of a CTE, while for DuckDB the same
    name means a file, or rows that no view limits.
    """
    return name.translate(_LOWER)


def _ctes_in_scope(table: exp.Expr) -> set[str]:
    """Returns the folded names that the WITH clauses around ``table`` define before ``table``."""
    names: set[str] = set()
    child, parent = table, table.parent
    while parent is not None:
        if isinstance(parent, exp.With):
            position = next(i for i, cte in enumerate(parent.expressions) if cte is child)
            names.update(_folded(cte.alias) for cte in parent.expressions[:position])
        elif (clause := parent.args.get("with_")) is not None and clause is not child:
            names.update(_folded(cte.alias) for cte in clause.expressions)
        child, parent = parent, parent.parent
    return names


def _syntax(error: SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return _one_line(str(error))
    first = details[0]
    where = f"(line {first['line']}, column {first['col']})"
    return _one_line(f"{first['description']} near {str(first['highlight'])[:40]!r} {where}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _limit_to_jobs(tables: Iterable[tuple[exp.Table, str]], known: Mapping[str, Table], jobs: Collection[str]) -> None:
    """Limits a query to the rows of ``jobs``. ``tables``: each node of its tree that names a table, with the table's
    name.

    Raises QueryRejected for a table whose rows do not name their job.
    """
    for node, name in tables:
        if name in _OPEN:
            continue
        if "job" not in [column.name for column in known[name].columns]:
            raise QueryRejected(
                f"the token is limited to jobs, and {name} does not say to which job a row belongs",
                hint="use a token without such a limit",
            )
        bare = exp.Table(this=node.this.copy(), db=node.args["db"].copy())
        names = [exp.Literal.string(job) for job in sorted(jobs)]
        condition = exp.In(this=exp.column("job", quoted=True), expressions=names)
        rows = exp.select("*").from_(bare).where(condition).limit(_ALL_ROWS)
        limited = rows.subquery(node.alias or node.name, copy=False)
        if node.alias_column_names:
            limited.set("alias", node.args["alias"].copy())
        for key in _KEPT_PARTS:
            limited.set(key, node.args.get(key))
        node.replace(limited)
