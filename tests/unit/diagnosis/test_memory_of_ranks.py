"""Growth of memory that ends at a limit, and ranks that have more than the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest
from diagnosis_cases import ago, facts, node, rank
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Condition, Exit, Facts, Rank, Series
from probing.diagnosis.rules import memory
from probing.diagnosis.rules.memory import find, growths
from probing.diagnosis.verdict import Finding

MB, GB = 1 << 20, 1 << 30


def series(
    size: Callable[[int], float],
    count: int = 40,
    every: float = 10,
    name: str = "rss_bytes",
    limit: float | None = None,
) -> Series:
    times = tuple(ago((count - 1 - i) * every) for i in range(count))
    return Series(name, times, tuple(size(i) for i in range(count)), limit)


def leaking(mb: float, start: float = GB) -> Callable[[int], float]:
    """Returns a size that grows by ``mb`` a reading, with noise."""
    rng = random.Random(7)
    return lambda i: start + i * mb * MB + rng.uniform(-3, 3) * MB


def flat(start: float = GB) -> Callable[[int], float]:
    return leaking(0, start)


def limited(gb: float, cgroup: str = "/job") -> Condition:
    return Condition(memory_limit_bytes=round(gb * GB), cgroup=cgroup)


def found_in(made: Facts) -> list[Finding]:
    return list(find(Case(made)))


def ids(made: Facts) -> list[tuple[str, list[int]]]:
    return [(f.verdict.id, [c.rank for c in f.culprits]) for f in found_in(made)]


def test_a_leak_is_named_before_it_ends() -> None:
    made = facts(
        rank(0, series=(series(flat()),), condition=limited(2, "/a")),
        rank(1, series=(series(leaking(10)),), condition=limited(2, "/b")),
    )
    (finding,) = found_in(made)
    assert (finding.verdict.id, finding.severity, finding.confidence) == ("memory_growth", "warning", 0.8)
    # 2 GB less 1.38 GB, at 60.0 MiB a minute.
    assert finding.sentence == (
        "rank 1 (node a, pid 4001) runs out of memory in about 11 min: resident memory grows by 60.0 MiB a minute"
    )
    assert finding.culprits[0].why == (
        "its resident memory grows by 60.0 MiB a minute and reaches the limit of its cgroup, 2 GiB, in 11 min"
    )


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (flat(), "it does not grow"),
        (leaking(1), "too little"),
        (lambda i: GB + min(i, 12) * 20 * MB, "it has ended"),
        (lambda i: GB + (i % 10) * 60 * MB, "it goes up and down"),
        (lambda i: GB if i < 20 else 2 * GB, "one step"),
        (lambda i: (0.1 + min(i, 3)) * GB, "the start of a process"),
    ],
)
def test_growth_that_is_no_leak(size: Callable[[int], float], why: str) -> None:
    assert why
    assert ids(facts(rank(0, series=(series(size),), condition=limited(2.5)))) == []


def test_a_limit_that_is_far_away_or_not_known() -> None:
    assert ids(facts(rank(0, series=(series(leaking(10)),), condition=limited(400)))) == []
    assert ids(facts(rank(0, series=(series(leaking(10)),), condition=Condition()))) == []
    (note,) = found_in(facts(rank(0, series=(series(leaking(10)),))))
    assert (note.severity, note.culprits) == ("note", ())
    assert note.sentence == "rank 0 (node a, pid 4000) uses more and more resident memory: 60.0 MiB a minute"


def test_nineteen_readings_are_too_few() -> None:
    def made(count: int) -> Facts:
        return facts(rank(0, series=(series(leaking(20), count),), condition=limited(2)))

    assert (ids(made(19)), ids(made(20))) == ([], [("memory_growth", [0])])


def test_ranks_of_a_node_share_its_memory() -> None:
    ranks = [rank(n, series=(series(leaking(10)),)) for n in range(4)]
    made = facts(*ranks, nodes=[node("a", ranks, memory_available_bytes=2 * GB)])
    (finding,) = found_in(made)
    assert [c.rank for c in finding.culprits] == [0, 1, 2, 3]
    # 2 GB at four times 60.0 MiB a minute.
    assert finding.sentence.startswith("ranks 0-3 run out of memory in about 8.5 min: ")
    assert finding.confidence == 0.6


def test_memory_of_a_device() -> None:
    made = facts(rank(0, series=(series(leaking(100), name="device_bytes", limit=10 * GB),)))
    (finding,) = found_in(made)
    assert "device memory" in finding.sentence
    assert finding.culprits[0].why.endswith("reaches the limit of the device, in 8.9 min")


def test_a_rank_with_twice_the_memory() -> None:
    made = facts(*(rank(n, series=(series(flat(2.2 * GB if n == 1 else GB)),)) for n in range(3)))
    (finding,) = found_in(made)
    assert finding.verdict.id == "memory_imbalance"
    assert (
        finding.sentence == "rank 1 (node a, pid 4001) has 2.20 GiB of resident memory, 2.2 times as much as the others"
    )
    assert [c.rank for c in finding.culprits] == [1]


def test_a_rank_alone_on_a_device_where_the_others_have_nothing() -> None:
    used = [series(lambda _, size=size: size, name="device_bytes") for size in (GB, 0, 0)]
    (finding,) = found_in(facts(*(rank(r, series=(own,)) for r, own in enumerate(used))))
    assert finding.sentence.endswith("has 1 GiB of device memory, and the others have none")


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_the_median_of_the_others(values: list[int]) -> None:
    for at, value in enumerate(values):
        assert memory._median_without(sorted(values), value) == median([*values[:at], *values[at + 1 :]])


def test_a_series_of_very_many_readings_is_thinned_out() -> None:
    own = series(leaking(0.02), count=15_000, every=1)
    (growth,) = growths(Case(facts(rank(0, series=(own,)))), "rss_bytes")
    assert growth.rate == pytest.approx(0.02 * MB / 1e9, rel=0.1)


def test_a_rank_with_a_little_more_or_little_memory_in_all() -> None:
    assert ids(facts(*(rank(n, series=(series(flat(1.3 * GB if n == 1 else GB)),)) for n in range(3)))) == []
    assert ids(facts(*(rank(n, series=(series(flat(300 * MB if n == 1 else 100 * MB)),)) for n in range(3)))) == []


def test_a_leak_is_no_imbalance_also_while_it_is_young() -> None:
    ranks = [rank(n, series=(series(leaking(100) if n == 1 else flat(), 15),)) for n in range(3)]
    assert ids(facts(*ranks)) == []


def test_half_of_the_ranks_with_more_have_other_parts_of_the_model() -> None:
    ranks = [rank(n, series=(series(flat(GB if n < 2 else 3 * GB)),)) for n in range(4)]
    assert ids(facts(*ranks)) == []


def test_a_rank_that_ended_leaks_no_more() -> None:
    gone = rank(0, series=(series(leaking(10)),), condition=limited(2), exit=Exit(ago(1), 0))
    assert ids(facts(gone)) == []


def test_one_reading_and_none() -> None:
    assert (
        ids(facts(Rank(0, "a", 7, 7, series=(Series("rss_bytes", (), ()),)), rank(1, series=(series(flat(), 1),))))
        == []
    )


@settings(deadline=None, max_examples=examples(50))
@given(seed=st.integers(0, 1 << 30), count=st.integers(2, 64), noise=st.floats(0, 0.3))
def test_memory_that_wanders_is_no_leak(seed: int, count: int, noise: float) -> None:
    rng = random.Random(seed)
    own = series(lambda _: GB * (1 + rng.uniform(-noise, noise)), count)
    assert ids(facts(rank(0, series=(own,), condition=limited(1.5)))) == []
