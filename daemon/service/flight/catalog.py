"""Makes the tables by which Flight SQL describes a server: its properties, its schemas and tables, and its types with
their properties.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message
from sqlglot import exp

from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.daemon.service.flight.framing import encapsulated
from probing.federation.sql.reading import MAX_TEXT

__all__ = (
    "Catalog",
    "sql_info",
    "type_info",
)

_LISTS = pa.map_(pa.int32(), pa.list_(pa.int32()))
# The members of the protocol's union of values, in the protocol's order.
_MEMBERS = (
    ("string_value", pa.string()),
    ("bool_value", pa.bool_()),
    ("bigint_value", pa.int64()),
    ("int32_bitmask", pa.int32()),
    ("string_list", pa.list_(pa.string())),
    ("int32_to_int32_list_map", _LISTS),
)
_TEXT_VALUE, _BOOL, _INT64, _INT32 = range(4)
_INFO: tuple[tuple[int, int, Any], ...] = (
    (sql.FLIGHT_SQL_SERVER_NAME, _TEXT_VALUE, "probingd"),
    (sql.FLIGHT_SQL_SERVER_ARROW_VERSION, _TEXT_VALUE, pa.__version__),
    (sql.FLIGHT_SQL_SERVER_READ_ONLY, _BOOL, True),
    (sql.FLIGHT_SQL_SERVER_SQL, _BOOL, True),
    (sql.FLIGHT_SQL_SERVER_SUBSTRAIT, _BOOL, False),
    (sql.FLIGHT_SQL_SERVER_TRANSACTION, _INT32, sql.SQL_SUPPORTED_TRANSACTION_NONE),
    (sql.FLIGHT_SQL_SERVER_CANCEL, _BOOL, False),
    (sql.FLIGHT_SQL_SERVER_BULK_INGESTION, _BOOL, False),
    (sql.SQL_DDL_CATALOG, _BOOL, False),
    (sql.SQL_DDL_SCHEMA, _BOOL, False),
    (sql.SQL_DDL_TABLE, _BOOL, False),
    (sql.SQL_IDENTIFIER_CASE, _INT32, sql.SQL_CASE_SENSITIVITY_CASE_INSENSITIVE),
    (sql.SQL_IDENTIFIER_QUOTE_CHAR, _TEXT_VALUE, '"'),
    (sql.SQL_QUOTED_IDENTIFIER_CASE, _INT32, sql.SQL_CASE_SENSITIVITY_CASE_INSENSITIVE),
    (sql.SQL_ALL_TABLES_ARE_SELECTABLE, _BOOL, True),
    (sql.SQL_NULL_ORDERING, _INT32, sql.SQL_NULLS_SORTED_AT_END),
    (sql.SQL_SUPPORTS_COLUMN_ALIASING, _BOOL, True),
    (sql.SQL_NULL_PLUS_NULL_IS_NULL, _BOOL, True),
    (sql.SQL_SUPPORTS_TABLE_CORRELATION_NAMES, _BOOL, True),
    (sql.SQL_SUPPORTS_EXPRESSIONS_IN_ORDER_BY, _BOOL, True),
    (sql.SQL_SUPPORTS_ORDER_BY_UNRELATED, _BOOL, True),
    (sql.SQL_SUPPORTS_LIKE_ESCAPE_CLAUSE, _BOOL, True),
    (sql.SQL_SCHEMA_TERM, _TEXT_VALUE, "schema"),
    (sql.SQL_SUPPORTED_UNIONS, _INT32, (1 << sql.SQL_UNION) | (1 << sql.SQL_UNION_ALL)),
    (sql.SQL_MAX_STATEMENT_LENGTH, _INT64, MAX_TEXT),
    (sql.SQL_TRANSACTIONS_SUPPORTED, _BOOL, False),
    (sql.SQL_BATCH_UPDATES_SUPPORTED, _BOOL, False),
    (sql.SQL_SAVEPOINTS_SUPPORTED, _BOOL, False),
    (sql.SQL_NAMED_PARAMETERS_SUPPORTED, _BOOL, False),
)
# For each type: its name, code and size, and whether it is unsigned (None for types that are not numbers).
_COLUMN_TYPES: tuple[tuple[str, int, int, bool | None], ...] = (
    ("BIGINT", sql.XDBC_BIGINT, 19, False),
    ("UBIGINT", sql.XDBC_BIGINT, 20, True),
    ("INTEGER", sql.XDBC_INTEGER, 10, False),
    ("DOUBLE", sql.XDBC_DOUBLE, 53, False),
    ("VARCHAR", sql.XDBC_VARCHAR, 0, None),
    ("TIMESTAMP_NS", sql.XDBC_TIMESTAMP, 29, None),
    ("BOOLEAN", sql.XDBC_BIT, 1, None),
)


def sql_info(version: str, wanted: Collection[int]) -> pa.Table:
    """Returns the properties of the server. ``wanted``: numbers of SqlInfo; all properties if it is empty."""
    rows = ((sql.FLIGHT_SQL_SERVER_VERSION, _TEXT_VALUE, version), *_INFO)
    chosen = sorted(row for row in rows if not wanted or row[0] in wanted)
    values: list[list[Any]] = [[] for _ in _MEMBERS]
    offsets = []
    for _, member, value in chosen:
        offsets.append(len(values[member]))
        values[member].append(value)
    union = pa.UnionArray.from_dense(
        pa.array([member for _, member, _ in chosen], pa.int8()),
        pa.array(offsets, pa.int32()),
        [pa.array(found, kind) for found, (_, kind) in zip(values, _MEMBERS, strict=True)],
        [name for name, _ in _MEMBERS],
    )
    schema = pa.schema([pa.field("info_name", pa.uint32(), nullable=False), pa.field("value", union.type)])
    return pa.table([pa.array([number for number, _, _ in chosen], pa.uint32()), union], schema=schema)


def type_info(code: int | None) -> pa.Table:
    """Returns all types of columns, or the types with ``code``, a number of XdbcDataType."""
    chosen = sorted((one for one in _COLUMN_TYPES if code in (None, one[1])), key=lambda one: (one[1], one[0]))
    return pa.Table.from_pylist([_type(*one) for one in chosen], schema=_TYPE_INFO)


def _type(name: str, code: int, size: int, unsigned: bool | None) -> dict[str, object]:
    text, time = code == sql.XDBC_VARCHAR, code == sql.XDBC_TIMESTAMP
    quote = "'" if text or time else None
    return {
        "type_name": name,
        "data_type": code,
        "column_size": size or None,
        "literal_prefix": quote,
        "literal_suffix": quote,
        "nullable": sql.NULLABILITY_NULLABLE,
        "case_sensitive": text,
        "searchable": sql.SEARCHABLE_FULL if text else sql.SEARCHABLE_BASIC,
        "unsigned_attribute": unsigned,
        "fixed_prec_scale": False,
        "sql_data_type": sql.XDBC_DATETIME if time else code,
        "datetime_subcode": sql.XDBC_SUBCODE_TIMESTAMP if time else None,
        "num_prec_radix": None if unsigned is None else 2 if code == sql.XDBC_DOUBLE else 10,
    }


_TYPE_INFO = pa.schema(
    [
        pa.field(name, kind, nullable=nullable)
        for name, kind, nullable in (
            ("type_name", pa.string(), False),
            ("data_type", pa.int32(), False),
            ("column_size", pa.int32(), True),
            ("literal_prefix", pa.string(), True),
            ("literal_suffix", pa.string(), True),
            ("create_params", pa.list_(pa.field("item", pa.string(), nullable=False)), True),
            ("nullable", pa.int32(), False),
            ("case_sensitive", pa.bool_(), False),
            ("searchable", pa.int32(), False),
            ("unsigned_attribute", pa.bool_(), True),
            ("fixed_prec_scale", pa.bool_(), False),
            ("auto_increment", pa.bool_(), True),
            ("local_type_name", pa.string(), True),
            ("minimum_scale", pa.int32(), True),
            ("maximum_scale", pa.int32(), True),
            ("sql_data_type", pa.int32(), False),
            ("datetime_subcode", pa.int32(), True),
            ("num_prec_radix", pa.int32(), True),
            ("interval_precision", pa.int32(), True),
        )
    ]
)


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
# Arrow types by their name in probing.column_docs.
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
    """Answers commands about the server; ``query`` returns the rows of a SELECT with the rights of the caller."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def table(self, command: Message, query: _Query) -> pa.Table:
        """Returns the answer to ``command``, one of CommandGet*. Raises the errors of ``query``."""
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
        # Tables have no keys, and schemas belong to no catalog.
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
        # The type of a column of a user's view is unknown before the view runs.
        kind = _TYPES.get(row["type"], pa.null())
        fields.setdefault((row["table_schema"], row["table_name"]), []).append(pa.field(row["column_name"], kind))
    return fields


def _select(table: str, command: sql.CommandGetDbSchemas | sql.CommandGetTables, *columns: str) -> exp.Select:
    """Returns a SELECT of the rows whose names match the patterns of ``command``. Patterns become string literals."""
    made = exp.select(*columns).from_(table)
    if command.HasField("db_schema_filter_pattern"):
        made = made.where(_like("table_schema", command.db_schema_filter_pattern))
    if isinstance(command, sql.CommandGetTables) and command.HasField("table_name_filter_pattern"):
        made = made.where(_like("table_name", command.table_name_filter_pattern))
    # No table has a catalog: an empty catalog asks for all tables, any other catalog for no table.
    return made.where(exp.false()) if command.catalog else made


def _like(column: str, pattern: str) -> exp.Expr:
    return exp.Like(this=exp.column(column), expression=exp.Literal.string(pattern))
