"""Flight's messages: streams cut into FlightData, and commands that no client would send."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pyarrow as pa
import pytest
from google.protobuf.any_pb2 import Any
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import ProbingError, QueryError, QueryRejected, QueryTimeout, UsageError
from probing.api.proto.arrow.flight import Flight_pb2 as flight
from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.daemon.query.answer import End, Item
from probing.daemon.service.flight.catalog import sql_info, type_info
from probing.daemon.service.flight.commands import MAX_COMMAND, command_of, packed, statement_of, unpacked
from probing.daemon.service.flight.framing import MAX_BODY, MAX_MESSAGE, messages_of, table_messages

few = settings(max_examples=examples(40), deadline=None)
END = End(3, 7, ["a segment is missing"])


def stream_of(table: pa.Table, rows: int = 1 << 20) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def table_of(messages: list[flight.FlightData]) -> pa.Table:
    """Reads messages as a client does: header and body make a message of a stream."""
    data = [struct.pack("<iI", -1, len(m.data_header)) + m.data_header + m.data_body for m in messages]
    return pa.ipc.open_stream(b"".join(data) + struct.pack("<iI", -1, 0)).read_all()


def cut(data: bytes, sizes: list[int]) -> Iterator[Item]:
    """``data`` in pieces of ``sizes``, again and again, then an End."""
    start, turn = 0, 0
    while start < len(data):
        yield data[start : start + sizes[turn % len(sizes)]]
        start, turn = start + sizes[turn % len(sizes)], turn + 1
    yield END


def answered(items: Iterator[Item]) -> tuple[list[flight.FlightData], list[End]]:
    found = [part for part, _ in messages_of(items)]
    return [m for m in found if not isinstance(m, End)], [m for m in found if isinstance(m, End)]


@few
@given(
    numbers=st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1), max_size=50),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    rows=st.integers(1, 20),
)
def test_any_pieces_give_the_same_rows(numbers: list[int | None], sizes: list[int], rows: int) -> None:
    columns = {"n": pa.array(numbers, pa.int64()), "l": pa.array([[str(n)] if n else None for n in numbers])}
    table = pa.table({**columns, "d": pa.array([str(n) for n in numbers]).dictionary_encode()})
    messages, ends = answered(cut(stream_of(table, rows), sizes))
    assert table_of(messages).equals(table)
    assert ends == [END]


@pytest.mark.parametrize("widths", [[100] * 60_000, [3 << 20, 10, 10, 2 << 20, 5]], ids=["even", "skewed"])
def test_large_batches_are_cut_for_clients_with_usual_bounds(widths: list[int]) -> None:
    table = pa.table({"t": ["x" * width for width in widths], "n": range(len(widths))})
    messages, _ = answered(cut(stream_of(table), [1 << 20]))
    assert table_of(messages).equals(table)
    largest = max(len(m.data_body) for m in messages)
    assert largest <= max(MAX_BODY, max(widths) + 1024)
    assert len(messages) > 2


def test_an_error_between_the_pieces_stays_what_it_is() -> None:
    data = stream_of(pa.table({"n": range(1000)}))

    def items() -> Iterator[Item]:
        yield data[:500]
        raise QueryTimeout("the query did not end in time")

    found = []
    with pytest.raises(QueryTimeout, match="did not end in time"):
        found.extend(messages_of(items()))
    assert len(found) == 1


def test_a_batch_that_is_too_large_is_an_error_before_it_is_read() -> None:
    data = bytearray(stream_of(pa.table({"n": range(100)})))
    data[4:8] = struct.pack("<I", MAX_MESSAGE + 8)
    with pytest.raises(QueryError, match=r"a batch of 64\.0 MiB is too large"):
        list(messages_of(iter([bytes(data)])))


@few
@given(data=st.binary(max_size=200), at=st.integers(0, 2000))
def test_a_damaged_stream_is_an_error_or_rows(data: bytes, at: int) -> None:
    good = stream_of(pa.table({"n": range(100), "t": ["x"] * 100}), 20)
    damaged = good[:at] + data + good[at + len(data) :]
    with contextlib.suppress(OSError, QueryError, pa.ArrowException):
        list(messages_of(iter([damaged])))


@few
@given(data=st.binary(max_size=400), kind=st.sampled_from(["", "CommandStatementQuery", "CommandGetTables", "X"]))
def test_hostile_commands_are_refused_or_understood(data: bytes, kind: str) -> None:
    url = f"type.googleapis.com/arrow.flight.protocol.sql.{kind}"
    command = Any(type_url=url, value=data).SerializeToString() if kind else data
    for source in (flight.Ticket(ticket=command), flight.FlightDescriptor(type=2, cmd=command)):
        with contextlib.suppress(UsageError, QueryRejected):
            statement_of(command_of(source))
    with pytest.raises(UsageError):
        unpacked(command, sql.ActionCreatePreparedStatementRequest)


def test_commands_that_are_not_answered_say_why() -> None:
    def refusal(data: bytes) -> str:
        with pytest.raises(ProbingError) as caught:
            statement_of(command_of(flight.Ticket(ticket=data)))
        return caught.value.message

    for write in (sql.CommandStatementUpdate(query="DROP"), sql.CommandStatementIngest(table="t")):
        assert "read-only" in refusal(packed(write))
    assert "not a command that this node answers" in refusal(packed(sql.CommandStatementSubstraitPlan()))
    assert "not a command that this node answers" in refusal(b"")
    assert "transactions" in refusal(packed(sql.CommandStatementQuery(query="SELECT 1", transaction_id=b"1")))
    assert "malformed" in refusal(packed(sql.TicketStatementQuery(statement_handle=b"\xff\xfe")))
    assert "260 KiB" in refusal(b"x" * (MAX_COMMAND + 1))
    with pytest.raises(UsageError, match="accepts no Flight descriptor with a path"):
        command_of(flight.FlightDescriptor(type=1, path=["comm", "ops"]))


def test_what_the_server_is_has_the_types_of_the_protocol() -> None:
    all_of_it = sql_info("1.2.3", ())
    assert table_of(list(table_messages(all_of_it))).equals(all_of_it)
    found = dict(zip(*(column.to_pylist() for column in all_of_it.columns), strict=True))
    assert found[sql.FLIGHT_SQL_SERVER_VERSION] == "1.2.3"
    assert found[sql.FLIGHT_SQL_SERVER_READ_ONLY] is True
    assert sql_info("1", [sql.FLIGHT_SQL_SERVER_NAME, 99_999]).to_pydict()["value"] == ["probingd"]
    assert type_info(sql.XDBC_BIGINT).column("type_name").to_pylist() == ["BIGINT", "UBIGINT"]
    assert type_info(None).column("data_type").to_pylist() == sorted(type_info(None).column("data_type").to_pylist())
