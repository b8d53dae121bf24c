"""Holistic Trace Analysis reads what ``timeline -o DIR`` writes, and gets what SQL gets from the same rows.

`make hta` installs it into .build/hta and runs this.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from timeline_scene import MS, Tables, operation, step, timeline_of

from probing.client.timeline.kineto import write_kineto

_PYTHON = Path(__file__).parents[2] / ".build" / "hta" / "bin" / "python"
_STEP = 100 * MS
_STEPS = 23
# How late each rank calls.
_LATE = {0: 0, 1: MS, 2: 0, 3: 30 * MS, 4: 2 * MS}


@pytest.fixture(scope="module")
def tables() -> Tables:
    ops = [
        operation(rank, n, n * _STEP + 10 * MS + late, took=37 * MS - late)
        for n in range(_STEPS)
        for rank, late in _LATE.items()
    ]
    pair = {"comm": "1", "comm_name": "tp", "comm_size": 2, "op": "broadcast"}
    ops += [operation(rank, n, n * _STEP + 60 * MS, took=7 * MS, **pair) for n in range(_STEPS) for rank in (1, 4)]
    # Nobody knows how long this took.
    ops += [operation(0, 99, 5 * _STEP, t_done_lo=None, timing_source="sync")]
    return Tables(
        {
            "comm.ops": ops,
            "train.steps": [step(rank, n, n * _STEP, (n + 1) * _STEP) for rank in _LATE for n in range(_STEPS)],
        }
    )


@pytest.fixture(scope="module")
def found(tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("hta")
    paths = write_kineto(timeline_of(tables), directory)
    assert len(paths) == len(_LATE)
    words = (str(_PYTHON), str(Path(__file__).with_name("analysis.py")), str(directory))
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_it_finds_the_ranks_and_steps(found: dict[str, Any]) -> None:
    assert found["ranks"] == list(_LATE)
    # It leaves the last step out.
    assert found["steps"] == list(range(_STEPS - 1))


def test_it_names_the_rank_that_starts_late(found: dict[str, Any]) -> None:
    assert found["stragglers"] == [3]


def test_times_of_communication_are_those_of_sql(found: dict[str, Any], tables: Tables) -> None:
    wanted = tables.db.sql(f"""
        SELECT CASE op WHEN 'all_reduce' THEN 'AllReduce' ELSE 'Broadcast' END, rank,
          sum(epoch_ns(t_done_hi) - epoch_ns(t_start))::BIGINT // 1000
        FROM comm.ops WHERE timing_source = 'exact' AND seq < {_STEPS - 1} GROUP BY op, rank
    """).fetchall()
    shown = [(name.split("_")[1].split()[0], rank, us) for name, rank, us in found["us_by_kernel"]]
    assert sorted(shown) == sorted(wanted)
    assert all("seen from the host" in name for name, _, _ in found["us_by_kernel"])
    assert found["us_by_kind"] == {"COMMUNICATION": sum(us for _, _, us in wanted)}
    # There is no computation to overlap with.
    assert found["overlap"] == [0.0] * len(_LATE)
