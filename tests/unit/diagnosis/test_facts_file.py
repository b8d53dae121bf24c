"""Facts as JSON: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import FormatError, UsageError
from probing.diagnosis.facts import (
    VERSION,
    Communicator,
    Condition,
    Exit,
    Facts,
    Frame,
    Helper,
    Member,
    Missing,
    NodeFacts,
    Operation,
    Process,
    Progress,
    Rank,
    Sample,
    Series,
    Step,
    Thread,
)
from probing.diagnosis.facts_file import RANK_BYTES, from_json, load, save, size_of, to_json

FRAME = Frame("all_reduce", "/torch/distributed/distributed_c10d.py", 2806, values=(("op", "SUM"), ("group", "None")))
THREAD = Thread(4711, "MainThread", True, "S", False, (FRAME, Frame("poll", native=True)), 17, True)
OPERATION = Operation("0", 13, "all_reduce", 1_795_000_000_000_000_000, None, "started", "float32", 3, async_op=False)
RANK = Rank(
    1,
    "b",
    4711,
    990_000_000,
    exit=Exit(5, signal=9, oom=True),
    open=(OPERATION,),
    done=(OPERATION, OPERATION),
    progress=(Progress("0", 13, "all_reduce", 13, 7),),
    threads=(THREAD,),
    condition=Condition("S", "pipe_read", cpu_quota=1.5, neighbours=(("hog", 5, 7), ("other", 6, 1))),
    helpers=(Helper(4712, 3, "data_loader", "D", Exit(4, 1), (THREAD,), Condition("D")),),
    samples=(Sample((FRAME,), 0.75, False),),
    steps=(Step(1, 2, 3, None, 5),),
    series=(Series("rss_bytes", (1, 2, 3), (1.0, math.inf, -math.inf)),),
    logs=("a line",),
    env=(("WORLD_SIZE", "2"),),
)
FACTS = Facts(
    "job",
    "0-abcdef",
    2,
    10.0,
    99,
    (NodeFacts("b", 99, 1, 2, -3, 4),),
    (RANK,),
    (Communicator("0", "default_pg", "gloo", 2, (Member(0, 0), Member(1, 1)), "world", aborted=False),),
    (Process("b", 4000, 1, "launcher", "S"),),
    (Missing("node", "node c did not answer", node="c"),),
    5,
    ((1, 2), (3, 4)),
)


def test_facts_survive_json() -> None:
    assert from_json(to_json(FACTS)) == FACTS


def test_a_value_that_is_no_number_survives_in_a_series() -> None:
    rank = Rank(0, "a", 1, 1, series=(Series("loss", (1,), (math.nan,)),))
    [found] = from_json(to_json(Facts("j", "r", 1, 10.0, 0, (), (rank,)))).ranks
    assert math.isnan(found.series[0].values[0])


def test_fields_with_defaults_take_no_room() -> None:
    assert json.loads(to_json(Facts("j", "r", None, 10.0, 0, (), ()))) == {
        "job": "j",
        "run": "r",
        "world_size": None,
        "stall_s": 10.0,
        "taken_ns": 0,
        "nodes": [],
        "ranks": [],
        "version": VERSION,
    }


def test_text_that_is_no_unicode_is_replaced() -> None:
    assert from_json(to_json(Facts("j\udc80", "r", None, 10.0, 0, (), ()))).job == "j?"


def test_a_file_holds_several_facts(tmp_path: Path) -> None:
    other = Facts("other", "r", None, 2.0, 0, (), ())
    save(tmp_path / "facts", [FACTS, other])
    assert load(tmp_path / "facts") == [FACTS, other]


@pytest.mark.parametrize("drop", [1, 2, 100])
def test_a_cut_file_is_refused(tmp_path: Path, drop: int) -> None:
    save(tmp_path / "facts", [FACTS])
    whole = (tmp_path / "facts").read_bytes()
    (tmp_path / "facts").write_bytes(whole[:-drop])
    with pytest.raises(FormatError) as e:
        load(tmp_path / "facts")
    assert "cut or damaged" in e.value.hint


def test_a_file_that_lacks_a_whole_entry_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "facts", [FACTS, FACTS])
    lines = (tmp_path / "facts").read_bytes().splitlines(keepends=True)
    (tmp_path / "facts").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(FormatError, match="1 entries, but its header says 2"):
        load(tmp_path / "facts")


def test_another_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "facts").write_bytes(b'{"a": 1}\n')
    with pytest.raises(FormatError, match="is not a file of facts"):
        load(tmp_path / "facts")
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none")


def test_another_version_has_a_hint() -> None:
    changed = json.loads(to_json(FACTS)) | {"version": VERSION + 1}
    with pytest.raises(FormatError, match=f"version {VERSION + 1}") as e:
        from_json(json.dumps(changed).encode())
    assert "version that wrote it" in e.value.hint


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"job": 1}, "job: no text"),
        ({"job": "\ud800"}, "half a character"),
        ({"world_size": True}, "world_size: no integer"),
        ({"world_size": 1 << 64}, "world_size: no integer"),
        ({"stall_s": "inf"}, "stall_s: no number"),
        ({"ranks": {}}, "ranks: no list"),
        ({"ranks": [{"rank": 1}]}, r"ranks\[0\]: without node"),
        ({"ranks": [None] * 16385}, "more than 16384 ranks"),
        ({"step_history": [[1, 2, 3]]}, r"step_history\[0\]: 3 values instead of 2"),
        ({"communicators": [{"comm": "0", "name": None, "backend": 5, "size": 1, "members": []}]}, "backend: no text"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        from_json(json.dumps(json.loads(to_json(FACTS)) | change).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"version":1e999}', b"1" * 5000, b'{"a":NaN}'])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        from_json(data)


def test_a_rank_that_is_too_large_is_refused() -> None:
    large = Rank(0, "a", 1, 1, logs=("x" * RANK_BYTES,))
    assert size_of(large) > RANK_BYTES
    with pytest.raises(FormatError, match="a rank of more than"):
        from_json(to_json(Facts("j", "r", 1, 10.0, 0, (), (large,))))


@pytest.mark.parametrize("stall_s", [0, -1, 1e300])
def test_a_stall_of_no_sensible_length_is_refused(stall_s: float) -> None:
    with pytest.raises(FormatError, match="stall_s is"):
        from_json(json.dumps(json.loads(to_json(FACTS)) | {"stall_s": stall_s}).encode())


def test_a_series_has_a_time_for_each_value() -> None:
    changed = json.loads(to_json(FACTS))
    changed["ranks"][0]["series"][0]["values"].pop()
    with pytest.raises(FormatError, match="3 times for 2 values"):
        from_json(json.dumps(changed).encode())


def test_an_unknown_field_is_left_out() -> None:
    assert from_json(json.dumps(json.loads(to_json(FACTS)) | {"colour": "red"}).encode()) == FACTS


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=examples(300))
def test_no_change_of_the_bytes_does_worse_than_a_format_error(data: st.DataObject) -> None:
    changed = bytearray(to_json(FACTS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=8))
    _read_or_refused(bytes(changed))


@given(st.data())
@settings(max_examples=examples(300))
def test_no_change_of_a_value_does_worse_than_a_format_error(data: st.DataObject) -> None:
    changed = json.loads(to_json(FACTS))
    place: Any = changed
    while isinstance(place, (dict, list)) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if data.draw(st.booleans()) or not isinstance(place[key], (dict, list)):
            place[key] = data.draw(_ANY)
            break
        place = place[key]
    _read_or_refused(json.dumps(changed).encode())


def _read_or_refused(data: bytes) -> None:
    try:
        found = from_json(data)
    except FormatError:
        return
    assert json.loads(to_json(found))
