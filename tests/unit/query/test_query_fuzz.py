"""The gate before queries at random, and a worker's reader of requests before bytes at random.

`tests/soak/fuzz_queries.py` goes on for minutes, with a worker.
"""

from __future__ import annotations

import contextlib
import io
import json

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples, long_unless
from query_grammar import NESTS, check_gate, check_work, mutants, nests, queries

from probing.api.errors import InternalError
from probing.daemon.query.job import Job

# The same ones each time; the soak has others.
_QUICK = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@settings(_QUICK, max_examples=examples(80))
@given(queries())
def test_what_the_gate_prints_of_any_query_is_one_select_of_our_tables(sql: str) -> None:
    check_gate(sql)


@settings(_QUICK, max_examples=examples(150))
@given(mutants())
def test_mutated_attacks_get_no_further(sql: str) -> None:
    check_gate(sql)


@pytest.mark.parametrize("depth", [long_unless(depth == 31, depth) for depth in (5, 13, 31, 61)])
@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: nest[0].strip() or nest[1])
def test_the_work_of_the_gate_is_bounded_by_the_length_of_a_query(nest: tuple[str, str], depth: int) -> None:
    before, after = nest
    check_work("select " + before * depth + "1" + after * depth)


@settings(_QUICK, max_examples=examples(150))
@given(nests())
def test_constructs_inside_each_other_take_no_more_work_than_others(sql: str) -> None:
    check_work(sql)


def _stream() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("a", pa.int64()), ("b", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([[1, 2, None], ["x", None, "z"]], names=["a", "b"]))
    return sink.getvalue()


_ARROW = _stream()
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
_specs = st.fixed_dictionaries(
    {"statements": _values, "segments": _values, "parts": _values, "max_bytes": _values}, optional={"users": _values}
)


@settings(_QUICK, max_examples=examples(100))
@given(_specs, _values, st.integers(-2, 2))
def test_a_request_of_any_shape_is_unpacked_or_refused(spec: object, live: object, more: int) -> None:
    text = json.dumps(spec).encode()
    with contextlib.suppress(InternalError):
        Job.unpack({"spec_bytes": len(text) + more, "live": live}, text + _ARROW)


@settings(_QUICK, max_examples=examples(150))
@given(st.lists(st.tuples(st.integers(0, len(_ARROW) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_live_rows_with_changed_bytes_are_rows_or_refused(changes: list[tuple[int, int]], data: st.DataObject) -> None:
    rows = bytearray(_ARROW)
    for at, value in changes:
        rows[at] = value
    del rows[data.draw(st.integers(0, len(rows))) :]
    spec = json.dumps({"statements": ["SELECT 1"], "segments": {}, "parts": [], "max_bytes": 1}).encode()
    try:
        job = Job.unpack({"spec_bytes": len(spec), "live": [["t", len(rows)]]}, spec + bytes(rows))
    except InternalError:
        return
    for table in job.live.values():
        table.validate(full=True)
