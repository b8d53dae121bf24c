"""Makes two fixed tables of Flight SQL: what this server is and can, and the types of its columns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.federation.sql.reading import MAX_TEXT

__all__ = ("sql_info", "type_info")

_LISTS = pa.map_(pa.int32(), pa.list_(pa.int32()))
# The members of the union of a value, in the order of the protocol.
_MEMBERS = (
    ("string_value", pa.string()),
    ("bool_value", pa.bool_()),
    ("bigint_value", pa.int64()),
    ("int32_bitmask", pa.int32()),
    ("string_list", pa.list_(pa.string())),
    ("int32_to_int32_list_map", _LISTS),
)
_TEXT, _BOOL, _INT64, _INT32 = range(4)
_INFO: tuple[tuple[int, int, Any], ...] = (
    (sql.FLIGHT_SQL_SERVER_NAME, _TEXT, "probingd"),
    (sql.FLIGHT_SQL_SERVER_ARROW_VERSION, _TEXT, pa.__version__),
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
    (sql.SQL_IDENTIFIER_QUOTE_CHAR, _TEXT, '"'),
    (sql.SQL_QUOTED_IDENTIFIER_CASE, _INT32, sql.SQL_CASE_SENSITIVITY_CASE_INSENSITIVE),
    (sql.SQL_ALL_TABLES_ARE_SELECTABLE, _BOOL, True),
    (sql.SQL_NULL_ORDERING, _INT32, sql.SQL_NULLS_SORTED_AT_END),
    (sql.SQL_SUPPORTS_COLUMN_ALIASING, _BOOL, True),
    (sql.SQL_NULL_PLUS_NULL_IS_NULL, _BOOL, True),
    (sql.SQL_SUPPORTS_TABLE_CORRELATION_NAMES, _BOOL, True),
    (sql.SQL_SUPPORTS_EXPRESSIONS_IN_ORDER_BY, _BOOL, True),
    (sql.SQL_SUPPORTS_ORDER_BY_UNRELATED, _BOOL, True),
    (sql.SQL_SUPPORTS_LIKE_ESCAPE_CLAUSE, _BOOL, True),
    (sql.SQL_SCHEMA_TERM, _TEXT, "schema"),
    (sql.SQL_SUPPORTED_UNIONS, _INT32, (1 << sql.SQL_UNION) | (1 << sql.SQL_UNION_ALL)),
    (sql.SQL_MAX_STATEMENT_LENGTH, _INT64, MAX_TEXT),
    (sql.SQL_TRANSACTIONS_SUPPORTED, _BOOL, False),
    (sql.SQL_BATCH_UPDATES_SUPPORTED, _BOOL, False),
    (sql.SQL_SAVEPOINTS_SUPPORTED, _BOOL, False),
    (sql.SQL_NAMED_PARAMETERS_SUPPORTED, _BOOL, False),
)
# Name, code, size, unsigned; texts and times have no sign.
_TYPES: tuple[tuple[str, int, int, bool | None], ...] = (
    ("BIGINT", sql.XDBC_BIGINT, 19, False),
    ("UBIGINT", sql.XDBC_BIGINT, 20, True),
    ("INTEGER", sql.XDBC_INTEGER, 10, False),
    ("DOUBLE", sql.XDBC_DOUBLE, 53, False),
    ("VARCHAR", sql.XDBC_VARCHAR, 0, None),
    ("TIMESTAMP_NS", sql.XDBC_TIMESTAMP, 29, None),
    ("BOOLEAN", sql.XDBC_BIT, 1, None),
)


def sql_info(version: str, wanted: Collection[int]) -> pa.Table:
    """Returns what the server is and can. ``wanted``: numbers of SqlInfo; all if there are none."""
    rows = ((sql.FLIGHT_SQL_SERVER_VERSION, _TEXT, version), *_INFO)
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
    """Returns the types of columns, those with the ``code`` of XdbcDataType if there is one."""
    chosen = sorted((one for one in _TYPES if code in (None, one[1])), key=lambda one: (one[1], one[0]))
    return pa.Table.from_pylist([_type(*one) for one in chosen], schema=_TYPE_INFO)


def _type(name: str, code: int, size: int, unsigned: bool | None) -> dict[str, Any]:
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
