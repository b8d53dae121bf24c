"""The comparisons of the check on a GPU: each difference between rows and a truth is a problem, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_kit import comparisons
from gpu_kit.figures import durations, ratio, read_times, times_between
from gpu_kit.smi import bounds, read_double, read_smi

CALLS = [
    {"op": "all_reduce", "count": 23, "root": None, "peer": None},
    {"op": "broadcast", "count": 7, "root": 0, "peer": None},
    {"op": "send", "count": 5, "root": None, "peer": 1},
]
ROWS = [
    {"op": "all_reduce", "count": 23, "root": None, "peer": None, "done_lo": 100, "done_hi": 200},
    {"op": "broadcast", "count": 7, "root": 0, "peer": None, "done_lo": None, "done_hi": 300},
    {"op": "send", "count": 5, "root": None, "peer": 1, "done_lo": 300, "done_hi": 400},
]


def test_rows_that_are_the_calls() -> None:
    assert comparisons.operations(CALLS, ROWS) == []


@pytest.mark.parametrize(
    ("row", "change", "problem"),
    [
        (0, {"count": 24}, "all_reduce 0: "),
        (1, {"root": 1}, "broadcast 1: "),
        (2, {"peer": 0}, "send 2: "),
        (2, {"op": "recv"}, "recv: 1 instead of 0"),
    ],
)
def test_a_row_with_another_argument(row: int, change: dict[str, object], problem: str) -> None:
    rows = [{**known, **(change if number == row else {})} for number, known in enumerate(ROWS)]
    (first, *_) = comparisons.operations(CALLS, rows)
    assert first.startswith(problem)


def test_a_row_that_is_missing_or_comes_twice() -> None:
    assert comparisons.operations(CALLS, ROWS[:2]) == ["send: 0 instead of 1"]
    assert comparisons.operations(CALLS, [*ROWS, ROWS[2]]) == ["send: 2 instead of 1"]


def test_ends_inside_and_outside_of_the_interval() -> None:
    # An end is known to within an interval itself, and a row without a lower bound claims none.
    assert comparisons.ends([(90, 110), (10, 10), (405, 410)], ROWS, slack_ns=5) == []
    assert comparisons.ends([None, None, None], ROWS, slack_ns=0) == []
    (late,) = comparisons.ends([(9_000, 9_001), None, None], ROWS, slack_ns=5)
    assert late == "all_reduce 0 ended 9 us after done_hi"
    (early,) = comparisons.ends([None, None, (-9_000, -8_700)], ROWS, slack_ns=5)
    assert early == "send 2 ended 9 us before done_lo"
    (none,) = comparisons.ends([(1, 1)], [{**ROWS[0], "done_hi": None}])
    assert none == "all_reduce 0 has no end"


def test_the_truth_of_the_double() -> None:
    lines = [
        {"event": "made"},
        {"event": "call", "id": 1, "inside": 10},
        {"event": "call", "id": 2, "inside": 20},
        {"event": "call", "id": 3, "inside": 30},
        {"event": "end", "id": 3, "end": 35},
        {"event": "end", "id": 2, "end": 36},
        {"event": "end", "id": 1, "end": 11},
    ]
    assert comparisons.truth_ends(lines, 20, 1000) == [(1036, 1036), (1035, 1035)]


def test_the_flight_recorder() -> None:
    entries = [
        {"profiling_name": "nccl:all_reduce", "input_sizes": [[1]], "time_created_ns": 5},
        {"profiling_name": "nccl:all_reduce", "input_sizes": [[23]], "time_created_ns": 10},
        {"profiling_name": "nccl:broadcast", "input_sizes": [[7, 1]], "time_created_ns": 11},
        {"profiling_name": "nccl:send 0->1", "input_sizes": [[5]], "time_created_ns": 12},
        {"profiling_name": "nccl:recv 0<-1", "input_sizes": [[5]], "time_created_ns": 13},
    ]
    calls = comparisons.calls_of_recorder(entries, 10)
    assert [(call["op"], call["count"], call["peer"]) for call in calls] == [
        ("all_reduce", 23, None),
        ("broadcast", 7, None),
        ("send", 5, 1),
        ("recv", 5, 1),
    ]
    assert comparisons.recorded_operations(entries[:4], 10, ROWS) == []
    assert comparisons.recorded_operations(entries, 10, ROWS) == ["recv: 0 instead of 1"]
    assert comparisons.recorded_operations(None, 10, ROWS) == ["this torch has no flight recorder"]


def test_the_ratio_of_pairs() -> None:
    found = ratio([1.01] * 20, [1.0] * 20)
    assert (round(found.percent, 6), round(found.low, 6), round(found.high, 6), found.pairs) == (1.0, 1.0, 1.0, 20)
    assert str(found) == "+1.00 % (+1.00 to +1.00, 20 pairs)"
    wide = ratio([1.0, 1.1, 0.9], [1.0] * 3)
    assert wide.low < wide.percent < wide.high
    with pytest.raises(ValueError, match="no pairs"):
        ratio([], [])


def test_times_that_a_job_wrote(tmp_path: Path) -> None:
    file = tmp_path / "times"
    assert read_times(file) == []
    # The last number is not whole yet.
    file.write_bytes(b"".join((number * 10**9).to_bytes(8, "little") for number in (1, 2, 4)) + b"\1")
    times = read_times(file)
    assert times == [10**9, 2 * 10**9, 4 * 10**9]
    assert durations(times) == [1.0, 2.0]
    assert times_between(times, 2 * 10**9, 5 * 10**9) == times[1:]


def test_the_output_of_nvidia_smi(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    values = "GPU-1, NVIDIA H100 80GB HBM3, 81559, 7, 23, 71.50, 31, 1980, 2619, 700.00"
    absent = "GPU-2, NVIDIA H100 80GB HBM3, 81559, 7, [N/A], [Not Supported], 31, 1980, 2619, 700.00"
    tool.write_text(f"#!/bin/sh\necho '{values}'\necho '{absent}'\n")
    tool.chmod(0o755)
    first, second = read_smi(str(tool))
    assert (first["uuid"], first["used_bytes"], first["power_w"]) == ("GPU-1", 7 << 20, 71.5)
    assert (second["gpu_util_pct"], second["power_w"]) == (None, None)
    assert bounds([first, {**first, "power_w": 80.0}], "power_w", 1.5) == (70.0, 81.5)
    assert bounds([second], "power_w", 1.5) is None
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    with pytest.raises(RuntimeError, match="No devices were found"):
        read_smi(str(tool))


def test_the_values_of_the_double(tmp_path: Path) -> None:
    from doubles.nvml_double import NvmlDouble, recorded

    double = NvmlDouble(tmp_path / "libnvidia-ml.so.1", recorded(2))
    found = read_double(tmp_path / "nvml.values")
    assert [reading["uuid"] for reading in found] == [double.values[f"gpu{number}.uuid"] for number in range(2)]
    assert found[1]["power_w"] == float(double.values["gpu1.power_mw"]) / 1000
