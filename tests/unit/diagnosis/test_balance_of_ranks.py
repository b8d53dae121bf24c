"""The shares of a step: they add up, waits go to whom they were waited for, and unknown parts stay unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.balance import Pair, RankTimes, balance, reads_or_writes

MS = 1_000_000
STEPS = 97


def rank(number: int, *, comm: int | None = 40, io: float | None = 0.1, **more: int) -> RankTimes:
    """97 steps of 100 ms, in 40 ms of each of which an operation runs; a tenth of its samples load data."""
    ns = None if comm is None else comm * MS * STEPS
    return RankTimes(number, "a", 100 + number, STEPS, 100 * MS * STEPS, ns, io, **more)


def waits(number: int, last: int, wait: int, ops: int = STEPS, role: str = "dp") -> Pair:
    """Each of ``ops`` operations took the rank ``wait + 5`` ms, 5 of them after the last arrival."""
    return Pair("0", role, number, last, ops, (wait + 5) * MS * ops, wait * MS * ops)


def test_one_rank_that_is_always_last() -> None:
    times = [rank(0), rank(1), rank(2, comm=5)]
    found = balance(times, [waits(0, 2, 35), waits(1, 2, 35), waits(2, 2, 0)])
    quick, _, slow = found.ranks
    shares = [quick.compute, quick.communication, quick.wait, quick.io]
    assert shares == pytest.approx([0.5, 0.05, 0.35, 0.1])
    assert [slow.compute, slow.communication, slow.wait, slow.io] == pytest.approx([0.85, 0.05, 0.0, 0.1])
    assert (quick.last_share, quick.waits_for, slow.last_share, slow.waits_for) == (0.0, 2, 1.0, None)
    assert found.uneven == pytest.approx(1.7)
    assert found.sentences == (
        "work is uneven: rank 2 computes 85 ms a step, rank 0 computes 50 ms: 1.7 times",
        "ranks 0-1 wait for rank 2, up to 35% of the step; it arrives last in 100% of the operations",
    )
    (role,) = found.roles
    assert (role.role, role.ranks, role.last, role.last_share) == ("dp", (0, 1, 2), 2, 1.0)
    assert role.wait == pytest.approx(0.7 / 3)


def test_ranks_that_are_late_in_turn() -> None:
    pairs = [waits(0, 1, 30, 48), waits(1, 1, 0, 48), waits(0, 0, 0, 49), waits(1, 0, 30, 49)]
    found = balance([rank(0), rank(1)], pairs)
    assert found.sentences[0] == "work is even: the ranks differ by 0% at most"
    assert found.sentences[2].endswith("it arrives last in 49% of the operations: no rank is always late")


def test_what_is_not_known_stays_so() -> None:
    (own,) = balance([rank(0, comm=None, io=None)], []).ranks
    assert (own.compute, own.communication, own.wait, own.io, own.gpu_wait, own.last_share) == (None,) * 6
    (own,) = balance([rank(0, io=None, gpu_wait_ns=25 * MS * STEPS)], []).ranks
    assert (own.compute, own.communication, own.wait, own.gpu_wait) == (0.6, 0.4, None, 0.25)
    nothing = balance([], [])
    assert (nothing.ranks, nothing.roles, nothing.uneven, nothing.sentences) == ((), (), None, ())


def test_roles_are_kept_apart() -> None:
    tensor = [waits(0, 1, 10, role="tp"), waits(1, 1, 0, role="tp")]
    dp, tp = balance([rank(0), rank(1)], [*tensor, waits(0, 0, 0), waits(1, 0, 20)]).roles
    assert (dp.role, dp.last, tp.role, tp.last) == ("dp", 0, "tp", 1)
    assert (dp.wait, tp.wait) == (pytest.approx(0.1), pytest.approx(0.05))


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("read", "/x/torch/utils/data/dataloader.py"), ("train", "/home/train.py")], True),
        ([("save", "/x/torch/serialization.py")], True),
        ([("Trainer.save_checkpoint", "/home/trainer.py"), ("main", "/home/train.py")], True),
        ([("forward", "/home/model.py")], False),
        ([], False),
    ],
)
def test_what_counts_as_io(frames: list[tuple[str, str]], expected: bool) -> None:
    assert reads_or_writes(frames) is expected


_NS = st.integers(0, 2**62)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), _NS, st.none() | _NS, st.none() | st.floats(0, 1), st.integers(0, 9)), max_size=8
    ),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 99), _NS, _NS), max_size=20),
)
def test_shares_of_any_times_lie_between_0_and_1(
    times: list[tuple[int, int, int | None, float | None, int]], pairs: list[tuple[int, int, int, int, int]]
) -> None:
    ranks = [RankTimes(n, "a", n, steps, ns, comm, io) for n, ns, comm, io, steps in times]
    found = balance(ranks, [Pair("0", "dp", n, last, ops, comm, min(comm, wait)) for n, last, ops, comm, wait in pairs])
    for own in found.ranks:
        parts = (own.compute, own.communication, own.wait, own.io)
        assert all(part is None or 0.0 <= part <= 1.0 for part in parts)
        if None not in parts:
            assert sum(part for part in parts if part is not None) == pytest.approx(1.0)
