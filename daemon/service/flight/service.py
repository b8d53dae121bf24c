"""Implements arrow.flight.protocol.FlightService: Flight SQL, read-only, in front of Query."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pyarrow as pa
from google.protobuf.message import Message

from probing.api.errors import QueryRejected
from probing.api.proto.arrow.flight import Flight_pb2 as pb
from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.api.proto.arrow.flight.Flight_pb2_grpc import FlightServiceServicer
from probing.api.proto.probing.v1 import node_pb2 as node
from probing.api.wire import UNLIMITED, WARNINGS_KEY
from probing.daemon.query.answer import End
from probing.daemon.query.caller import Caller
from probing.daemon.service.answering import Timed, answering
from probing.daemon.service.audit import Audit
from probing.daemon.service.flight.catalog import Catalog
from probing.daemon.service.flight.commands import READ_ONLY, command_of, packed, statement_of, unpacked
from probing.daemon.service.flight.framing import encapsulated, messages_of, table_messages
from probing.daemon.service.limits import Context, Limits
from probing.daemon.service.streams import Form

__all__ = ("FlightService",)

# The maximum size of the rows that describe tables, bytes.
MAX_DESCRIPTION = 16 << 20
# HTTP/2 peers commonly refuse more than 8 KiB of metadata.
MAX_WARNINGS = 2000
MAX_TIMEOUT_MS = (1 << 32) - 1
_WRITES = "write values into the SELECT: the server accepts neither parameters nor rows"
_ACTIONS = {
    "CreatePreparedStatement": "Returns a handle for a SELECT, and the schema of its rows.",
    "ClosePreparedStatement": "Does nothing: no statement is kept.",
}


_Query = Callable[[node.QueryRequest, Any, Caller, Form | None], Awaitable[None]]


class FlightService(FlightServiceServicer):
    """The Flight service. ``query`` answers a Query of a caller, ``identify`` returns the caller of a call."""

    # Clients of Flight SQL show the text of a status, and cannot read the error in our metadata.
    hints = True

    def __init__(
        self,
        query: _Query,
        identify: Callable[[Context, Sequence[tuple[str, str | bytes]] | None], Awaitable[Caller]],
        audit: Audit,
        version: str,
        limits: Limits | None = None,
        timed: Timed = lambda *_: None,
    ) -> None:
        self.audit = audit
        self.timed = timed
        self._query = query
        self._identify = identify
        self._catalog = Catalog(version)
        self._limits = limits or Limits()

    async def identify(self, context: Context) -> Caller:
        """Returns the caller of a call. A password in HTTP's basic authentication counts as a token."""
        return await self._identify(context, _bearer(context))

    @answering
    async def Handshake(self, requests: Any, context: Context, caller: Caller) -> None:  # noqa: N802
        del requests, caller
        # This tells the client to send the token of this call in later calls, too.
        await context.send_initial_metadata(_bearer(context) or ())

    @answering
    async def ListFlights(self, request: pb.Criteria, context: Context, caller: Caller) -> None:  # noqa: N802
        del request, context, caller

    @answering
    async def GetFlightInfo(  # noqa: N802
        self, request: pb.FlightDescriptor, context: Context, caller: Caller
    ) -> pb.FlightInfo:
        del context, caller
        return _info(request)

    @answering
    async def PollFlightInfo(  # noqa: N802
        self, request: pb.FlightDescriptor, context: Context, caller: Caller
    ) -> pb.PollInfo:
        del context, caller
        return pb.PollInfo(info=_info(request), progress=1.0)

    @answering
    async def GetSchema(  # noqa: N802
        self, request: pb.FlightDescriptor, context: Context, caller: Caller
    ) -> pb.SchemaResult:
        command = command_of(request)
        statement = statement_of(command)
        if statement is not None:
            schema = await self._schema_of(statement, context, caller)
        else:
            schema = (await self._described(command, context, caller)).schema
        return pb.SchemaResult(schema=encapsulated(schema))

    @answering
    async def DoGet(self, request: pb.Ticket, context: Context, caller: Caller) -> None:  # noqa: N802
        command = command_of(request)
        statement = statement_of(command)
        if statement is not None:
            asked = node.QueryRequest(sql=statement, max_bytes=UNLIMITED, timeout_ms=_timeout_ms(context))
            await self._query(asked, context, caller, Form(messages_of, partial(_message, context)))
            return
        for data in table_messages(await self._described(command, context, caller)):
            await asyncio.wait_for(context.write(data), self._limits.unread_s)

    @answering
    async def DoPut(self, requests: Any, context: Context, caller: Caller) -> None:  # noqa: N802
        del requests, context, caller
        raise QueryRejected(READ_ONLY, hint=_WRITES)

    @answering
    async def DoExchange(self, requests: Any, context: Context, caller: Caller) -> None:  # noqa: N802
        del requests, context, caller
        raise QueryRejected(READ_ONLY, hint=_WRITES)

    @answering
    async def DoAction(self, request: pb.Action, context: Context, caller: Caller) -> None:  # noqa: N802
        if request.type == "CreatePreparedStatement":
            asked = unpacked(request.body, sql.ActionCreatePreparedStatementRequest)
            statement = statement_of(asked) or ""
            schema = await self._schema_of(statement, context, caller)
            made = sql.ActionCreatePreparedStatementResult(
                prepared_statement_handle=statement.encode(), dataset_schema=encapsulated(schema), is_update=False
            )
            await context.write(pb.Result(body=packed(made)))
        elif request.type not in _ACTIONS:
            # Clients try actions to learn which actions a server has, so the status is UNIMPLEMENTED.
            why = f"the action {request.type[:80]!r} is not answered here: {READ_ONLY}"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

    @answering
    async def ListActions(self, request: pb.Empty, context: Context, caller: Caller) -> None:  # noqa: N802
        del request, caller
        for name, doc in _ACTIONS.items():
            await context.write(pb.ActionType(type=name, description=doc))

    async def _described(self, command: Message, context: Context, caller: Caller) -> pa.Table:
        async def rows(text: str) -> pa.Table:
            return await self._gathered(text, context, caller)

        return await self._catalog.table(command, rows)

    async def _schema_of(self, statement: str, context: Context, caller: Caller) -> pa.Schema:
        if not statement.strip():
            raise QueryRejected("the query is empty")
        bare = statement.rstrip().removesuffix(";")
        try:
            # The closing parenthesis is on a line of its own, because the statement may end in a comment.
            return (await self._gathered(f"SELECT * FROM (\n{bare}\n) LIMIT 0", context, caller)).schema
        except QueryRejected:
            # The caller's text is run without the SELECT around it, so that positions in the error refer to the
            # caller's text.
            return (await self._gathered(statement, context, caller)).schema

    async def _gathered(self, text: str, context: Context, caller: Caller) -> pa.Table:
        gathering = _Gathering(context)
        asked = node.QueryRequest(sql=text, max_bytes=MAX_DESCRIPTION, timeout_ms=_timeout_ms(context))
        await self._query(asked, gathering, caller, None)
        with pa.ipc.open_stream(b"".join(gathering.pieces)) as reader:
            return reader.read_all()


class _Gathering:
    """Collects the replies of Query that would go to the caller."""

    def __init__(self, context: Context) -> None:
        self.time_remaining = context.time_remaining
        self.pieces: list[bytes] = []

    async def send_initial_metadata(self, metadata: object) -> None:
        del metadata

    async def write(self, reply: node.QueryReply) -> None:
        self.pieces.append(reply.arrow)


def _info(descriptor: pb.FlightDescriptor) -> pb.FlightInfo:
    """Returns where a client gets the rows of a command: on this connection, by a ticket with the command."""
    command = command_of(descriptor)
    statement = statement_of(command)
    if statement is not None:
        command = sql.TicketStatementQuery(statement_handle=statement.encode())
    endpoint = pb.FlightEndpoint(ticket=pb.Ticket(ticket=packed(command)))
    return pb.FlightInfo(
        flight_descriptor=descriptor, endpoint=[endpoint], total_records=-1, total_bytes=-1, ordered=True
    )


def _message(context: Context, part: pb.FlightData | End) -> pb.FlightData | None:
    if not isinstance(part, End):
        return part
    if part.warnings:
        context.set_trailing_metadata(((WARNINGS_KEY, "\n".join(part.warnings)[:MAX_WARNINGS].encode()),))
    return None


def _timeout_ms(context: Context) -> int:
    """Returns the time that the caller allows for a statement, ms. 0 stands for the node's default."""
    left = context.time_remaining()
    return 0 if left is None else max(min(int(left * 1000), MAX_TIMEOUT_MS), 1)


def _bearer(context: Context) -> tuple[tuple[str, str | bytes], ...] | None:
    """Returns metadata with a bearer token for a call that sends the token as the password of basic authentication;
    None for other calls.
    """
    metadata = tuple(context.invocation_metadata() or ())
    shown = next((value for key, value in metadata if key == "authorization"), "")
    if not isinstance(shown, str):
        return None
    kind, _, coded = shown.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        # Some clients omit the padding.
        _, _, token = base64.b64decode(coded + "=" * (-len(coded) % 4), validate=True).decode("ascii").partition(":")
    except (binascii.Error, ValueError):
        token = ""
    token = token if re.fullmatch(r"[!-~]*", token) else ""
    return (("authorization", f"Bearer {token}"),)
