"""A leader that finds nothing, or a wrong rank, while a job stands still: the nodes after it diagnose the job, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from probing.daemon.diagnose.coordination.coordinator import LOOKS, SilentLeaders
from probing.daemon.diagnose.coordination.peers import Holder, Holding, Sight
from probing.daemon.diagnose.coordination.proofs import MAX_BEFORE, Proofs

KEY = ("job", "run")
LOOK_S = 10.0
ROW = {"job": "job", "run": "run", "finding_id": "f", "severity": "error", "state": "open", "verdict": "not_joined"}


class Scene:
    """A node ``node`` of a job with others, some of which come before it, that stands still from ``stops`` on."""

    def __init__(self, *others: str, node: str = "n5", young_s: float = 0.0) -> None:
        self.now = 0.0
        self.stops, self.goes_on = 100.0, 1e9
        self.lives = True
        self.others = [Holder(name, True, False) for name in others]
        self.proofs = Proofs(
            node,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            grace_s=young_s,
            trusted=not young_s,
            now=lambda: self.now,
        )
        self.silence = SilentLeaders(node, self.proofs, LOOK_S, now=lambda: self.now)
        self.proofs.hold({KEY: True})
        self.silence.hold({KEY: True})

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        return self.others

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None: ...

    def sight(self, job: str, run: str) -> Sight:
        return Sight()

    def holding(self, job: str, run: str) -> Holding:
        moved = min(self.now, self.stops) + max(self.now - self.goes_on, 0)
        return Holding(frozenset((5,)), 9, round(moved * 10), living=self.lives)

    def until(self, seconds: float) -> float | None:
        """Looks each second up to ``seconds``. Returns when this node first replaced the leader."""
        first = None
        while self.now < seconds:
            self.now += 1
            self.silence.step()
            if first is None and self.silence.replaces(*KEY):
                first = self.now
        return first


@pytest.fixture
def scene() -> Scene:
    return Scene("n1", "n6")


def test_the_next_node_replaces_a_silent_leader_and_names_it(scene: Scene) -> None:
    assert scene.until(100) is None
    began = scene.until(300)
    assert began is not None
    assert LOOKS * LOOK_S <= began - scene.stops <= (LOOKS + 2) * LOOK_S
    assert scene.silence.problems == []
    scene.silence.shared(ROW)
    [problem] = scene.silence.problems
    assert "n1" in problem
    assert "not_joined" in problem
    # It goes on until its finding is closed, and the job advances.
    scene.goes_on = scene.now
    scene.until(400)
    assert scene.silence.replaces(*KEY)
    scene.silence.shared({**ROW, "state": "closed"})
    assert not scene.silence.replaces(*KEY)
    assert scene.silence.problems == []


def test_the_name_of_a_job_is_shown_without_control_characters(scene: Scene) -> None:
    key = ("job\x1b[2J\n", "run")
    scene.silence.hold({key: True})
    scene.proofs.hold({key: True})
    scene.until(300)
    scene.silence.shared({**ROW, "job": key[0]})
    assert scene.silence.problems[0].isprintable()


def test_a_leader_that_shared_the_finding_is_checked_once_and_not_named(scene: Scene) -> None:
    scene.silence.taken({**ROW, "found_by": "n1"})
    began = scene.until(300)
    assert began is not None
    scene.silence.shared(ROW)
    assert scene.silence.problems == []
    scene.silence.shared({**ROW, "state": "closed"})
    assert scene.until(9000) is None


def test_a_leader_that_names_another_rank_is_named(scene: Scene) -> None:
    scene.silence.taken({**ROW, "finding_id": "lie", "found_by": "n1"})
    assert scene.until(300) is not None
    scene.silence.shared(ROW)
    assert "n1" in scene.silence.problems[0]


def test_a_warning_of_the_leader_is_no_answer(scene: Scene) -> None:
    scene.silence.taken({**ROW, "severity": "warning", "found_by": "n1"})
    assert scene.until(300) is not None
    scene.until(9000)
    assert scene.silence.replaces(*KEY)


@pytest.mark.parametrize(("others", "waits"), [(["n1"], 1), (["n1", "n2"], 2), (["n1", "n2", "n3"], 3)])
def test_nodes_replace_a_leader_one_after_the_other(others: list[str], waits: int) -> None:
    began = Scene(*others, "n6").until(1000)
    assert began is not None
    assert waits * LOOKS * LOOK_S <= began - 100 <= (waits * LOOKS + 2) * LOOK_S


def test_in_a_large_job_a_few_nodes_watch_the_leader() -> None:
    assert Scene(*(f"n{number:03d}" for number in range(MAX_BEFORE))).until(9000) is None


def test_nothing_is_replaced_without_need() -> None:
    # The leader itself, a job that advances, and one that has ended.
    scenes = [Scene("n6"), Scene("n1"), Scene("n1")]
    scenes[1].stops = 1e9
    scenes[2].lives = False
    assert [one.until(1000) for one in scenes] == [None] * 3


def test_no_leader_is_judged_before_claims_are_proven() -> None:
    assert Scene("n1", young_s=1000.0).until(900) is None


def test_a_node_that_failed_or_holds_no_living_rank_leads_nothing() -> None:
    scene = Scene()
    scene.others = [Holder("n1", True, True), Holder("n2", False, False)]
    assert scene.until(1000) is None


def test_forged_findings_take_no_memory(scene: Scene) -> None:
    for number in range(5000):
        scene.silence.taken({**ROW, "finding_id": f"{number}", "found_by": "n1"})
        scene.silence.taken({**ROW, "job": f"{number}", "found_by": "n1"})
    known: Any = scene.silence._runs
    assert len(known) == 1
    assert len(known[KEY].errors) <= 256
