"""SQL of the page: rows as JSON, the plan, the tables with their columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from probing.api.errors import QueryMemory, UsageError
from probing.api.text import size as size_text
from probing.client.render.rows import Row, columns_of, names_of, rows_of
from probing.client.web.panels import Question

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.client.cluster import Cluster

__all__ = ("cluster_of", "query", "tables")

_MOST_CHARACTERS = 200_000
_MOST_ROWS = 10_000
_MOST_COLUMNS = 2_000
_MOST_BYTES = 32 << 20
# Whole numbers up to this are exact in JavaScript.
_EXACT = 2**53
_DOCS = """
SELECT table_schema || '.' || table_name AS "table", any_value(description) AS doc
FROM probing.table_docs GROUP BY table_schema, table_name ORDER BY table_schema, table_name
"""
_COLUMNS = """
SELECT table_schema || '.' || table_name AS "table", column_name AS name, any_value(type) AS type,
  any_value(description) AS doc
FROM probing.column_docs GROUP BY table_schema, table_name, column_name ORDER BY table_schema, table_name, column_name
"""


def cluster_of(question: Question) -> tuple[Cluster, str]:
    """Returns the cluster that the parameter ``all_nodes`` chooses, and the parameter ``sql``."""
    parameters = question.parameters
    cluster = question.of_all_nodes(parameters.flag("all_nodes", default=question.cluster.many))
    return cluster, parameters.text("sql", most=_MOST_CHARACTERS)


def query(question: Question) -> dict[str, object]:
    """Returns ``columns``, ``rows`` (at most 10,000), ``truncated`` and ``warnings``.

    Whole numbers beyond 2^53, NaN and infinities are texts. Raises UsageError for more than 2,000 columns, QueryMemory
    for a row that is too large.
    """
    import pyarrow as pa

    cluster, sql = cluster_of(question)
    with cluster.stream(sql) as stream:
        if len(stream.schema) > _MOST_COLUMNS:
            raise UsageError(
                f"the answer has {len(stream.schema):,} columns", hint=f"select {_MOST_COLUMNS:,} columns at most"
            )
        batches: list[pa.RecordBatch] = []
        rows = size = 0
        more = False
        for batch in stream:
            if rows > _MOST_ROWS or size > _MOST_BYTES:
                more = True
                break
            batches.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
    table = pa.Table.from_batches(batches, stream.schema)
    table = table.slice(0, _MOST_ROWS)
    while table.num_rows > 1 and table.nbytes > _MOST_BYTES:
        table = table.slice(0, table.num_rows // 2)
    if table.nbytes > _MOST_BYTES:
        raise QueryMemory(
            f"a row is larger than {size_text(_MOST_BYTES)}", hint="select fewer columns, or save the rows"
        )
    columns = [_exact(values, column) for values, column in zip(columns_of(table), table.columns, strict=True)]
    kinds = [str(kind) for kind in stream.schema.types]
    return {
        "columns": [
            {"name": name, "type": kind} for name, kind in zip(names_of(stream.schema.names), kinds, strict=True)
        ],
        "rows": [list(row) for row in zip(*columns, strict=True)],
        "truncated": more or rows > table.num_rows,
        "warnings": list(stream.warnings),
    }


def _exact(values: Sequence[Any], column: pa.ChunkedArray[Any]) -> Sequence[Any]:
    """Returns ``values`` with texts for numbers that JavaScript or JSON lacks."""
    import pyarrow as pa

    if pa.types.is_floating(column.type):
        return [_number(value) for value in column.to_pylist()]
    if pa.types.is_string(column.type) or pa.types.is_boolean(column.type):
        return values
    return [_number(value) for value in values]


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -_EXACT <= value <= _EXACT else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, dict):
        return {key: _number(one) for key, one in value.items()}
    return value


def tables(question: Question) -> list[Row]:
    """Returns the tables with ``doc`` and ``columns``, in the order of their names."""
    found = question.cluster.query_all({"tables": _DOCS, "columns": _COLUMNS})
    columns: dict[str, list[Row]] = {}
    for row in rows_of(found["columns"]):
        columns.setdefault(row.pop("table"), []).append(row)
    return [{**row, "columns": columns.get(row["table"], [])} for row in rows_of(found["tables"])]
