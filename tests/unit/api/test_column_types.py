"""Types and names of columns: SQL and Arrow name the same types, and names need no quotes."""

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


def test_names_of_columns_need_no_quotes_in_sql() -> None:
    words = duckdb.sql("SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'").fetchall()
    named = {(table.name, column.name) for table in TABLES.values() for column in table.columns}
    reserved = {(table, name) for table, name in named if (name,) in words}
    assert reserved == {("probing.config", "default"), ("probing.settings", "default")}, "choose another name"
