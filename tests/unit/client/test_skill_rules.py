"""Rules of skills over known rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.client.diagnosis.skill import condition_of

ROWS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "ranks": [
        {"rank": 3, "ms": 40.0, "slow": 4, "all": 10, "state": "Dead at last", "text": "7"},
        {"rank": 0, "ms": 20.0, "slow": 0, "all": 0, "state": None, "text": "x"},
        {"rank": 1, "ms": 10.0, "slow": 1, "all": 2, "state": "alive", "text": "9"},
    ],
}


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("always", True),
        ("step:none | rows == 0", True),
        ("step:ranks | rows == 0", False),
        ("step:ranks | rows >= 3 | rows < 4 | always", True),
        ("step:ranks | rows > 10 * 0.2", True),
        ("step:ranks | rows > 10 * 0.3", False),
        ("step:never_ran | rows == 0", False),
        ("step:ranks | column:ms | value == 40", True),
        ("step:ranks | column:ms | value < 40", False),
        ("step:ranks | column:ms | max > 39.5", True),
        ("step:ranks | column:ms | top > 40", False),
        ("step:ranks | column:ms | avg > 23", True),
        ("step:ranks | column:ms | max/min(ratio) > 3.9", True),
        ("step:ranks | column:slow | max/min(ratio) > 1e9", True),
        ("step:none | column:ms | max/min(ratio) > 0", False),
        ("step:none | column:ms | value == 0", False),
        ("step:ranks | column:slow | ratio(slow/all) > 0.3", True),
        ("step:ranks | column:slow | ratio(slow/nothing) > 0", False),
        ("step:ranks | column:ms | last > 0.4 * avg(ms)", True),
        ("step:ranks | column:ms | last > 2 * avg(ms)", False),
        ("step:ranks | column:state | any_contains('dead', \"stale\")", True),
        ("step:ranks | column:state | any_contains('stale')", False),
        ("step:ranks | column:state | value = Dead at last", True),
        ("step:ranks | column:text | max > 8", True),
        ("step:ranks | top(row).ms > 1.9 * median(ms)", True),
        ("step:ranks | top(row).ms > 2 * median(ms)", False),
        ("step:none | top(row).ms > 0 * median(ms)", False),
    ],
)
def test_clauses(when: str, expected: bool) -> None:
    assert condition_of(when)(ROWS) is expected


@pytest.mark.parametrize(
    "when",
    [
        "",
        "rows == 0",
        "always | rows == 0",
        "step:a | nonsense",
        "step:a | rows = 1",
        "step:a | column:b",
        "step:a | column:b | slope > 1",
        "step:a | column:b | max > x",
        "step:a | rows > 2 * {unknown}",
        "step:a | column:b | value > __import__('os')",
    ],
)
def test_what_is_no_rule(when: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        condition_of(when)


@given(st.text(max_size=80) | st.from_regex(r"step:a \| (rows|column:b \| \w+) ?[<>=]+ ?[\d.e*+-]+", fullmatch=True))
def test_any_text_is_a_rule_or_a_value_error(when: str) -> None:
    try:
        found = condition_of(when)({"a": [{"b": 1}], "ranks": []})
    except ValueError:
        return
    assert found in (True, False)
