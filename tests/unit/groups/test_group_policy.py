"""What happens to a group next, by its record, the reports of its launchers and the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from group_records import BEGUN_NS, NS, newer, ordered, record, running

from probing.daemon.groups.policy import Step, Watched, next_step
from probing.groups.group import Group
from probing.groups.report import WorkerRow

# The times of the policy, s: a fence of 60 with its margin, patience for launchers, and for a node without an answer.
FENCED, PATIENCE, GONE = 65.0, 30.0, 15.0
NODES = ("gn6", "gn7")


def row(worker: str, group: Group, **fields: Any) -> WorkerRow:
    """Returns the row of a worker whose launcher has the record of ``group`` and no older processes."""
    known: dict[str, Any] = {"generation": group.generation, "seen": group.generation, "clear": True}
    return WorkerRow(worker, "llama", **{**known, "state": "waiting", **fields})


def rows(group: Group, **of_worker: Mapping[str, Any] | None) -> dict[str, list[WorkerRow] | None]:
    """Returns the reports of all nodes. ``of_worker``: fields of a worker's row, None for no row, by name with _."""
    found: dict[str, list[WorkerRow] | None] = {node: [] for node in sorted(group.nodes)}
    for worker in dict.fromkeys((*group.spec.workers, *group.occupied)):
        fields = of_worker.get(worker.replace("-", "_"), {})
        if fields is not None:
            reports = found[worker.rpartition("-")[0]]
            assert reports is not None
            reports.append(row(worker, group, **fields))
    return found


def watched(group: Group, reports: Mapping[str, list[WorkerRow] | None], since: float = 0.0) -> Watched:
    """Returns what a node remembers that learned of the phase at ``since``, and asked all nodes then."""
    made = Watched()
    made.note(group, since)
    for node, each in reports.items():
        made.heard(node, each, since)
    return made


def without(reports: Mapping[str, list[WorkerRow] | None], *nodes: str) -> dict[str, list[WorkerRow] | None]:
    return {node: None if node in nodes else each for node, each in reports.items()}


class Start(NamedTuple):
    name: str
    group: Group
    reports: Mapping[str, list[WorkerRow] | None]
    now: float
    step: Step | None
    waits_for: str = ""


def _begun(**fields: Any) -> Group:
    return ordered(record(**fields), "start")


def _again(**fields: Any) -> Group:
    return ordered(running(**fields), "restart")


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Group:
    """Returns a group that is started by another specification than the generation before."""
    stopped = ordered(running(**before), "stop")
    twice = stopped.renewed(newer(stopped, **after))
    return ordered(twice.renewed(newer(twice, **after)), "start")


ELASTIC = {"min_nodes": 1}
SHORT, LONG = ({"min_nodes": 1, "fence_s": seconds} for seconds in (5.0, 60.0))
SEEN_OLDER = {"seen": 1, "generation": 1}
NO_GN7 = Step("restart", "failure", "no launcher serves gn7-0 and gn7-1", ("gn7",))
OLDER = "waits for the end of older processes of gn6-0"
UNHEARD = "waits for an answer of node gn7"
REFUSED_BEFORE = [row("gn7-0", _again(), state="refused", seen=0, clear=False, generation=1)]
STARTS = (
    Start("all launchers are there", _begun(), rows(_begun()), 0.0, Step("run")),
    Start("nothing is heard yet", _begun(), {}, 0.0, None, "waits for a launcher that serves gn6-0, gn6-1, gn7-0 and"),
    Start("all have ended the older", _again(), rows(_again()), 0.0, Step("run")),
    Start("older processes", _again(), rows(_again(), gn6_0={"clear": False}), 1e6, None, OLDER),
    Start("an older record", _again(), rows(_again(), gn6_0=SEEN_OLDER), 1e6, None, OLDER),
    Start("older processes, elastic", _again(**ELASTIC), rows(_again(), gn6_0={"clear": False}), 1e6, None, OLDER),
    Start(
        "a launcher is away",
        _again(),
        rows(_again(), gn6_0=None),
        1e6,
        None,
        "waits for a launcher that serves gn6-0",
    ),
    Start(
        # Its launcher may be dead and its ranks alive: only its own node could tell.
        "a launcher is away, elastic",
        _again(**ELASTIC),
        rows(_again(), gn6_0=None),
        1e6,
        None,
        "waits for a launcher that serves gn6-0",
    ),
    Start("a silent node without a fence", _again(), without(rows(_again()), "gn7"), 1e6, None, UNHEARD),
    Start("a silent node that is not fenced", _again(**ELASTIC), without(rows(_again()), "gn7"), FENCED, None, UNHEARD),
    Start("a silent node that is fenced", _again(**ELASTIC), without(rows(_again()), "gn7"), FENCED + 1, NO_GN7),
    Start(
        "a silent node that is fenced, where all nodes are needed",
        _again(min_nodes=2),
        without(rows(_again()), "gn7"),
        1e6,
        None,
        "waits for a launcher that serves gn7-0 and gn7-1",
    ),
    Start(
        "a silent node that is fenced, without min_nodes",
        _again(on_hang="restart_without_node"),
        without(rows(_again()), "gn7"),
        1e6,
        None,
        "waits for a launcher that serves gn7-0 and gn7-1",
    ),
    Start(
        "a silent node that is fenced and left out",
        ordered(running(**ELASTIC), "restart", "gn7"),
        without(rows(_again()), "gn7"),
        FENCED + 1,
        Step("run"),
    ),
    Start(
        "a silent node that was left out before, too",
        ordered(running("gn7"), "restart", "gn7"),
        without(rows(_again()), "gn7"),
        0.0,
        Step("run"),
    ),
    Start(
        # Its launcher obeys the specification that it knows.
        "a silent node whose fence was longer",
        _changed(LONG, SHORT),
        without(rows(_changed(LONG, SHORT)), "gn7"),
        FENCED,
        None,
        UNHEARD,
    ),
    Start(
        "a silent node whose longer fence is over",
        _changed(LONG, SHORT),
        without(rows(_changed(LONG, SHORT)), "gn7"),
        FENCED + 1,
        NO_GN7,
    ),
    Start(
        "a silent node whose ranks were started without a fence",
        _changed({}, SHORT),
        without(rows(_changed({}, SHORT)), "gn7"),
        1e6,
        None,
        UNHEARD,
    ),
    Start(
        "no launcher, at once",
        _begun(**ELASTIC),
        rows(_begun(), gn7_0=None, gn7_1=None),
        PATIENCE,
        None,
        "waits for a launcher that serves gn7-0 and gn7-1",
    ),
    Start("no launcher", _begun(**ELASTIC), rows(_begun(), gn7_0=None, gn7_1=None), PATIENCE + 1, NO_GN7),
    Start(
        "no launcher of a worker whose node has another",
        _begun(**ELASTIC),
        rows(_begun(), gn7_1=None),
        PATIENCE + 1,
        Step("restart", "failure", "no launcher serves gn7-1", ("gn7",)),
    ),
    Start(
        "no launcher, and no restart is left",
        _begun(**ELASTIC, max_restarts=0),
        rows(_begun(), gn7_0=None, gn7_1=None),
        1e6,
        None,
        "waits for a launcher that serves gn7-0 and gn7-1",
    ),
    Start(
        "no launcher of a worker beyond the world size",
        _begun(world_size=3),
        rows(_begun(), gn7_1=None),
        0.0,
        Step("run"),
    ),
    Start(
        "a refused record",
        _begun(),
        rows(_begun(), gn7_0={"state": "refused", "seen": 0, "clear": False, "reason": "the key is not trusted"}),
        0.0,
        Step("failed", "failure", "worker gn7-0 refused to start rank 2: the key is not trusted"),
    ),
    Start(
        "a record that was refused before",
        _again(),
        {**rows(_again()), "gn7": [*REFUSED_BEFORE, row("gn7-0", _again()), row("gn7-1", _again())]},
        0.0,
        Step("run"),
    ),
)


@pytest.mark.parametrize("case", STARTS, ids=[case.name for case in STARTS])
def test_a_start(case: Start) -> None:
    made = watched(case.group, case.reports)
    assert next_step(case.group, made, case.now, BEGUN_NS) == case.step
    if case.step is None:
        assert made.waits_for.startswith(case.waits_for)
        assert made.waits_for


class Run(NamedTuple):
    name: str
    group: Group
    reports: Mapping[str, list[WorkerRow] | None]
    step: Step | None
    now: float = 0.0


def _after(restarts: int, hours: int = 0, **fields: Any) -> Group:
    """Returns a group that was restarted so often by its policy."""
    group = running(**fields)
    for _ in range(restarts):
        again = group.restarted("failure", "rank 0 exited with 1", BEGUN_NS - hours * 3600 * NS)
        assert again is not None
        group = again.running(BEGUN_NS)
    return group


def _ended(**more: Any) -> dict[str, Any]:
    return {"state": "ended", "exit_code": 0, **more}


LIVES = {"state": "running"}
DONE = {name: _ended() for name in ("gn6_0", "gn6_1", "gn7_0", "gn7_1")}
ALIVE = dict.fromkeys(DONE, LIVES)
ONE = {**ALIVE, "gn6_1": _ended(exit_code=7)}
EXITED = "rank 1 (gn6-1) exited with 7"
NEVER, FAILURE, ALWAYS = ({"restart": name} for name in ("never", "on_failure", "always"))
RUNS = (
    Run("all run", running(), rows(running(), **ALIVE), None),
    Run("nothing is heard", running(), {}, None, 1e6),
    Run("all ended", running(), rows(running(), **DONE), Step("finished", reason="4 ranks ended with status 0")),
    Run(
        "all ended, on_failure",
        running(**FAILURE),
        rows(running(), **DONE),
        Step("finished", reason="4 ranks ended with status 0"),
    ),
    Run("all but one ended", running(), rows(running(), **{**DONE, "gn7_1": LIVES}), None, 1e6),
    Run("all but a worker without a row ended", running(), rows(running(), **{**DONE, "gn7_1": None}), None, 1e6),
    Run(
        "all ended in an older generation",
        running(),
        rows(running(), **dict.fromkeys(DONE, _ended(generation=0))),
        None,
    ),
    Run("one failed, never", running(**NEVER), rows(running(), **ONE), None, 1e6),
    Run(
        "one failed and the others ended, never",
        running(**NEVER),
        rows(running(), **{**DONE, "gn6_1": _ended(exit_code=7)}),
        Step("failed", "failure", EXITED),
    ),
    Run(
        "one failed twice over and not all ended, never",
        running(**NEVER),
        {"gn6": [row("gn6-0", running(), **_ended(exit_code=7))] * 4, "gn7": []},
        None,
    ),
    Run("one failed, on_failure", running(**FAILURE), rows(running(), **ONE), Step("restart", "failure", EXITED), 1.0),
    Run("one failed, always", running(**ALWAYS), rows(running(), **ONE), Step("restart", "failure", EXITED), 1.0),
    Run(
        "all ended, always",
        running(**ALWAYS),
        rows(running(), **DONE),
        Step("restart", "always", "all ranks have ended"),
        1.0,
    ),
    Run("one failed, too soon", running(**FAILURE), rows(running(), **ONE), None, 0.9),
    Run("the second restart, too soon", _after(1, **FAILURE), rows(_after(1), **ONE), None, 1.9),
    Run("the second restart", _after(1, **FAILURE), rows(_after(1), **ONE), Step("restart", "failure", EXITED), 2.0),
    Run(
        "the fourth restart",
        _after(3, **FAILURE),
        rows(_after(3), **ONE),
        Step("failed", "failure", f"{EXITED}; its limit of 3 restarts within an hour is reached"),
    ),
    Run(
        "the fourth restart after an hour",
        _after(3, 1, **FAILURE),
        rows(_after(3), **ONE),
        Step("restart", "failure", EXITED),
        8.0,
    ),
    Run(
        "no pause is longer than a minute",
        _after(30, 1, **FAILURE, max_restarts=100),
        rows(_after(30, max_restarts=100), **ONE),
        Step("restart", "failure", EXITED),
        60.0,
    ),
    Run(
        "no restart is allowed",
        running(**FAILURE, max_restarts=0),
        rows(running(), **ONE),
        Step("failed", "failure", f"{EXITED}; its limit of 0 restarts within an hour is reached"),
    ),
    Run(
        "one restart is allowed",
        _after(1, **ALWAYS, max_restarts=1),
        rows(_after(1), **DONE),
        Step("failed", "always", "all ranks have ended; its limit of 1 restart within an hour is reached"),
    ),
    Run(
        "a command was refused",
        running(**ALWAYS),
        rows(running(), **{**ALIVE, "gn7_0": {"state": "refused", "reason": "its command is not allowed here"}}),
        Step("failed", "failure", "worker gn7-0 refused to start rank 2: its command is not allowed here"),
    ),
    Run(
        "a rank was fenced",
        running(**FAILURE),
        rows(running(), **{**ALIVE, "gn7_0": {"state": "fenced", "reason": "no word from a majority for 60 s"}}),
        Step("restart", "failure", "worker gn7-0 ended rank 2: no word from a majority for 60 s"),
        1.0,
    ),
    Run("a node is gone", running(**FAILURE), without(rows(running(), **ALIVE), "gn7"), None, 1e6),
    Run("a node is silent, elastic", running(**ELASTIC), without(rows(running(), **ALIVE), "gn7"), None, GONE),
    Run(
        "a node is gone, elastic",
        running(**ELASTIC),
        without(rows(running(), **ALIVE), "gn7"),
        Step("restart", "failure", "no answer from gn7", ("gn7",)),
        GONE + 2,
    ),
    Run(
        "a node is gone and all are needed",
        running(min_nodes=2),
        without(rows(running(), **ALIVE), "gn7"),
        None,
        1e6,
    ),
    Run(
        "a node is gone and no restart is left",
        running(**ELASTIC, max_restarts=0),
        without(rows(running(), **ALIVE), "gn7"),
        Step("failed", "failure", "no answer from gn7; its limit of 0 restarts within an hour is reached"),
        GONE + 2,
    ),
    Run(
        "a node that was left out is gone",
        running("gn7", **ELASTIC),
        without(rows(running(), **ALIVE), "gn7"),
        None,
        1e6,
    ),
)


@pytest.mark.parametrize("case", RUNS, ids=[case.name for case in RUNS])
def test_a_run(case: Run) -> None:
    made = watched(case.group, case.reports)
    # The pause before a restart begins when the failure is first seen.
    seen = min(case.now, GONE + 1 if None in case.reports.values() else 0.0)
    first, last = (next_step(case.group, made, now, BEGUN_NS) for now in (seen, case.now))
    assert last == case.step
    assert first in (None, last)


@pytest.mark.parametrize("phase", ["stopped", "finished", "failed", "deleted"])
def test_nothing_happens_to_a_group_that_is_not_meant_to_run(phase: str) -> None:
    groups = {
        "stopped": ordered(running(**ALWAYS), "stop"),
        "finished": running(**ALWAYS).over("finished", "", BEGUN_NS),
        "failed": running(**ALWAYS).over("failed", "", BEGUN_NS),
        "deleted": ordered(running(**ALWAYS), "delete"),
    }
    group = groups[phase]
    assert next_step(group, watched(group, rows(group, **ONE)), 1e6, BEGUN_NS) is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (({"exit_code": 7},), "rank 0 (gn6-0) exited with 7"),
        (({"exit_code": None, "signal": 9},), "rank 0 (gn6-0) was killed by SIGKILL"),
        (({"exit_code": None, "signal": 34},), "rank 0 (gn6-0) was killed by signal 34"),
        (({"exit_code": None},), "rank 0 (gn6-0) ended, with a status that is not known"),
        (({"exit_code": None, "reason": "the node was restarted"},), "rank 0 (gn6-0) ended: the node was restarted"),
        (({"exit_code": 7}, {"exit_code": 1}), "rank 0 (gn6-0) exited with 7; then rank 1"),
        (({"exit_code": 7}, {"exit_code": 1}, {"exit_code": 1}), "rank 0 (gn6-0) exited with 7; then ranks 1-2"),
        # The first to fail is named, not the first rank.
        (
            ({"exit_code": 7, "since_ns": 2}, {"exit_code": 1, "since_ns": 1}),
            "rank 1 (gn6-1) exited with 1; then rank 0",
        ),
    ],
)
def test_the_sentence_of_a_failure(fields: Sequence[Mapping[str, Any]], sentence: str) -> None:
    group = _after(3, **FAILURE)
    workers = [name.replace("-", "_") for name in group.spec.workers]
    made = {worker: _ended(**more) for worker, more in zip(workers, fields, strict=False)}
    step = next_step(group, watched(group, rows(group, **{**ALIVE, **made})), 0.0, BEGUN_NS)
    assert step is not None
    assert step.reason == f"{sentence}; its limit of 3 restarts within an hour is reached"


def test_a_pause_begins_again_after_a_node_has_answered() -> None:
    group = running(**ELASTIC)
    made = watched(group, without(rows(group, **ALIVE), "gn7"))
    assert next_step(group, made, GONE + 0.1, BEGUN_NS) is None
    made.heard("gn7", rows(group, **ALIVE)["gn7"], GONE + 0.2)
    assert next_step(group, made, GONE + 0.3, BEGUN_NS) is None
    made.heard("gn7", None, 100.0)
    assert next_step(group, made, 100.0 + GONE + 0.1, BEGUN_NS) is None
    assert next_step(group, made, 100.0 + GONE + 1.2, BEGUN_NS) is not None


def test_a_silence_of_the_time_before_another_node_led_is_none() -> None:
    group = running(**ELASTIC)
    made = watched(group, without(rows(group, **ALIVE), "gn7"))
    # Another node asked for an hour.
    made.heard("gn7", None, 3600.0)
    assert next_step(group, made, 3600.0, BEGUN_NS) is None
    assert next_step(group, made, 3600.0 + 2, BEGUN_NS) is None
    # A large group is asked more rarely.
    made.every = 100.0
    for seconds in (100, 200, 300):
        made.heard("gn7", None, 3600.0 + seconds)
    assert next_step(group, made, 3901.0, BEGUN_NS) is None
    assert next_step(group, made, 3903.0, BEGUN_NS) is not None


def test_the_fence_counts_from_when_the_leader_learned_of_the_end() -> None:
    group = _again(**ELASTIC)
    made = watched(group, without(rows(group), "gn7"), 1000.0)
    assert next_step(group, made, 1000.0 + FENCED, BEGUN_NS) is None
    assert next_step(group, made, 1000.0 + FENCED + 0.1, BEGUN_NS) == NO_GN7
    newer = ordered(group, "restart")
    made.note(newer, 1100.0)
    assert next_step(newer, made, 1100.0 + FENCED, BEGUN_NS) is None
