"""A token that is limited to a job: no number and no text of an answer tells of another job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from query_helpers import operations
from service_helpers import Service, serving

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

LIMITED, WHOLE = "0123456789abcdef-limited", "0123456789abcdef-whole"
TOKENS = f"""
[[token]]
name = "team"
jobs = ["mine"]
value = "{LIMITED}"
[[token]]
name = "ops"
value = "{WHOLE}"
"""
SECRET = "merger-with-acme"
COUNT = "SELECT count(*) AS n FROM comm.ops"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    path.chmod(0o640)
    with serving(tmp_path, f"--token_file={path}") as made:
        rows = operations(103)
        mine = [{**row, "job": "mine"} for row in rows[:3]]
        made.collector.files.segment("comm.ops", [*mine, *({**row, "job": SECRET} for row in rows[3:])])
        yield made


@pytest.fixture
def channel(service: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.tcp) as made:
        yield made


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def one_statement() -> pb.QueryRequest:
    return pb.QueryRequest(sql=COUNT)


def several_statements() -> pb.QueryRequest:
    return pb.QueryRequest(statements=[pb.Statement(name=name, sql=COUNT) for name in "ab"])


@pytest.mark.parametrize("request_of", [one_statement, several_statements])
def test_rows_of_other_jobs_are_not_counted(channel: grpc.Channel, request_of: Any) -> None:
    node = NodeStub(channel)
    ends = [list(node.Query(request_of(), metadata=bearer(t), timeout=60))[-1].end for t in (WHOLE, LIMITED)]
    assert [end.rows_scanned for end in ends] == [103, ends[1].rows]


def test_progress_counts_no_rows_of_other_jobs(channel: grpc.Channel) -> None:
    node = NodeStub(channel)
    sql = f"{COUNT}, range(1000000) a, range(1000000) b"

    def to_scan(token: str) -> int:
        stream = node.Query(pb.QueryRequest(sql=sql, progress=True), metadata=bearer(token), timeout=60)
        progress = next(part.progress for part in stream if part.HasField("progress"))
        stream.cancel()
        return int(progress.rows_to_scan)

    assert (to_scan(WHOLE), to_scan(LIMITED)) == (103, 0)


def degraded(*texts: str) -> dict[str, Any]:
    reason, of_source, detail = texts
    sources = [{"name": "diagnose", "state": "degraded", "reason": of_source, "rows": 7, "lost": 1, "detail": detail}]
    counts = {"store_bytes": 1 << 33, "processes": 64, "boot_id": "b"}
    return {"state": "degraded", "reason": reason, "sources": sources, **counts}


@pytest.mark.parametrize(
    "texts", [(SECRET, "", ""), ("", f"job {SECRET}: no answer", ""), ("", "", f"1 job: {SECRET}")], ids=str
)
def test_status_has_no_text_and_no_count_of_other_jobs(
    service: Service, channel: grpc.Channel, texts: tuple[str, str, str]
) -> None:
    service.collector.status = lambda _: (degraded(*texts), b"")  # type: ignore[method-assign]
    node = NodeStub(channel)
    whole, limited = (node.Status(pb.StatusRequest(), metadata=bearer(t), timeout=20) for t in (WHOLE, LIMITED))
    assert SECRET in str(whole)
    assert SECRET not in str(limited)
    assert (limited.state, limited.node, limited.boot_id, limited.engine) == ("degraded", "n0", "b", whole.engine)
    assert (limited.processes, limited.store_bytes) == (0, 0)
    (source,) = limited.sources
    assert (source.name, source.state, source.rows, source.lost) == ("diagnose", "degraded", 0, 0)
    assert bool(source.reason) == bool(texts[1])
