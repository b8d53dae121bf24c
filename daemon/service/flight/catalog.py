"""Makes the tables in which Flight SQL describes a server: what it can, its schemas and tables, its types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message
from sqlglot import exp

from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.daemon.service.flight.framing import encapsulated
from probing.daemon.service.flight.server_info import sql_info, type_info

__all__ = ("Catalog",)

_Query = Callable[[str], Awaitable[pa.Table]]
_TEXT = pa.string()


def _field(name: str, kind: pa.DataType = _TEXT, *, null: bool = False) -> pa.Field[Any]:
    return pa.field(name, kind, nullable=null)


_CATALOG, _SCHEMA = _field("catalog_name", null=True), _field("db_schema_name", null=True)
_CATALOGS = pa.schema([_field("catalog_name")])
_SCHEMAS = pa.schema([_CATALOG, _field("db_schema_name")])
_TABLES = pa.schema([_CATALOG, _SCHEMA, _field("table_name"), _field("table_type")])
_TABLE_SCHEMA = _field("table_schema", pa.binary())
_TABLE_TYPES = pa.schema([_field("table_type")])
_PRIMARY_KEYS = pa.schema(
    [
        _CATALOG,
        _SCHEMA,
        _field("table_name"),
        _field("column_name"),
        _field("key_name", null=True),
        _field("key_sequence", pa.int32()),
    ]
)
_FOREIGN_KEYS = pa.schema(
    [
        *(
            _field(f"{side}_{name}", null=null)
            for side in ("pk", "fk")
            for name, null in (
                ("catalog_name", True),
                ("db_schema_name", True),
                ("table_name", False),
                ("column_name", False),
            )
        ),
        _field("key_sequence", pa.int32()),
        _field("fk_key_name", null=True),
        _field("pk_key_name", null=True),
        _field("update_rule", pa.uint8()),
        _field("delete_rule", pa.uint8()),
    ]
)
TABLE, VIEW = "TABLE", "VIEW"
# As probing.column_docs writes them.
_TYPES = {
    str(kind): kind
    for kind in (
        pa.bool_(),
        pa.int32(),
        pa.int64(),
        pa.uint64(),
        pa.float64(),
        pa.string(),
        pa.timestamp("ns"),
    )
}


class Catalog:
    """Answers commands about the server; ``query`` returns the rows of a SELECT by a caller, who sees no more by it."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def table(self, command: Message, query: _Query) -> pa.Table:
        """Returns the answer to ``command``, one of CommandGet*. Raises what ``query`` raises."""
        if isinstance(command, sql.CommandGetSqlInfo):
            return sql_info(self._version, command.info)
        if isinstance(command, sql.CommandGetXdbcTypeInfo):
            return type_info(command.data_type if command.HasField("data_type") else None)
        if isinstance(command, sql.CommandGetTableTypes):
            return pa.table([[TABLE, VIEW]], schema=_TABLE_TYPES)
        if isinstance(command, sql.CommandGetDbSchemas):
            return await _schemas(command, query)
        if isinstance(command, sql.CommandGetTables):
            return await _tables(command, query)
        # Tables have no keys, and no catalog is above their schemas.
        if isinstance(command, sql.CommandGetPrimaryKeys):
            return _PRIMARY_KEYS.empty_table()
        return (_CATALOGS if isinstance(command, sql.CommandGetCatalogs) else _FOREIGN_KEYS).empty_table()


async def _schemas(command: sql.CommandGetDbSchemas, query: _Query) -> pa.Table:
    found = await query(_select("probing.table_docs", command, "table_schema").distinct().sql("duckdb"))
    names = sorted(str(row["table_schema"]) for row in found.to_pylist())
    return pa.table([[None] * len(names), names], schema=_SCHEMAS)


async def _tables(command: sql.CommandGetTables, query: _Query) -> pa.Table:
    wanted = set(command.table_types) or {TABLE, VIEW}
    found = await query(_select("probing.table_docs", command, "table_schema", "table_name", "live").sql("duckdb"))
    kinds = {
        (row["table_schema"], row["table_name"]): VIEW if row["live"] == "view" else TABLE for row in found.to_pylist()
    }
    rows = [(*name, kind) for name, kind in sorted(kinds.items()) if kind in wanted]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    made = pa.table([[None] * len(rows), *columns], schema=_TABLES)
    if not command.include_schema:
        return made
    asked = _select("probing.column_docs", command, "table_schema", "table_name", "column_name", "type")
    fields = _fields((await query(asked.sql("duckdb"))).to_pylist())
    schemas = [encapsulated(pa.schema(fields.get((schema, name), ()))) for schema, name, _ in rows]
    return made.append_column(_TABLE_SCHEMA, pa.array(schemas, pa.binary()))


def _fields(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[pa.Field[Any]]]:
    fields: dict[tuple[str, str], list[pa.Field[Any]]] = {}
    for row in rows:
        # The type of a column of a user's view is not known before it runs.
        kind = _TYPES.get(row["type"], pa.null())
        fields.setdefault((row["table_schema"], row["table_name"]), []).append(pa.field(row["column_name"], kind))
    return fields


def _select(table: str, command: sql.CommandGetDbSchemas | sql.CommandGetTables, *columns: str) -> exp.Select:
    """The columns of the rows whose names fit the patterns of ``command``, which become literals."""
    made = exp.select(*columns).from_(table)
    if command.HasField("db_schema_filter_pattern"):
        made = made.where(_like("table_schema", command.db_schema_filter_pattern))
    if isinstance(command, sql.CommandGetTables) and command.HasField("table_name_filter_pattern"):
        made = made.where(_like("table_name", command.table_name_filter_pattern))
    # An empty catalog asks for what is in none, and nothing is in another.
    return made.where(exp.false()) if command.catalog else made


def _like(column: str, pattern: str) -> exp.Expr:
    return exp.Like(this=exp.column(column), expression=exp.Literal.string(pattern))
