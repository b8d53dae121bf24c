"""Text for terminals: escaped, aligned, with units; and the global options."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import UsageError
from probing.client.app import program
from probing.client.cluster import Cluster
from probing.client.render.rows import dump_json, plain, rows_of
from probing.client.render.table import Field, render
from probing.client.render.writers import fields_of
from probing.client.settings import node_list, read_token


@given(st.text())
def test_json_stays_json_and_is_safe(text: str) -> None:
    dumped = dump_json([{"x": text}])
    assert json.loads(dumped) == [{"x": text}]
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in dumped)


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        (pa.timestamp("ns"), 1_795_000_000_123_456_789, "2026-11-18 11:06:40.123Z"),
        (pa.timestamp("ns"), 1_795_000_000_000_000_000, "2026-11-18 11:06:40Z"),
        (pa.timestamp("us"), 1_795_000_000_123_456, "2026-11-18 11:06:40.123Z"),
        (pa.timestamp("us", "UTC"), 1_795_000_000_123_456, "2026-11-18 11:06:40.123Z"),
        (pa.timestamp("ns"), None, "-"),
        (pa.month_day_nano_interval(), (0, 0, 8_557_761_000), "8.56 s"),
        (pa.month_day_nano_interval(), (0, 1, 3600 * 10**9), "25h00m"),
        (pa.month_day_nano_interval(), (0, 0, -300 * 10**9), "-5m00s"),
        (pa.month_day_nano_interval(), (2, 0, 0), "P2MT0S"),
        (pa.duration("us"), 1_500, "1.50 ms"),
        (pa.month_day_nano_interval(), None, "-"),
    ],
)
def test_times_and_lengths_of_an_answer_are_short_in_a_table(kind: pa.DataType, value: object, shown: str) -> None:
    table = pa.table({"x": pa.array([value], kind)})
    assert render(fields_of(table.schema), rows_of(table), None).splitlines()[1] == shown


def test_tables_are_aligned_and_only_flexible_columns_are_cut() -> None:
    rows = [{"a": 1, "b": "训练", "c": "x" * 200}, {"a": 1000, "b": "\x1b[2J", "c": "y"}]
    fields = (Field("A", "a", right=True), Field("B", "b"), Field("C", "c", flex=True))
    text = render(fields, rows, 60)
    lines = text.splitlines()
    assert lines[0] == "   A  B        C"
    assert lines[1].startswith("   1  训练     xxx")
    assert lines[1].endswith("…")
    assert lines[2] == "1000  \\x1b[2J  y"
    assert "x" * 200 in render(fields, rows, None)


def test_rows_are_plain_data() -> None:
    table = pa.table(
        {
            "ts": pa.array([1_790_000_000_123_456_789, None], pa.timestamp("ns")),
            "us": pa.array([1, None], pa.timestamp("us")),
            "whole": pa.array([Decimal(2**70), None], pa.decimal128(38, 0)),
            "nan": [float("nan"), 1.5],
            "raw": [b"\x00\xff", None],
            "list": pa.array([[1_790_000_000_123_456_000], None], pa.list_(pa.timestamp("ns"))),
            "day": [date(2026, 1, 2), None],
        }
    )
    first, second = rows_of(table)
    assert first == {
        "ts": "2026-09-21T14:13:20.123456789Z",
        "us": "1970-01-01T00:00:00.000001000Z",
        "whole": 2**70,
        "nan": None,
        "raw": "00ff",
        "list": ["2026-09-21T14:13:20.123456Z"],
        "day": "2026-01-02",
    }
    assert second == {"ts": None, "us": None, "whole": None, "nan": 1.5, "raw": None, "list": None, "day": None}
    assert rows_of(pa.table([[1], [2]], names=["a", "a"])) == [{"a": 1, "a_1": 2}]


def test_intervals_are_iso() -> None:
    interval = pa.array([(1, 2, 3_500_000_000)], pa.month_day_nano_interval())
    assert rows_of(pa.table({"i": interval})) == [{"i": "P1M2DT3.5S"}]
    assert plain(timedelta(seconds=90)) == "PT90S"
    assert plain(datetime(2026, 1, 2)) == "2026-01-02T00:00:00Z"


@pytest.mark.parametrize(
    ("given_", "hoisted"),
    [
        (["ps", "-f", "json"], ["-f", "json", "ps"]),
        (["-f", "json", "ps"], ["-f", "json", "ps"]),
        (["query", "SELECT 1", "--all-nodes", "--strict"], ["--all-nodes", "--strict", "query", "SELECT 1"]),
        (["query", "--", "-f"], ["query", "--", "-f"]),
        (["nccl", "--job", "x", "-tHOST:1", "--format=json"], ["-tHOST:1", "--format=json", "nccl", "--job", "x"]),
        (["stacks", "-t"], ["-t", "stacks"]),
    ],
)
def test_global_options_stand_anywhere(given_: list[str], hoisted: list[str]) -> None:
    assert program().hoisted(given_) == hoisted


def test_nodes_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    assert node_list("unix:/a,127.0.0.1:1") == ("unix:/a", "127.0.0.1:1")
    file = tmp_path / "nodes"
    file.write_text("# ours\nunix:/a  # first\n\n127.0.0.1:1, 127.0.0.1:2\n")
    assert node_list(str(file)) == ("unix:/a", "127.0.0.1:1", "127.0.0.1:2")
    file.write_text("# none\n")
    for wrong in (str(file), str(tmp_path / "absent"), ","):
        with pytest.raises(UsageError):
            node_list(wrong)


def test_a_token_on_the_command_line_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    monkeypatch.setenv("PROBING_AUTH_TOKEN", "env")
    assert read_token(None, str(file)) == "secret"
    assert read_token(None, None) == "env"
    assert capsys.readouterr().err == ""
    assert read_token("given", None) == "given"
    assert "process list" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["unix:", "host", "host:0", "host:99999", "host:²", ":1", "http://x"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(UsageError):
        Cluster(address).node(address)


def test_a_token_never_travels_in_the_clear_to_another_host() -> None:
    for address in ("127.0.0.1:9", "[::1]:9"):
        assert Cluster(token="t").node(address).address == address
    with pytest.raises(UsageError, match="in the clear"):
        Cluster(token="t").node("10.0.0.1:9")
