"""Writes hints after a query whose job has no rows: in SQL ``job = '29505'`` must be the whole name, unlike ``--job
29505``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from probing.api.errors import NotFound, ProbingError, UsageError
from probing.api.text import sql_text
from probing.client.jobs import job_named
from probing.client.session import hint

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.client.cluster import Cluster

__all__ = ("Emptiness", "hint_at_jobs")

_MOST = 3


class Emptiness:
    """Passes batches on. ``empty`` is True if they had no row, or a single row of only 0 and NULL, as from
    ``count(*)``.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._nothing = True

    def passed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields ``batches``."""
        for batch in batches:
            if batch.num_rows:
                self._nothing = self._rows + batch.num_rows == 1 and all(map(_is_nothing, batch.columns))
            self._rows += batch.num_rows
            yield batch

    @property
    def empty(self) -> bool:
        return self._nothing


def _is_nothing(column: pa.Array[Any]) -> bool:
    import pyarrow as pa

    number = any(test(column.type) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))
    return not column[0].is_valid or (number and column[0].as_py() == 0)


def hint_at_jobs(cluster: Cluster, sql: str, params: Mapping[str, Any]) -> None:
    """Writes a hint for each job that ``sql`` names and that no node has; called after an empty answer."""
    try:
        for name in _names(sql, params)[:_MOST]:
            if text := _meant(cluster, name):
                hint(text)
    except ProbingError:
        # A failure is ignored, because the answer was already written and only the hint is missing.
        return


def _meant(cluster: Cluster, name: str) -> str:
    try:
        job = job_named(cluster, name)
    except UsageError as e:
        return f"no job has the whole name {name}: {e.message}"
    except NotFound:
        return f"no node knows a job {name}: `probingctl ps` and `probingctl ps --ended` list jobs"
    return f"no job has the whole name {name}: write job = {sql_text(job)}" if job != name else ""


def _names(sql: str, params: Mapping[str, Any]) -> list[str]:
    """Returns the texts that ``sql`` compares with a column ``job``."""
    if "job" not in sql.lower():
        return []
    from sqlglot import exp

    from probing.federation.sql.dialect import parse
    from probing.federation.sql.parameters import bind

    found: dict[str, None] = {}
    for node in parse(bind(sql, params)).find_all(exp.EQ, exp.In):
        sides = [
            side.this if isinstance(side, exp.Cast) else side
            for side in (node.this, node.expression, *node.expressions)
        ]
        if any(isinstance(side, exp.Column) and side.name.lower() == "job" for side in sides):
            found |= {side.name: None for side in sides if isinstance(side, exp.Literal) and side.is_string}
    return list(found)
