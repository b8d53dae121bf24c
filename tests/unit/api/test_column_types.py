"""The types of columns: SQL and Arrow name the same ones."""

from __future__ import annotations

import duckdb

from probing.api.tables import TABLES, Column
from probing.api.tables.user import COLUMN_TYPES


def test_the_type_in_sql_is_the_one_in_arrow() -> None:
    shown = [column for table in TABLES.values() for column in table.columns]
    columns = [*shown, *(Column(name, kind, "") for name, kind in COLUMN_TYPES.items())]
    names = sorted({column.type.sql for column in columns})
    made = duckdb.sql("SELECT " + ", ".join(f"CAST(NULL AS {name})" for name in names)).to_arrow_table()
    types = dict(zip(names, made.schema.types, strict=True))
    assert [types[column.type.sql] for column in columns] == [column.plain_type for column in columns]
