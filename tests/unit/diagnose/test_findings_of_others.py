"""What other nodes say of a job takes no place of what this node finds, closes none of it, and starts no hook late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from watch_support import SECOND, Job, Scene, finding

from probing.api.errors import PeerError
from probing.daemon.diagnose.finding_row import finding_row
from probing.daemon.diagnose.findings_store import MAX_OF_OTHERS, MAX_ROWS, Outbox
from probing.daemon.diagnose.lifecycle import Event
from probing.daemon.diagnose.problems import Problems

TRUE = finding("not_joined", 1)


def hanging() -> Scene:
    """A job on node n1 that this node diagnoses, and that hangs from 30 s to 95 s."""
    job = Job(begins=10, stops=30, resumes=95, finds=lambda now, _: [TRUE] if 40 <= now < 95 else [])
    return Scene(job)


def forged(by: str, about: str = "", state: str = "open") -> dict[str, Any]:
    row = finding_row("j", "r", finding("not_joined", 1, about=about), 7)
    return {**row, "found_by": by, "state": state, "closed": 8 if state == "closed" else None}


def opened(scene: Scene) -> list[int]:
    """When this node found what it did."""
    return [row["opened"] for row in scene.rows if row["found_by"] == "n1" and row["state"] == "open"][:1]


@pytest.mark.parametrize("by", ["-", "n0", "z"])
def test_forged_findings_take_no_place_of_true_ones(by: str) -> None:
    scene = hanging()
    scene.run(35)
    for number in range(200):
        scene.watch.take(forged(by, f"forged {number}"))
    scene.run(50)
    assert opened(scene) == opened(hanging().run(50)) != []
    assert [row["found_by"] for row in scene.hooked] == ["n1"]
    # Some are kept, and end with what they are said to be about.
    kept = [row for row in scene.rows if row["found_by"] == by]
    assert 0 < len(kept) <= 16
    scene.run(110)
    assert {row["finding_id"] for row in scene.rows if row["state"] == "open"} == {
        row["finding_id"] for row in scene.rows if row["state"] == "closed"
    }


def test_many_nodes_have_some_places_together() -> None:
    scene = hanging()
    scene.run(35)
    for number in range(250):
        scene.watch.take(forged(f"-{number % 50}", f"forged {number}"))
    scene.run(50)
    assert len([row for row in scene.rows if row["found_by"] != "n1"]) == 64
    assert opened(scene) == opened(hanging().run(50)) != []


@pytest.mark.parametrize("by", ["-", "n0", "z"])
def test_nobody_closes_or_changes_what_this_node_found(by: str) -> None:
    scene = hanging()
    scene.run(50)
    opened = list(scene.rows)
    for change in (forged(by, state="closed"), forged(by), {**forged(by), "sentence": "rank 0 is at fault"}):
        scene.watch.take(change)
    scene.run(60)
    assert {row["found_by"] for row in scene.rows} == {"n1"}
    assert scene.rows[: len(opened)] == opened
    assert "1 open finding" in scene.watch.state().detail


def test_a_finding_of_another_is_changed_by_that_one_and_by_those_before_this_node() -> None:
    scene = hanging()
    scene.leading = False
    scene.run(20)
    scene.watch.take(forged("n9", "a"))
    scene.run(21)
    scene.watch.take(forged("z", "a", "closed"))
    scene.run(22)
    assert [row["state"] for row in scene.rows] == ["open"]
    scene.watch.take(forged("n9", "a", "closed"))
    scene.watch.take(forged("n9", "b"))
    scene.watch.take(forged("n0", "b", "closed"))
    scene.run(23)
    assert [row["state"] for row in scene.rows] == ["open", "closed", "open", "closed"]


def test_a_node_that_looks_whether_another_is_right_leaves_its_findings_to_it() -> None:
    scene = hanging()
    scene.beside = True
    scene.run(35)
    scene.watch.take(forged("n0"))
    scene.watch.take(forged("n0", "a lie"))
    scene.run(90)
    # What it finds, too, has no second row, and what it does not find is not closed.
    assert [row["found_by"] for row in scene.rows] == ["n0", "n0"]
    assert scene.hooked == []
    # What the other has not found is found here.
    other = hanging()
    other.beside = True
    other.run(35)
    other.watch.take(forged("n0", "a lie"))
    other.run(90)
    # A look later, as the other may be about to find it.
    [mine], [soonest] = opened(other), opened(hanging().run(50))
    assert soonest < mine < soonest + 5 * SECOND


def test_a_finding_forged_beforehand_does_not_keep_the_hook_from_starting() -> None:
    scene = hanging()
    scene.run(20)
    # A node that does not diagnose the job says the very thing that will be true.
    scene.watch.take(forged("z"))
    scene.run(50)
    assert [row["finding_id"] for row in scene.hooked] == [forged("z")["finding_id"]]


def test_findings_of_others_do_not_push_out_rows_that_wait() -> None:
    down = True
    stored: list[Mapping[str, Any]] = []

    class Store:
        def record(self, rows: Any) -> None:
            if down:
                raise PeerError("the collector is being replaced")
            stored.extend(rows)

    outbox = Outbox("n1", Store(), lambda _: None, lambda _: None, Problems())
    outbox.put([Event(forged("", f"{number}")) for number in range(MAX_ROWS)])
    for number in range(1000):
        outbox.keep(forged("-", f"forged {number}"))
    outbox.flush()
    down = False
    outbox.flush()
    assert [row["found_by"] for row in stored] == ["n1"] * MAX_ROWS + ["-"] * MAX_OF_OTHERS


def test_after_a_restart_what_this_node_found_is_its_own() -> None:
    scene = hanging()
    scene.run(50)
    [row] = [one for one in scene.rows if one["state"] == "open"]
    again = hanging()
    again.before = [
        {**row, "node": "n1", "ts": 7},
        *({**forged("-", f"{n}"), "node": "n1", "ts": 7} for n in range(99)),
    ]
    again.now = 51.0
    again.run(53)
    again.watch.take(forged("-", state="closed"))
    again.run(55)
    # Its own stands, and what a look of this node does not show is closed.
    assert again.hooked == []
    assert {one["state"] for one in again.rows if one["finding_id"] == row["finding_id"]} <= {"open"}
    assert len([one for one in again.rows if one["state"] == "closed"]) == 16
    assert "1 open finding" in again.watch.state().detail
