"""Tests that failed and passed three times alone are recorded; a second record is a failure of `make test-all`."""

from __future__ import annotations

import json
from pathlib import Path

from run_again import failed_tests, record, recorded, unstable_twice

FIRST, SECOND = "tests/kernel/test_a.py::test_one[a b]", "tests/e2e/test_b.py::test_two"


def test_a_test_that_was_unstable_in_two_runs_is_named(tmp_path: Path) -> None:
    assert recorded(tmp_path) == []
    record([FIRST, SECOND], "abc1234", tmp_path / "cache")
    assert unstable_twice(recorded(tmp_path / "cache")) == []
    record([FIRST], "def5678", tmp_path / "cache")
    assert len(recorded(tmp_path / "cache")) == 3
    assert unstable_twice(recorded(tmp_path / "cache")) == [FIRST]


def test_the_tests_that_failed_are_those_of_the_run(tmp_path: Path) -> None:
    assert failed_tests(tmp_path) == []
    file = tmp_path / "v" / "cache" / "lastfailed"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({FIRST: True, SECOND: True}))
    assert failed_tests(tmp_path) == sorted([FIRST, SECOND])
