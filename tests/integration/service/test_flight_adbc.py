"""Arrow Flight SQL with the stock client of ADBC, over TLS, with tokens; and calls that no such client makes."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from adbc_driver_flightsql import DatabaseOptions, dbapi
from adbc_driver_manager import ProgrammingError
from authority import Authority
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples
from query_helpers import operations
from service_helpers import Service, serving
from waiting import until

from probing.api.proto.arrow.flight import Flight_pb2 as flight
from probing.api.proto.arrow.flight import FlightSql_pb2 as sql
from probing.api.proto.arrow.flight.Flight_pb2_grpc import FlightServiceStub
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import WARNINGS_KEY
from probing.daemon.service.flight.commands import packed

READER, TEAM = "reader-0123456789abcdef", "team-0123456789abcdef"
SECRET = "secret-job"
TOKENS = f"""
[[token]]
name = "reader"
value = "{READER}"
[[token]]
name = "team"
jobs = ["j"]
value = "{TEAM}"
"""
BEARER = (("authorization", f"Bearer {READER}"),)
METHODS = [method.name for method in flight.DESCRIPTOR.services_by_name["FlightService"].methods]
few = settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Scene:
    service: Service
    authority: Authority
    log: Path

    @contextlib.contextmanager
    def cursor(self, token: str = READER, **options: str) -> Iterator[Any]:
        """A cursor of ADBC over TCP; without a ``token``, ``options`` say who asks."""
        said = {DatabaseOptions.TLS_ROOT_CERTS.value: Path(self.authority.file).read_text(), **options}
        if token:
            said[DatabaseOptions.AUTHORIZATION_HEADER.value] = f"Bearer {token}"
        with connected(f"grpc+tls://{self.service.tcp}", said) as cursor:
            yield cursor


@contextlib.contextmanager
def connected(address: str, options: dict[str, str] | None = None) -> Iterator[Any]:
    with dbapi.connect(address, options, autocommit=True) as connection, connection.cursor() as cursor:
        yield cursor


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    authority = Authority(tmp_path_factory.mktemp("nodes"), "nodes")
    cert, key = authority.node("n0")
    root = Path(tempfile.mkdtemp(prefix="probingd-test-"))
    tokens = root / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o640)
    options = ("--flight=true", f"--tls.cert={cert}", f"--tls.key={key}", f"--token_file={tokens}")
    with serving(root, *options, log=root / "log") as service:
        rows = operations(500)
        service.collector.files.segment("comm.ops", [*rows, *({**row, "job": SECRET} for row in rows)])
        yield Scene(service, authority, root / "log")
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def raw(scene: Scene) -> Iterator[grpc.Channel]:
    """A channel with gRPC's usual bounds."""
    with scene.authority.channel(scene.service.tcp) as channel:
        yield channel


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM comm.ops ORDER BY job, seq",
        "SELECT job, avg(bytes) AS b, list(seq ORDER BY seq) AS s FROM comm.ops GROUP BY ALL ORDER BY ALL;",
        "SELECT NULL AS nothing, 'ä' AS text, 2 AS text FROM comm.ops WHERE rank < 0 -- a comment at the end",
    ],
)
def test_rows_are_those_of_a_query(scene: Scene, query: str) -> None:
    expected, _ = scene.service.query(query)
    with scene.cursor() as cursor:
        cursor.execute(query)
        assert cursor.fetch_arrow_table().equals(expected)
    with connected(f"grpc+unix://{scene.service.root}/s.sock") as cursor:
        cursor.execute(query)
        assert cursor.fetch_arrow_table().equals(expected)


def test_rows_are_the_same_where_batches_are_large(scene: Scene, raw: grpc.Channel) -> None:
    query = "SELECT range AS n, repeat('x', 2000) AS t FROM range(20000)"
    with scene.cursor() as cursor:
        cursor.execute(query)
        assert cursor.fetch_arrow_table().column("n").to_pylist() == list(range(20_000))
    ticket = flight.Ticket(ticket=packed(sql.TicketStatementQuery(statement_handle=query.encode())))
    bodies = [len(m.data_body) for m in FlightServiceStub(raw).DoGet(ticket, timeout=60, metadata=BEARER)]
    assert sum(bodies) > 20_000 * 2000


def test_a_user_and_the_token_as_password_are_enough(scene: Scene) -> None:
    said = {"username": "anybody", "password": READER}
    with scene.cursor("", **said) as cursor:
        cursor.execute("SELECT count(*) AS n FROM comm.ops")
        assert cursor.fetchall() == [(1000,)]


def test_tables_are_listed_as_the_node_knows_them(scene: Scene) -> None:
    docs, _ = scene.service.query("SELECT table_schema, table_name, live FROM probing.table_docs")
    known = {(row["table_schema"], row["table_name"], row["live"] == "view") for row in docs.to_pylist()}
    with scene.cursor() as cursor:
        connection = cursor.connection
        assert connection.adbc_get_table_types() == ["TABLE", "VIEW"]
        assert connection.adbc_get_info()["vendor_name"] == "probingd"
        (catalog,) = connection.adbc_get_objects(depth="all").read_all().to_pylist()
        listed = {
            (schema["db_schema_name"], table["table_name"], table["table_type"] == "VIEW"): table["table_columns"]
            for schema in catalog["catalog_db_schemas"]
            for table in schema["db_schema_tables"]
        }
        assert set(listed) == known
        cursor.execute("SELECT * FROM comm.ops LIMIT 0")
        ops = cursor.fetch_arrow_table().schema
        assert [column["column_name"] for column in listed["comm", "ops", False]] == ops.names
        assert connection.adbc_get_table_schema("ops", db_schema_filter="comm").equals(ops)
        quoted = "x' OR table_name LIKE '%"
        found = connection.adbc_get_objects(depth="tables", table_name_filter=quoted).read_all().to_pylist()
        assert not any(schema["db_schema_tables"] for one in found for schema in one["catalog_db_schemas"] or ())


FAILURES: dict[str, tuple[Callable[[Any], object], str]] = {
    "insert": (lambda c: c.execute("INSERT INTO comm.ops SELECT 1"), "INSERT is not allowed, only SELECT"),
    "delete of many": (lambda c: c.executemany("DELETE FROM comm.ops WHERE pid = ?", [(1,)]), "DELETE is not allowed"),
    "an update": (lambda c: c.executescript("DROP TABLE comm.ops"), "Flight SQL answers only SELECTs"),
    "bulk rows": (lambda c: c.adbc_ingest("x", pa.table({"n": [1]})), "Flight SQL answers only SELECTs"),
    "syntax": (lambda c: c.execute("SELEC 1"), r"syntax: .*line 1, column 7"),
    "no column": (lambda c: c.execute("SELECT nope FROM comm.ops"), 'Referenced column "nope" not found'),
    "no table": (lambda c: c.execute("SELECT 1 FROM comm.opps"), "there is no table comm.opps .*comm.ops"),
    "a file": (lambda c: c.execute("SELECT * FROM read_csv('/etc/passwd')"), "the function .* is not allowed"),
    "out of the brackets": (lambda c: c.execute("SELECT 1) UNION (SELECT 2"), "syntax|not allowed"),
    "a parameter": (lambda c: c.execute("SELECT ?", (1,)), "PLACEHOLDER is not allowed"),
    "empty": (lambda c: c.execute(" "), "the query is empty"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_says_what_is_wrong(scene: Scene, name: str) -> None:
    attempt, message = FAILURES[name]
    with scene.cursor() as cursor:
        with pytest.raises(ProgrammingError, match=message):
            attempt(cursor)
        # The connection goes on.
        cursor.execute("SELECT 1")
        assert cursor.fetchall() == [(1,)]


def test_a_wrong_token_gets_nothing(scene: Scene, raw: grpc.Channel) -> None:
    # One call each: the answer takes a second, and with the header alone ADBC makes three.
    wrong = (("authorization", f"Bearer {READER[:-1]}"),)
    with pytest.raises(grpc.RpcError, match="the token is wrong"):
        FlightServiceStub(raw).GetFlightInfo(flight.FlightDescriptor(), timeout=20, metadata=wrong)
    with pytest.raises(ProgrammingError, match="the token is wrong"), scene.cursor("", username="a", password="x" * 23):
        pass
    until(
        lambda: (
            f"a call asked by tcp: 127.0.0.1, uid {os.getuid()}: refused: the token is wrong" in scene.log.read_text()
        )
    )


def test_a_token_of_a_job_sees_its_rows_and_lists_tables(scene: Scene) -> None:
    with scene.cursor(TEAM) as cursor:
        cursor.execute("SELECT job, count(*) AS n FROM comm.ops GROUP BY job")
        assert cursor.fetchall() == [("j", 500)]
        assert cursor.connection.adbc_get_objects(depth="tables").read_all().num_rows == 1
        with pytest.raises(ProgrammingError, match="the token is limited to jobs"):
            cursor.execute("SELECT * FROM gpu.devices")


def test_several_clients_at_once(scene: Scene) -> None:
    def ask(number: int) -> list[tuple[int, int]]:
        found = []
        with scene.cursor() as cursor:
            for turn in range(2):
                cursor.execute(f"SELECT count(*) + {number} AS n, {turn} AS t FROM comm.ops")
                found += cursor.fetchall()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [[(1000 + n, t) for t in range(2)] for n in range(4)]


def test_warnings_are_sent_at_the_end(raw: grpc.Channel) -> None:
    ticket = packed(sql.TicketStatementQuery(statement_handle=b"SELECT count(*) AS n FROM global.comm.ops"))
    answer = FlightServiceStub(raw).DoGet(flight.Ticket(ticket=ticket), timeout=60, metadata=BEARER)
    assert len(list(answer)) == 2
    assert b"only this node was asked" in dict(answer.trailing_metadata())[WARNINGS_KEY]


def test_calls_of_other_clients(raw: grpc.Channel) -> None:
    stub = FlightServiceStub(raw)
    command = packed(sql.CommandStatementQuery(query="SELECT pid, op FROM comm.ops"))
    descriptor = flight.FlightDescriptor(type=flight.FlightDescriptor.CMD, cmd=command)
    schema = pa.ipc.read_schema(pa.py_buffer(stub.GetSchema(descriptor, timeout=60, metadata=BEARER).schema))
    assert schema == pa.schema([("pid", pa.int32()), ("op", pa.string())])
    info = stub.PollFlightInfo(descriptor, timeout=60, metadata=BEARER).info
    assert info == stub.GetFlightInfo(descriptor, timeout=60, metadata=BEARER)
    actions = {one.type for one in stub.ListActions(flight.Empty(), timeout=60, metadata=BEARER)}
    assert actions == {"CreatePreparedStatement", "ClosePreparedStatement"}
    assert list(stub.ListFlights(flight.Criteria(), timeout=60, metadata=BEARER)) == []
    for kind in ("Catalogs", "PrimaryKeys", "ExportedKeys", "ImportedKeys", "CrossReference", "XdbcTypeInfo"):
        asked = packed(getattr(sql, f"CommandGet{kind}")())
        got = list(stub.DoGet(flight.Ticket(ticket=asked), timeout=60, metadata=BEARER))
        assert len(got) == (2 if kind == "XdbcTypeInfo" else 1)
    basic = base64.b64encode(f"u:{READER}".encode()).decode()
    hands = stub.Handshake(iter(()), timeout=60, metadata=(("authorization", f"Basic {basic}"),))
    assert dict(hands.initial_metadata())["authorization"] == f"Bearer {READER}"
    assert list(hands) == []


HUGE = flight.Ticket(ticket=b"x" * (300 << 10)).SerializeToString()
REFUSED: dict[str, tuple[str, bytes, grpc.StatusCode, str]] = {
    "malformed": ("DoGet", b"\xff" * 50, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
    "a malformed command": ("DoGet", b"\x0a\x02\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
    "a large ticket": ("DoGet", HUGE, grpc.StatusCode.INVALID_ARGUMENT, "260 KiB"),
    "a ticket above the bound of requests": (
        "DoGet",
        b"x" * (2 << 20),
        grpc.StatusCode.INVALID_ARGUMENT,
        "at most 1048576 are read",
    ),
    "a ticket above the bound of gRPC": (
        "DoGet",
        b"x" * (3 << 20),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "larger than max",
    ),
    "an unknown action": ("DoAction", b"\x0a\x04Nope", grpc.StatusCode.UNIMPLEMENTED, "'Nope' is not answered"),
    "no statement": (
        "GetFlightInfo",
        b"",
        grpc.StatusCode.INVALID_ARGUMENT,
        "accepts no Flight descriptor with a path",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(raw: grpc.Channel, name: str) -> None:
    method, data, code, text = REFUSED[name]
    with pytest.raises(grpc.RpcError) as caught:
        list(raw.unary_stream(f"/arrow.flight.protocol.FlightService/{method}")(data, timeout=20, metadata=BEARER))
    assert caught.value.code() is code
    assert text in caught.value.details()


@pytest.mark.parametrize("method", ["DoPut", "DoExchange"])
def test_a_writer_that_sends_nothing_is_refused_at_once(raw: grpc.Channel, method: str) -> None:
    refused = threading.Event()

    def silence() -> Iterator[flight.FlightData]:
        refused.wait(60)
        yield from ()

    call = getattr(FlightServiceStub(raw), method)(silence(), timeout=60, metadata=BEARER)
    with pytest.raises(grpc.RpcError, match="Flight SQL answers only SELECTs"):
        list(call)
    refused.set()


@few
@given(data=st.binary(max_size=300), method=st.sampled_from(METHODS))
def test_random_bytes_change_nothing(scene: Scene, raw: grpc.Channel, data: bytes, method: str) -> None:
    with contextlib.suppress(grpc.RpcError):
        path = f"/arrow.flight.protocol.FlightService/{method}"
        list(raw.unary_stream(path)(data, timeout=20, metadata=BEARER))
    assert scene.service.node.Status(pb.StatusRequest(), timeout=20).node == "n0"


def test_no_token_is_in_the_log(scene: Scene) -> None:
    text = scene.log.read_text()
    assert f"doget asked by tcp: 127.0.0.1, uid {os.getuid()} (reader): done" in text
    assert not any(token in text for token in (READER, TEAM))
