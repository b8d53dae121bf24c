"""The types of columns: SQL and Arrow name the same ones."""

from __future__ import annotations

import duckdb

from probing.api.tables import TABLES, Column
from probing.api.tables.user import COLUMN_TYPES


def test_the_type_in_sql_is_the_one_in_arrow() -> None:
    shown = [column for table in TABLES.values() for column in table.columns]
    for column in [*shown, *(Column(name, kind, "") for name, kind in COLUMN_TYPES.items())]:
        made = duckdb.sql(f"SELECT CAST(NULL AS {column.type.sql}) AS one").to_arrow_table()
        assert made.schema.field("one").type == column.plain_type
