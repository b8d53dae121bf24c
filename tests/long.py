"""How much a run of the tests covers: the gate (`make test`), or everything (`make test-all`).

A test marked ``long`` runs in `make test-all` only. Where a test's length is a number of random examples or of
interpreters, the gate takes a part of them.
"""

from __future__ import annotations

import os

import pytest

__all__ = ("LONG", "examples", "long", "long_unless")

LONG = bool(os.environ.get("PROBINGD_TEST_LONG"))
long = pytest.mark.long
_GATE_SHARE = 5
_GATE_LEAST = 10


def examples(number: int) -> int:
    """Returns the number of random examples of a test: ``number`` at length, a fifth in the gate but at least ten."""
    return number if LONG else min(number, max(_GATE_LEAST, number // _GATE_SHARE))


def long_unless(in_gate: bool, *values: object) -> object:
    """Returns a parameter set of ``values`` that is marked ``long`` unless it is ``in_gate``."""
    return pytest.param(*values, marks=() if in_gate else long)
