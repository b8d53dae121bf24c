"""Proposers change one register in a simulated network with faults: the committed values are one history."""

from __future__ import annotations

from itertools import pairwise

import pytest
from long import long_unless
from register_network import Change, Network, simulated, tokens_of, voters_of


@pytest.mark.parametrize("seeds", [long_unless(True, range(80)), long_unless(False, range(80, 880))])
@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_committed_values_are_one_history(count: int, seeds: range) -> None:
    moves = failures = 0
    for seed in seeds:
        network = simulated(seed, count)
        assert problems(network) == [], f"seed {seed} with {count} nodes"
        failures += len(network.failures)
        values = {change.committed.ballot: change.committed.value for change in network.changes}
        moves += len({tuple(voters_of(value)) for value in values.values() if value}) - 1
    assert moves > 100
    assert failures > 100


def test_a_seed_gives_the_same_run_each_time() -> None:
    first, second = simulated(7, 5), simulated(7, 5)
    assert first.changes == second.changes
    assert first.proposals == second.proposals


def problems(network: Network) -> list[str]:
    """What is wrong with the reported changes; the last ones were made without faults, on each node."""
    changes = sorted(network.changes, key=lambda change: change.committed.ballot)
    texts = [f"{ballot} has {len(values)} proposals" for ballot, values in network.proposals.items() if len(values) > 1]
    for before, after in pairwise(changes):
        if before.committed.ballot == after.committed.ballot and before.committed != after.committed:
            texts.append(f"two values are committed: {before} and {after}")
        tokens = tokens_of(before.committed.value)
        if tokens_of(after.committed.value)[: len(tokens)] != tokens:
            texts.append(f"{after} is not made from {before}")
    texts += [f"{change} is reported, but not made" for change in changes if not _is_made(change)]
    texts += [str(failure) for failure in network.failures if "is lost" in failure.message]
    by_time = sorted(changes, key=lambda change: change.ended)
    for change in changes:
        earlier = [other.committed.ballot for other in by_time if other.ended < change.started]
        if earlier and max(earlier) > change.committed.ballot:
            texts.append(f"{change} misses a change that was reported before it started")
    return texts


def _is_made(change: Change) -> bool:
    return not change.token or tokens_of(change.committed.value).count(change.token) == 1
