"""Which records a launcher takes, and which generations it starts: a table of facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from probing.groups.group import Group, Order, created, order_of
from probing.groups.keys import OwnerKey
from probing.groups.spec import Spec
from probing.launcher.allowed import Rules, command_problem
from probing.launcher.decisions import (
    Facts,
    ended_below,
    recent_restarts,
    record_problem,
    start_verdict,
)
from probing.launcher.state import History

HOUR_NS, MINUTE_NS = 3_600_000_000_000, 60_000_000_000
KEY, OTHER_KEY = OwnerKey(b"k" * 32), OwnerKey(b"o" * 32)
SPEC = Spec(
    name="g",
    version=3,
    owner="ann",
    uid=1009,
    signed_on="n1",
    workers=("n1-0", "n1-1", "n2-0"),
    master="n1",
    command=("python", "train.py"),
    max_restarts=2,
)
RULES = Rules(frozenset((KEY.public,)), 1009, "ann")
FACTS = Facts("n1", "boot", 5 * HOUR_NS, ranks=2)


def record(phase: Any, generation: int, key: OwnerKey = KEY, order: Any = None, **fields: Any) -> Group:
    """A record whose owner ordered ``order`` (action, generation, version), by default the start of its generation."""
    spec = replace(SPEC, **fields)
    action, ordered, version = order or ("start", generation, spec.version)
    last = Order("g", action, ordered, version)
    last = replace(last, signature=key.sign("order", last.text()))
    return replace(created(spec, key), phase=phase, generation=generation, order=last)


def seen(phase: Any = "running", generation: int = 7, **fields: Any) -> History:
    defaults = {"key": KEY.public, "version": 3, "generation": generation, "phase": phase, "order": 5}
    return History("g", **{**defaults, **fields})


@pytest.mark.parametrize(
    ("group", "history", "problem"),
    [
        (record("running", 7), None, ""),
        (record("running", 7, OTHER_KEY), None, "group g is signed by a key that ann does not trust"),
        (record("running", 7, uid=0), None, "group g belongs to ann (uid 0), and this launcher runs as ann (uid 1009)"),
        (replace(record("running", 7), signature="00"), None, "the record of group g is not signed by its owner"),
        (record("running", 7), seen(), ""),
        (record("ending", 8), seen(), ""),
        (record("stopped", 8), seen(), ""),
        (record("finished", 7), seen(), ""),
        (record("running", 7), seen("ending"), ""),
        (
            record("ending", 7),
            seen(),
            "an older record of group g: generation 7 is ending in this record, and was running in a newer record",
        ),
        (
            record("running", 7),
            seen("finished"),
            "an older record of group g: generation 7 is running in this record, and was finished in a newer record",
        ),
        (
            record("running", 7),
            seen("stopped"),
            "an older record of group g: generation 7 is running in this record, and was stopped in a newer record",
        ),
        (record("running", 6), seen(), "an older record of group g: generation 6, and generation 7 was seen"),
        (record("running", 8, version=2), seen(), "an older record of group g: version 2, and version 3 was seen"),
        (
            record("running", 8, order=("start", 4, 3)),
            seen(),
            "an older record of group g: order 4, and order 5 was seen",
        ),
        (record("stopped", 7, version=4), seen("stopped"), ""),
        (record("stopped", 7, version=4), seen("deleted"), ""),
        (
            record("running", 7),
            seen(key=OTHER_KEY.public),
            "another group had the name g: give the group another name",
        ),
        (
            record("running", 8, id="another"),
            seen(),
            "another group had the name g: give the group another name",
        ),
    ],
)
def test_older_and_foreign_records_are_refused(group: Group, history: History | None, problem: str) -> None:
    assert record_problem(group, history, RULES) == problem


@pytest.mark.parametrize(
    ("group", "history", "facts", "state", "reason"),
    [
        (record("running", 7), seen(), FACTS, "start", ""),
        (record("ending", 7), seen(), FACTS, "waiting", "processes of the older generation end first, on all nodes"),
        (record("stopped", 7, order=("stop", 7, 3)), seen(), FACTS, "idle", ""),
        (record("finished", 7), seen(), FACTS, "idle", ""),
        (
            record("running", 7),
            seen(),
            replace(FACTS, ranks=0),
            "idle",
            "generation 7 has no rank for this worker",
        ),
        (
            replace(record("running", 7), order=None),
            seen(),
            FACTS,
            "refused",
            "its owner has not ordered a start",
        ),
        (record("running", 7, order=("stop", 7, 3)), seen(), FACTS, "refused", "its owner's last order is stop"),
        (record("running", 7, order=("delete", 7, 3)), seen(), FACTS, "refused", "its owner's last order is delete"),
        (
            record("running", 7, order=("start", 7, 2)),
            seen(),
            FACTS,
            "refused",
            "its owner's last order is for version 2 of the specification, not 3",
        ),
        (
            record("running", 7, order=("start", 4, 3)),
            seen(),
            FACTS,
            "refused",
            "its owner's last order is for generation 4, and an order for 5 was seen",
        ),
        (
            record("running", 7, order=("start", 8, 3)),
            seen(),
            FACTS,
            "refused",
            "its owner's last order is for generation 8, and an order for 5 was seen",
        ),
        (record("running", 7, order=("restart", 5, 3)), seen(), FACTS, "start", ""),
        (
            record("running", 7),
            seen(),
            replace(FACTS, node="n2"),
            "refused",
            "the command was typed on n1, and without --allow this launcher runs only commands that were typed on n2",
        ),
        (
            record("running", 7),
            seen(),
            replace(FACTS, problem="the disk is full"),
            "refused",
            "the disk is full",
        ),
        (
            record("running", 7),
            seen(),
            replace(FACTS, unknown="the processes cannot be listed"),
            "waiting",
            "the processes cannot be listed",
        ),
        (
            record("running", 7),
            seen(),
            replace(FACTS, older=(31,)),
            "waiting",
            "process 31 of an older generation still runs",
        ),
        (
            record("running", 7),
            seen(),
            replace(FACTS, older=(31, 37)),
            "waiting",
            "processes 31 and 37 of an older generation still run",
        ),
    ],
)
def test_a_generation_starts_by_a_valid_order_only(
    group: Group, history: History, facts: Facts, state: str, reason: str
) -> None:
    verdict = start_verdict(group, history, RULES, facts)
    assert (verdict.state, verdict.reason) == (state, reason)


@pytest.mark.parametrize(
    ("stamps", "number"),
    [
        ([], 0),
        ([("boot", 4 * HOUR_NS + MINUTE_NS), ("boot", 4 * HOUR_NS + MINUTE_NS + 1), ("boot", 5 * HOUR_NS)], 2),
        ([("older boot", 99 * HOUR_NS)], 0),
    ],
)
def test_restarts_are_counted_within_an_hour(stamps: list[tuple[str, int]], number: int) -> None:
    assert recent_restarts(seen(restarts=stamps), "boot", 5 * HOUR_NS) == number


def test_restarts_of_an_earlier_boot_count_for_an_hour_of_this_one() -> None:
    history = seen(restarts=[("older boot", 99 * HOUR_NS)] * 3)
    assert recent_restarts(history, "boot", HOUR_NS - MINUTE_NS - 1) == 3
    assert recent_restarts(history, "boot", HOUR_NS - MINUTE_NS) == 0


def test_restarts_without_an_order_are_limited() -> None:
    group = record("running", 7, order=("start", 5, 3))
    one = seen(restarts=[("boot", 5 * HOUR_NS - 1)])
    two = seen(restarts=[("boot", 5 * HOUR_NS - 2), ("boot", 5 * HOUR_NS - 1)])
    assert start_verdict(group, one, RULES, FACTS).state == "start"
    verdict = start_verdict(group, two, RULES, FACTS)
    assert (verdict.state, verdict.reason) == (
        "refused",
        "2 restarts within an hour, and the specification allows 2",
    )
    assert start_verdict(record("running", 7), two, RULES, FACTS).state == "start"


@pytest.mark.parametrize(
    ("lease", "state"),
    [
        (None, "waiting"),
        # Its ranks would get SIGTERM now: the grace time, and a second for SIGKILL, before the end.
        (("boot", 5 * HOUR_NS + 11_000_000_001, 7), "start"),
        (("boot", 5 * HOUR_NS + 11_000_000_000, 7), "waiting"),
        (("boot", 6 * HOUR_NS, 6), "waiting"),
        (("older boot", 6 * HOUR_NS, 7), "waiting"),
    ],
)
def test_a_fenced_group_starts_under_a_lease_of_its_generation(lease: Any, state: str) -> None:
    group = record("running", 7, on_hang="restart_without_node")
    verdict = start_verdict(group, seen(lease=lease), RULES, FACTS)
    assert verdict.state == state
    assert start_verdict(record("running", 7), seen(lease=lease), RULES, FACTS).state == "start"


@pytest.mark.parametrize(
    ("phase", "below"),
    [("ending", 7), ("running", 7), ("finished", 7), ("stopped", 8), ("failed", 8), ("deleted", 8)],
)
def test_generations_that_are_ended(phase: Any, below: int) -> None:
    assert ended_below(7, phase) == below


@pytest.mark.parametrize(
    ("words", "patterns", "allowed"),
    [
        (("python", "train.py"), ("python train.py",), True),
        (("python", "train.py", "--lr", "1"), ("python train.py",), False),
        (("python", "train.py", "--lr", "1"), ("python train.py *",), True),
        (("python", "train.py"), ("python train.py *",), False),
        (("python", "train.py", "a b"), ("python train.py 'a b'",), True),
        (("python", "train.py a b"), ("python train.py a b",), False),
        (("python", "train.py\nrm"), ("python train.py",), False),
        (("sh", "-c", "python train.py; rm -r x"), ("python train.py*",), False),
        (("Python", "train.py"), ("python train.py",), False),
        (("torchrun", "x"), ("python *", "torchrun *"), True),
        (("python", "train.py"), ("*",), True),
    ],
)
def test_patterns_of_commands(words: tuple[str, ...], patterns: tuple[str, ...], allowed: bool) -> None:
    spec = replace(SPEC, command=words, signed_on="elsewhere")
    assert (command_problem(spec, "n1", patterns) == "") is allowed


def test_the_save_command_has_to_be_allowed_too() -> None:
    spec = replace(SPEC, save=("rm", "-r", "x y"))
    problem = command_problem(spec, "n1", ("python *",))
    assert problem == "no --allow of this launcher matches the command rm -r 'x y'"
    assert command_problem(spec, "n1", ("python *", "rm *")) == ""
    assert command_problem(replace(SPEC, save=("SIGUSR1",)), "n1", ("python *",)) == ""


def test_records_that_follow_each_other_are_taken_in_this_order_only() -> None:
    group = created(replace(SPEC, version=1), KEY)
    records = [group]
    for action in ("start", "run", "restart", "run", "stop", "start", "run", "finish", "delete"):
        match action:
            case "run":
                group = group.running(1)
            case "finish":
                group = group.over("finished", "all ranks ended", 1)
            case _:
                group = group.ordered(order_of(group, action, KEY), 1)
        records.append(group)
    for index, last in enumerate(records):
        history = History("g", KEY.public, version=1, generation=last.generation, phase=last.phase)
        history.order = last.order.generation if last.order else 0
        taken = [not record_problem(record, history, RULES) for record in records]
        assert taken == [False] * index + [True] * (len(records) - index)
