"""Reads the messages of Flight SQL clients: commands in descriptors, tickets and actions.

Nothing is kept between calls: a ticket, and the handle of a prepared statement, contain the statement itself. The
statement is checked again at each call.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message

from probing.api.errors import QueryRejected, UsageError
from probing.api.proto.arrow.flight import Flight_pb2 as flight
from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.api.text import size
from probing.federation.sql.reading import MAX_TEXT

__all__ = ("READ_ONLY", "command_of", "packed", "statement_of", "unpacked")

# The maximum size of a command, bytes: the longest query in UTF-8, and the rest of the message that contains it.
MAX_COMMAND = 4 * MAX_TEXT + 4096
READ_ONLY = "this server is read-only: Flight SQL answers only SELECTs"
_NO_TRANSACTIONS = "there are no transactions: connect with autocommit"
_COMMANDS: dict[str, type[Message]] = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (
        sql.CommandGetCatalogs,
        sql.CommandGetCrossReference,
        sql.CommandGetDbSchemas,
        sql.CommandGetExportedKeys,
        sql.CommandGetImportedKeys,
        sql.CommandGetPrimaryKeys,
        sql.CommandGetSqlInfo,
        sql.CommandGetTableTypes,
        sql.CommandGetTables,
        sql.CommandGetXdbcTypeInfo,
        sql.CommandPreparedStatementQuery,
        sql.CommandStatementQuery,
        sql.TicketStatementQuery,
    )
}
_WRITES = frozenset(
    kind.DESCRIPTOR.full_name
    for kind in (sql.CommandStatementUpdate, sql.CommandPreparedStatementUpdate, sql.CommandStatementIngest)
)
_M = TypeVar("_M", bound=Message)


def command_of(source: flight.FlightDescriptor | flight.Ticket) -> Message:
    """Returns the command in a descriptor or ticket.

    Raises QueryRejected for a command that writes, UsageError for a command that is unknown or malformed.
    """
    if isinstance(source, flight.Ticket):
        data = source.ticket
    elif source.type == flight.FlightDescriptor.CMD:
        data = source.cmd
    else:
        raise UsageError(
            "this node accepts no Flight descriptor with a path", hint="send a command of Flight SQL: a SELECT"
        )
    found = _any(data)
    name = found.TypeName()
    if name in _WRITES:
        raise QueryRejected(READ_ONLY)
    if name not in _COMMANDS:
        raise UsageError(f"{name[:80]!r} is not a command that this node answers", hint="send a SELECT")
    return _parsed(found, _COMMANDS[name])


def unpacked(data: bytes, kind: type[_M]) -> _M:
    """Returns the message of ``kind`` in ``data``, the body of an action. Raises UsageError."""
    found = _any(data)
    if found.TypeName() != kind.DESCRIPTOR.full_name:
        raise UsageError(f"the action needs a {kind.DESCRIPTOR.name}")
    return _parsed(found, kind)


def packed(message: Message) -> bytes:
    """Returns the bytes of ``message`` for the body of an action or a ticket."""
    made = Any()
    made.Pack(message)
    return made.SerializeToString()


def statement_of(command: Message) -> str | None:
    """Returns the SQL of a command that runs a statement; None for other commands. Raises UsageError."""
    if isinstance(command, (sql.CommandStatementQuery, sql.ActionCreatePreparedStatementRequest)):
        if command.transaction_id:
            raise UsageError(_NO_TRANSACTIONS, hint="")
        return command.query
    if isinstance(command, sql.TicketStatementQuery):
        return _text(command.statement_handle)
    if isinstance(command, sql.CommandPreparedStatementQuery):
        return _text(command.prepared_statement_handle)
    return None


def _text(handle: bytes) -> str:
    try:
        return handle.decode()
    except UnicodeDecodeError:
        raise UsageError(
            "the ticket is malformed", hint="use a ticket or handle unchanged, as this node sent it"
        ) from None


def _any(data: bytes) -> Any:
    if len(data) > MAX_COMMAND:
        raise UsageError(f"the command or ticket has more than {size(MAX_COMMAND)}", hint="shorten the query")
    try:
        return Any.FromString(data)
    except DecodeError:
        raise _malformed() from None


def _parsed(found: Any, kind: type[_M]) -> _M:
    try:
        return kind.FromString(found.value)
    except DecodeError:
        raise _malformed() from None


def _malformed() -> UsageError:
    return UsageError("the command or ticket is malformed", hint="send a command of Flight SQL")
