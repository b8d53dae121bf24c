"""SELECTs at random over worlds at random: many nodes answer as one database does. `make selects` runs thousands."""

from __future__ import annotations

from random import Random

import pytest
from federation_support import Nodes
from select_grammar import select, world

_EACH = 8


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_are_those_of_the_union(seed: int) -> None:
    random = Random(seed)
    nodes = Nodes(world(random))
    try:
        for _ in range(_EACH):
            nodes.check(select(random))
    finally:
        nodes.close()
