"""The order of hooks, and who finds no place: one owner's findings never cost another owner's."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.daemon import backoff
from probing.daemon.diagnose.hooks import MAX_TRIES, MAX_WAITING, HookQueue

STRANGER, VICTIM = "uid 65534", "uid 1000"


def row(owner: str, job: int | str, number: int | str = 0, **more: Any) -> dict[str, Any]:
    return {"job": f"{owner}:{job}", "run": "r", "finding_id": str(number), **more}


def owner_of(job: str, run: str) -> Hashable:
    del run
    return job.partition(":")[0]


def queue() -> HookQueue:
    return HookQueue(owner_of)


def taken(waiting: HookQueue) -> list[tuple[str, str]]:
    rows = [waiting.take().row for _ in range(len(waiting))]
    return [(row["job"], row["finding_id"]) for row in rows]


@pytest.mark.parametrize(
    "crowd",
    [
        [row(STRANGER, number) for number in range(500)],
        [row(STRANGER, 1, number) for number in range(500)],
        [row(f"uid {65534 - number % 9}", number // 9, number) for number in range(500)],
    ],
    ids=["many jobs", "many findings of a job", "several strangers"],
)
def test_a_crowd_neither_displaces_nor_delays_another_owner(crowd: list[dict[str, Any]]) -> None:
    waiting = queue()
    assert sum(waiting.put(one) for one in crowd) < len(crowd)
    waiting.put(row(VICTIM, "llama"))
    for one in crowd:
        waiting.put({**one, "finding_id": f"{one['finding_id']} again"})
    assert len(waiting) == MAX_WAITING
    owners = {one["job"].partition(":")[0] for one in crowd}
    assert (f"{VICTIM}:llama", "0") in taken(waiting)[: len(owners) + 1]


def test_a_job_of_an_owner_does_not_displace_its_others() -> None:
    waiting = queue()
    for number in range(100):
        waiting.put(row(VICTIM, "noisy", number))
    for job in range(10):
        waiting.put(row(VICTIM, job))
    order = taken(waiting)
    assert {job for job, _ in order} >= {f"{VICTIM}:{job}" for job in range(10)}
    # They take turns.
    assert len({job for job, _ in order[:11]}) == 11


def test_a_newer_row_of_a_finding_takes_its_place() -> None:
    waiting = queue()
    for sentence in ("first", "second", "third"):
        assert waiting.put(row(VICTIM, 1, sentence=sentence))
    waiting.put(row(VICTIM, 1, 2))
    assert len(waiting) == 2
    assert waiting.take().row["sentence"] == "third"


def test_a_hook_that_failed_waits_longer_each_time_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(backoff, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting = queue()
    waiting.put(row(STRANGER, 1))
    spans = []
    for number in range(MAX_TRIES - 1):
        finding = waiting.take()
        assert waiting.failed(finding, ("webhook",))
        assert not waiting.due
        waiting.put(row(VICTIM, number))
        assert waiting.take().owner == VICTIM
        begun = now[0]
        while not waiting.due:
            now[0] += 1.0
        spans.append(now[0] - begun)
    assert spans == [30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0]
    last = waiting.take()
    assert (last.parts, waiting.failed(last, ("webhook",)), len(waiting)) == (("webhook",), False, 0)


def test_a_finding_that_comes_again_while_its_hook_fails_waits_once() -> None:
    waiting = queue()
    waiting.put(row(VICTIM, 1, sentence="old"))
    finding = waiting.take()
    waiting.put(row(VICTIM, 1, sentence="new"))
    assert waiting.failed(finding)
    assert len(waiting) == 1
    assert not waiting.due


def test_take_waits_for_a_finding() -> None:
    waiting = queue()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(waiting.take().row["job"]))
    thread.start()
    waiting.put(row(VICTIM, 1))
    thread.join(60)
    assert found == [f"{VICTIM}:1"]


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=300))
def test_an_owner_below_its_share_loses_nothing(puts: list[tuple[int, int, int]]) -> None:
    waiting = queue()
    wanted: dict[str, set[tuple[str, str]]] = {}
    for owner, job, number in puts:
        one = row(str(owner), job, number)
        wanted.setdefault(str(owner), set()).add((one["job"], one["finding_id"]))
        waiting.put(one)
    kept = set(taken(waiting))
    assert len(kept) == min(MAX_WAITING, sum(map(len, wanted.values())))
    for findings in wanted.values():
        if len(findings) <= MAX_WAITING // 6:
            assert findings <= kept
