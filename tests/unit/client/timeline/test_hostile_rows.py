"""Rows that a target or a node made to harm, and rows that make no sense: nothing of them acts, and nothing fails."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples
from perfetto_reader import read
from timeline_scene import BEGIN, JOB, MS, SECOND, Tables, finding, loss, operation, sample, stack, step, timeline_of

from probing.client.timeline.chrome import write_chrome
from probing.client.timeline.columns import write_columns
from probing.client.timeline.kineto import CATEGORY, write_kineto
from probing.client.timeline.perfetto import write_perfetto
from probing.client.timeline.reading import Timeline
from probing.federation.execution.clocks import Offset

YEAR = 365 * 86_400 * SECOND
NASTY = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "escapes": "\x1b]0;owned\x07\x1b[2J\r\n\t\x00",
    "right to left": "\u202eelif\u202c \u2066x\u2069",
    "long": "x" * 1_000_003,
    "quotes": '"]}, {"ph": "X"} \\',
    "sql": "'; DROP TABLE comm.ops; --",
    "digits": "9" * 5003,
    "no text": "\ufffe\U0010ffff",
}
_SEVEN = 7


def nasty_rows(text: str) -> dict[str, list[dict[str, Any]]]:
    named = {"run": text, "comm": text, "comm_name": text, "op": text, "error": text, "backend": text, "state": text}
    return {
        "comm.ops": [operation(0, n, n * SECOND, timing_source=text, **named) for n in range(_SEVEN)],
        "train.steps": [step(0, 3, 0, SECOND)],
        "python.samples": [sample(0, 5, SECOND, thread=text)],
        "python.stacks": [stack(5, (text, text, 3))],
        "diagnosis.findings": [finding(SECOND, None, sentence=text, verdict=text, severity=text, run=text, ranks=text)],
        "probing.losses": [loss(SECOND, 2 * SECOND, node="alpha", reason=text, table_name=text)],
        "net.interfaces": [
            {"node": "alpha", "ts": BEGIN, "interface": text, "kind": None, "rx_gbps": value}
            for value in (1.0, float("nan"), float("-inf"))
        ],
    }


def unsafe(text: str) -> bool:
    return any(not char.isprintable() for char in text) or len(text) > 1100


@pytest.mark.parametrize("kind", NASTY)
def test_texts_are_shown_cut_and_escaped(kind: str, tmp_path: Path) -> None:
    text = NASTY[kind].replace("\x00", "")
    tables = Tables(nasty_rows(text))
    sink = io.BytesIO()
    write_perfetto(timeline_of(tables), sink)
    trace = read(sink.getvalue())
    assert len(trace.of("operation")) == _SEVEN
    shown = [path[-1] for path in trace.tracks] + [
        value for value in trace.attributes.values() if isinstance(value, str)
    ]
    for event in [*trace.slices, *trace.points]:
        shown += [event.name, *(str(value) for value in event.args.values()), *(frame[0] for frame in event.stack)]
    assert not [one for one in shown if unsafe(one)]
    assert len(sink.getvalue()) < 100_000

    sink = io.BytesIO()
    write_chrome(timeline_of(tables), sink)
    events = json.loads(sink.getvalue())["traceEvents"]
    assert sum(1 for event in events if event.get("cat") == "operation" and event["ph"] == "X") == _SEVEN
    assert {event["ph"] for event in events} <= set("XMibestfC")
    assert len(sink.getvalue()) < 200_000
    # JSON that a page may hold: no character of it ends a line or turns it round.
    assert sink.getvalue().isascii()

    sink = io.BytesIO()
    write_columns(timeline_of(tables), sink)
    assert len(sink.getvalue()) < 100_000

    paths = write_kineto(timeline_of(tables), tmp_path)
    for path in paths:
        assert path.resolve().is_relative_to(tmp_path)
        assert json.loads(path.read_bytes())["distributedInfo"]["rank"] == 0


def all_formats(taken: Callable[[], Timeline], tmp_path: Path) -> int:
    """Writes each format, and returns the number of operations, which is the same in all."""
    sink = io.BytesIO()
    write_perfetto(taken(), sink)
    trace = read(sink.getvalue())
    for event in trace.slices:
        assert event.end is None or event.end >= event.begin
    sink = io.BytesIO()
    write_chrome(taken(), sink)
    events = json.loads(sink.getvalue(), parse_constant=pytest.fail)["traceEvents"]
    assert all(event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0 for event in events)
    write_columns(taken(), io.BytesIO())
    write_kineto(taken(), tmp_path)
    found = len(trace.of("operation"))
    assert sum(1 for event in events if event.get("cat") == "operation" and event["ph"] in "XBi") == found
    return found


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables({})


_TIMES = st.one_of(st.none(), st.integers(-(2**63) + 1, 2**63 - 1), st.integers(BEGIN - SECOND, BEGIN + 90 * SECOND))
_NUMBERS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 7))


@settings(
    max_examples=examples(50),
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "seq": _NUMBERS,
                "bytes": _NUMBERS,
                "t_start": _TIMES,
                "t_done_lo": _TIMES,
                "t_done_hi": _TIMES,
                "rank": st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
                "comm_size": st.one_of(st.none(), st.integers(-3, 3)),
                "comm": st.sampled_from([None, "", "0", "1"]),
                "op": st.sampled_from([None, "", "send"]),
                "state": st.sampled_from([None, "done", "strange"]),
            }
        ),
        max_size=23,
    ),
    st.lists(st.tuples(_TIMES, _TIMES, _NUMBERS), max_size=5),
)
def test_numbers_that_make_no_sense(
    tables: Tables,
    tmp_path: Path,
    operations: list[dict[str, Any]],
    steps: list[tuple[int | None, int | None, int | None]],
) -> None:
    ops = [operation(n % 5, 0, n * MS) | values for n, values in enumerate(operations)]
    stepped = [step(0, 0, 0, 1, t_start=low, t_end=high) | {"step": number} for low, high, number in steps]
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    tables.put("comm.ops", ops)
    tables.put("train.steps", stepped)
    assert all_formats(lambda: timeline_of(tables), directory) == len(ops)


def test_a_range_without_rows(tmp_path: Path) -> None:
    assert all_formats(lambda: timeline_of(Tables({}), present=True), tmp_path) == 0


@pytest.mark.parametrize("ahead", [YEAR, -YEAR, 5 * SECOND, -5 * SECOND], ids=["year", "year ago", "5 s", "5 s behind"])
def test_the_rows_of_a_node_whose_clock_is_off_are_those_of_the_range(ahead: int) -> None:
    ops = [
        operation(rank, n, n * SECOND, node_ahead=ahead if rank > 2 else 0) for n in range(-7, 71) for rank in range(5)
    ]
    clocks = {"alpha": Offset(3, 1000), "beta": Offset(ahead, 1000)}
    sink = io.BytesIO()
    write_perfetto(timeline_of(Tables({"comm.ops": ops}, clocks)), sink)
    trace = read(sink.getvalue())
    assert len(trace.of("operation")) == 60 * 5
    for events in trace.by_flow().values():
        assert len(events) == 5
        assert max(event.begin for event in events) - min(event.begin for event in events) == 3


def test_rows_of_another_job_or_time_are_left_out() -> None:
    ops = [operation(0, n, n * SECOND) for n in (-1, 0, 59, 60)] + [operation(0, 7, SECOND, job="other")]
    sink = io.BytesIO()
    write_perfetto(timeline_of(Tables({"comm.ops": ops})), sink)
    assert sorted(event.args["seq"] for event in read(sink.getvalue()).of("operation")) == [0, 59]
    assert JOB != "other"


def test_more_names_than_a_dictionary_holds() -> None:
    rows = [operation(0, n, n * MS, state=f"state {n}") for n in range(307)]
    taken = timeline_of(Tables({"comm.ops": rows}))
    write_columns(taken, io.BytesIO())
    assert len(taken.names.states.entries) == 255
    assert taken.names.states.entries.values[-1] == "(others)"


def test_more_findings_and_stacks_than_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probing.client.timeline.reading._MOST_FINDINGS", 5)
    monkeypatch.setattr("probing.client.timeline.reading._MOST_STACKS", 3)
    rows = {
        "diagnosis.findings": [finding(n * SECOND, None) for n in range(7)],
        "python.samples": [sample(0, n, n * SECOND) for n in range(11)],
        "python.stacks": [stack(n, (f"f{n}", "/a.py", 1)) for n in range(11)],
    }
    taken = timeline_of(Tables(rows))
    sink = io.BytesIO()
    write_perfetto(taken, sink)
    trace = read(sink.getvalue())
    slices = [event for event in trace.of("finding") if event.path == ("findings",)]
    assert [event.begin for event in slices] == [BEGIN + n * SECOND for n in range(2, 7)]
    assert taken.notes == ["only the last 5 findings are shown"]
    assert trace.attributes["left_out/0"] == taken.notes[0]
    names = [event.name for event in trace.of("sample")]
    assert (len(names), sum(name.startswith("(one of more than") for name in names)) == (11, 8)


def test_processes_of_one_rank_with_equal_pids_have_files_of_their_own(tmp_path: Path) -> None:
    rows = [operation(0, n, n * SECOND, start_ns=n // 2) for n in range(8)]
    paths = write_kineto(timeline_of(Tables({"comm.ops": rows})), tmp_path)
    assert len(set(paths)) == 4
    seqs = [
        event["args"]["seq"]
        for path in paths
        for event in json.loads(path.read_bytes())["traceEvents"]
        if event.get("cat") == CATEGORY
    ]
    assert sorted(seqs) == list(range(8))
