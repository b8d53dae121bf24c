"""The corpus of attacks on real workers, past the gate as well: no file, bounded memory, gone at the deadline.

A share of it: `tests/soak/attack_workers.py` runs all, with the memory and the deadline of a real node.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attack_support import Collection, Place, Victim
from attacks import BEHIND, EXPENSIVE, HARMLESS, REFUSED
from long import LONG
from query_helpers import T0, operations

from probing.daemon.query.gate import check

NOW_NS = T0 + 60_000_000_000
MEMORY = 128 << 20
MOST = MEMORY * 12 // 10
# Two of five places, and of each kind the one that tells most.
RAW = [sql for sql in BEHIND if "/" not in sql or "{state}/" in sql] + [
    sql for name in ("reads files or other places", "writes") for sql in REFUSED[name][::4]
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("attacked"), operations(100)) as place:
        yield place


def test_behind_the_gate_no_file_is_opened_and_none_made(place: Place) -> None:
    victim = Victim(place, MEMORY)
    # The gate asks every fifth.
    for sql in RAW if LONG else RAW[::5]:
        how = victim.ask(place.of(sql), 0.3)
        assert place.events() == [], sql
        assert victim.opened() == set(), sql
        assert how != "gone", sql
        assert victim.grown() <= MOST, sql
        if how == "deadline" or victim.last:
            victim.close()
            victim = Victim(place, MEMORY)
    victim.close()


def test_what_the_gate_lets_through_stays_within_its_limits(place: Place) -> None:
    with Collection(place.root / "store", operations(10)) as collection:
        for attacks in EXPENSIVE.values():
            before = collection.appended
            victim = Victim(place, MEMORY)
            how = victim.ask(check(attacks[0], NOW_NS).sql, 0.3)
            assert how in ("end", "deadline", "QueryMemory", "QueryError"), attacks[0]
            assert victim.grown() <= MOST, attacks[0]
            victim.close()
            assert collection.appended > before
        assert collection.stored() == collection.appended


def test_what_only_looks_like_an_attack_is_answered(place: Place) -> None:
    victim = Victim(place, MEMORY)
    for sql in HARMLESS:
        assert victim.ask(check(sql, NOW_NS).sql, 60.0) == "end", sql
        if victim.last:
            victim.close()
            victim = Victim(place, MEMORY)
    victim.close()
