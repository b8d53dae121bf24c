"""Tables of expressions: ``SELECT * FROM python.`EXPRESSION` `` evaluates it in the ranks of a job, as ``eval`` does.

The value becomes rows: a list of dicts, a dict of lists, an object with ``to_dict`` (a DataFrame), a dict, an object
with attributes, or a plain value, which is the column ``value``. The rows replace the table in the SQL.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from probing.api.errors import TargetError, UsageError
from probing.api.text import escape, size, sql_name, sql_text
from probing.client.messages import Evaluated, raised_text
from probing.client.render.rows import Row, rows_of
from probing.client.session import report_failures

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("MAX_BYTES", "expressions_in", "with_rows_of_expressions")

MAX_BYTES = 256 << 10
"""The maximum length of the SQL, in characters, once rows have replaced its tables of expressions."""
_MAX_COLUMNS = 64
_LIMIT_S = 10.0
# Matches a table of an expression (group ``code``). It also matches string literals, quoted names and comments, so that
# backticks in them are skipped.
_TOKENS = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | --[^\n]* | /\*.*?\*/ | \bpython\s*\.\s*`(?P<code>[^`]{1,4096})`""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_JOB = re.compile(r"\bjob\s*=\s*'((?:[^']|'')+)'", re.IGNORECASE)
_WHO = ("node", "job", "run", "rank", "pid")
# How the code in the process prints numbers that are not finite: as strings, since they have no Python literal.
_WORDS = ("nan", "inf", "-inf")
# This code runs in the process and prints a Python literal for each row. A value that is not plain is printed as repr.
_ROWS = """
def _probing_plain(value):
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value[:1000]
    if isinstance(value, float):
        return value if value - value == 0 else repr(value)
    if hasattr(value, 'item') and getattr(value, 'size', 1) in (1, ()):
        try:
            return _probing_plain(value.item())
        except Exception:
            pass
    return repr(value)[:1000]
def _probing_rows(value):
    if hasattr(value, 'to_dict'):
        try:
            value = value.to_dict('records')
        except TypeError:
            value = value.to_dict()
    if isinstance(value, dict):
        columns = list(value.values())
        lists = columns and all(isinstance(one, (list, tuple)) and len(one) == len(columns[0]) for one in columns)
        return [dict(zip(value, row)) for row in zip(*columns)] if lists else [value]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [one if isinstance(one, dict) else {{'value': one}} for one in value]
    if getattr(value, '__dict__', None) and not callable(value) and not hasattr(value, 'item'):
        return [{{name: field for name, field in vars(value).items() if not name.startswith('_')}}]
    return [{{'value': value}}]
for _probing_name in {modules}:
    if _probing_name not in globals() and _probing_name in __import__('sys').modules:
        globals()[_probing_name] = __import__('sys').modules[_probing_name]
for _probing_row in _probing_rows({code}):
    print({{str(name)[:64]: _probing_plain(field) for name, field in _probing_row.items()}})
"""


def expressions_in(sql: str) -> list[tuple[int, int, str]]:
    """Returns begin, end and code of each python.`CODE` outside of string literals, quoted names and comments."""
    return [(*match.span(), match["code"]) for match in _TOKENS.finditer(sql) if match["code"] is not None]


def with_rows_of_expressions(cluster: Cluster, sql: str) -> str:
    """Returns ``sql`` with rows in place of its tables of expressions; unchanged if there are none.

    Evaluates each expression in the trainers of the job that ``sql`` names (job = '...'), or of the only job that runs.
    Raises UsageError, NotFound, TargetError, and the errors of ``Cluster.evaluate``.
    """
    found = expressions_in(sql)
    if not found:
        return sql
    job = _job_of(cluster, sql)
    parts, at = [], 0
    for begin, end, code in found:
        parts += [sql[at:begin], _rows_sql(_evaluated(cluster, job, code))]
        at = end
    text = "".join([*parts, sql[at:]])
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"the rows of the expressions take {size(len(text))}",
            hint=f"at most {size(MAX_BYTES)}: select in the expression",
        )
    return text


def _job_of(cluster: Cluster, sql: str) -> str:
    if match := _JOB.search(sql):
        return match[1].replace("''", "'")
    running = cluster.processes("role = 'trainer' AND state <> 'exited'").table
    jobs = {row["job"] for row in rows_of(running)}
    if len(jobs) != 1:
        what = f"{len(jobs)} jobs run" if jobs else "no job runs"
        raise UsageError(f"an expression is evaluated in the ranks of a job, and {what}", hint="add WHERE job = '...'")
    return str(jobs.pop())


def _evaluated(cluster: Cluster, job: str, code: str) -> list[Row]:
    """Returns the rows of ``code`` in all ranks, with node, job, run, rank and pid in front."""
    try:
        tree = ast.parse(code, mode="eval")
        compile(tree, "<expression>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        raise UsageError(f"python.`{escape(code, 80)}` is not a Python expression", hint=str(e)) from None
    # A module that the process has loaded needs no import: python.`time.time()`.
    modules = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    text = _ROWS.format(code=f"({code}\n)", modules=modules)
    found = cluster.evaluate(text, (), job, seconds=_LIMIT_S)
    report_failures(found.failures, all_failed=not found.results)
    rows: list[Row] = []
    for result in found.results:
        who = {name: value for name, value in result.items() if name in _WHO}
        rows += [{**row, **who} for row in _read(result, code)]
    return rows


def _read(result: Evaluated, code: str) -> Iterator[Row]:
    if (raised := result["raised"]) is not None:
        text = escape(raised_text(raised), 500)
        raise TargetError(f"rank {result['rank']}: python.`{escape(code, 80)}` raised {text}")
    if result["dropped"]:
        raise TargetError(f"the rows of rank {result['rank']} are too large", hint="select in the expression")
    yield from map(_row, result["output"].splitlines())


def _row(line: str) -> Row:
    """Returns the row in a line of the output. Raises TargetError for another line, because the process may have
    printed anything.
    """
    try:
        row = ast.literal_eval(line)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        row = None
    if not isinstance(row, dict) or not all(isinstance(name, str) for name in row):
        raise TargetError("the process printed lines that are not rows", hint="leave out code that prints")
    return row


def _rows_sql(rows: Sequence[Row]) -> str:
    """Returns a SELECT of ``rows`` in parentheses: the columns of _WHO, then the other columns."""
    names = list(dict.fromkeys([*_WHO, *(name for row in rows for name in row)]))[:_MAX_COLUMNS]
    types = [_type_of([row.get(name) for row in rows]) for name in names]
    aliases = ", ".join(f"c{number}" for number in range(len(names)))
    shown = ", ".join(
        f"CAST(c{number} AS {kind}) AS {sql_name(name)}"
        for number, (name, kind) in enumerate(zip(names, types, strict=True))
    )
    values = [
        "(" + ", ".join(_literal(row.get(name), kind) for name, kind in zip(names, types, strict=True)) + ")"
        for row in rows
    ]
    if not rows:
        return f"(SELECT {shown} FROM (VALUES ({', '.join(['NULL'] * len(names))})) AS rows({aliases}) WHERE FALSE)"
    return f"(SELECT {shown} FROM (VALUES {', '.join(values)}) AS rows({aliases}))"


def _type_of(values: Sequence[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return "BOOLEAN"
    if kinds == {int} and all(value is None or abs(value) < 1 << 63 for value in values):
        return "BIGINT"
    numbers = [value for value in values if value is not None and value not in _WORDS]
    if float in kinds and numbers and all(type(value) in (int, float) for value in numbers):
        return "DOUBLE"
    return "VARCHAR"


def _literal(value: Any, kind: str) -> str:
    if value is None:
        return "NULL"
    if kind == "BOOLEAN":
        return "TRUE" if value else "FALSE"
    if kind == "BIGINT":
        return str(value)
    if kind == "DOUBLE":
        return f"CAST('{value}' AS DOUBLE)"
    return sql_text(value if isinstance(value, str) else repr(value))
