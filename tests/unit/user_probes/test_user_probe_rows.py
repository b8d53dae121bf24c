"""Events of users' probes as rows, and the tables that these rows are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import Processes
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ConfigError, FormatError
from probing.api.tables import TABLES
from probing.api.tables.user import COLUMN_TYPES, user_table, user_table_from, user_table_to
from probing.daemon.clock import ClockPair
from probing.daemon.processes.procfs import clean_text
from probing.daemon.source import Identity
from probing.daemon.user_probes.c_text import record_dtype
from probing.daemon.user_probes.running import rows_of
from probing.daemon.user_probes.spec import Attach, Field, Spec
from probing.daemon.user_tables import MAX_TABLES, UserTables

PLACE = Attach("uprobe", "f", "libc.so.6", "read")


def spec(*fields: Field, name: str = "p") -> Spec:
    return Spec(name, "Doc.", "trainers", 10, (PLACE,), fields, "")


def number(name: str, kind: str = "u64") -> Field:
    return Field(name, kind, f"What {name} is.")


KNOWN = Processes(Identity(7, 30, "j", "r", "trainer", 5))


def events(of: Spec, *rows: dict[str, Any]) -> np.ndarray[Any, Any]:
    records = np.zeros(len(rows), record_dtype(of))
    for record, row in zip(records, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    return records


def test_rows_have_who_and_when_and_the_widest_numbers() -> None:
    limits = {"u8": 2**8 - 1, "u16": 2**16 - 1, "u32": 2**32 - 1, "u64": 2**64 - 1, "i32": -(2**31), "i64": -(2**63)}
    of = spec(*(number(f"c_{kind}", kind) for kind in limits), Field("said", "text", "T.", 8))
    head = {"probing_time_ns": 100, "probing_start_ns": 30, "probing_tgid": 7, "probing_tid": 8}
    rows = events(
        of,
        {**head, "said": b"a\0b", **{f"c_{kind}": value for kind, value in limits.items()}},
        {**head, "probing_tgid": 9, "said": b"\xff\x1b[31m\n"},
        {**head, "said": b""},
    )
    batch = rows_of(of, of.table, rows, ClockPair(50, 60, 1050), "n", KNOWN)
    batch.validate(full=True)
    assert batch.schema.equals(of.table.physical)
    assert batch["ts"].cast(pa.int64()).to_pylist() == [1100] * 3
    shown = batch.drop_columns(["ts"]).to_pylist()
    who = {"node": "n", "job": "j", "run": "r", "pid": 7, "start_ns": 30, "tid": 8, "rank": 5}
    assert shown[0] == {**who, **{f"c_{kind}": value for kind, value in limits.items()}, "said": "a"}
    assert [shown[1][name] for name in ("pid", "job", "run", "rank")] == [9, None, None, None]
    assert shown[1]["said"].isprintable()
    assert shown[2]["said"] is None


@given(texts=st.lists(st.binary(max_size=16), min_size=1, max_size=20))
def test_texts_of_targets_are_clean(texts: list[bytes]) -> None:
    of = spec(Field("said", "text", "T.", 16))
    records = events(of, *({"said": text} for text in texts))
    said = rows_of(of, of.table, records, ClockPair(0, 0, 0), "n", KNOWN)["said"].to_pylist()
    assert len(said) == len(texts)
    assert all(text is None or text == clean_text(text) for text in said)


def test_rows_fit_a_table_that_has_more_columns(tmp_path: Path) -> None:
    tables = UserTables(tmp_path / "t.json")
    tables.define(spec(number("a"), number("b")).table)
    narrow = spec(number("b"), number("c", "i32"))
    table = tables.define(narrow.table)
    assert table.logical.names[-3:] == ["b", "c", "a"]
    batch = rows_of(narrow, table, events(narrow, {"b": 3, "c": -4}), ClockPair(0, 0, 0), "n", KNOWN)
    assert batch.select(["a", "b", "c"]).to_pylist() == [{"a": None, "b": 3, "c": -4}]


def test_tables_are_kept_and_never_change_a_type(tmp_path: Path) -> None:
    tables = UserTables(tmp_path / "t.json")
    assert dict(tables) == TABLES
    tables.define(spec(number("a")).table)
    tables.define(spec(number("b", "text"), name="q").table)
    again = UserTables(tmp_path / "t.json")
    assert again.described() == tables.described()
    assert set(again) == {*TABLES, "user.p", "user.q"}
    assert len(again) == len(TABLES) + 2
    assert again["user.p"] == tables["user.p"]
    assert again["comm.ops"] is TABLES["comm.ops"]
    with pytest.raises(ConfigError, match=r"user\.p\.a was u64 and would now be i64"):
        again.define(spec(number("a", "i64")).table)
    with pytest.raises(ConfigError, match="would have 65 columns"):
        again.define(spec(*(number(f"c{i}") for i in range(64))).table)
    assert UserTables(tmp_path / "t.json").described() == tables.described()


def test_a_file_of_tables_that_makes_no_sense_costs_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    for text in ("", "{}", "[1]", '[{"name": "p", "doc": "", "columns": [["a", "f64", ""]]}]', "[" * 10_000):
        path.write_text(text)
        tables = UserTables(path)
        assert tables.described() == []
    assert "cannot be read" in caplog.text
    tables.define(spec(number("a")).table)
    assert json.loads(path.read_text())[0]["name"] == "p"


def test_there_are_only_so_many_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([user_table_to(user_table(f"t{i}", "", [])) for i in range(MAX_TABLES)]))
    tables = UserTables(path)
    tables.define(spec(number("a"), name="t0").table)
    with pytest.raises(ConfigError, match="256 tables"):
        tables.define(spec(number("a")).table)


names = st.from_regex(r"[a-z][a-z0-9_]{0,40}", fullmatch=True)


@given(name=names, columns=st.dictionaries(names, st.sampled_from(sorted(COLUMN_TYPES)), max_size=8))
def test_a_table_is_the_same_as_json(name: str, columns: dict[str, str]) -> None:
    try:
        table = user_table(name, "D", [(column, kind, "d") for column, kind in columns.items()])
    except FormatError:
        assert columns.keys() & {"node", "ts", "job", "run", "pid", "start_ns", "tid", "rank"}
        return
    assert user_table_from(json.loads(json.dumps(user_table_to(table)))) == table


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "doc", "columns"]), inner),
    max_leaves=12,
)


@given(value=json_values)
def test_what_is_no_table_is_refused(value: Any) -> None:
    try:
        table = user_table_from(value)
    except FormatError:
        return
    assert table.name.startswith("user.")
