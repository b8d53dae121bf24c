"""The record of a group: signatures, hostile records, and each transition."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from group_records import BEGUN_NS, NS, key_of, ordered, record, running, spec_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from probing.api.errors import FormatError, PrivilegeError, ProbingError, UsageError
from probing.groups.group import Action, Attempt, Group, Order, created, order_of
from probing.groups.spec import MAX_WORKERS, node_of

HOUR_NS = 3600 * NS
ALL = ("gn6-0", "gn6-1", "gn7-0", "gn7-1")


def changed(group: Group, **fields: Any) -> bytes:
    """Returns the JSON of a record in which fields were changed without the owner."""
    return json.dumps({**asdict(group), **fields}).encode()


def in_order(**fields: Any) -> dict[str, Any]:
    return {"order": {**asdict(running().order or Order("", "start", 0, 0)), **fields}}


def test_a_record_is_the_same_after_json() -> None:
    group = running("gn7").restarted("failure", "rank 1 \u2026 exited with 1", BEGUN_NS + NS)
    assert group is not None
    assert Group.from_json(group.to_json()) == group
    assert (group.spec, group.restarts) == (spec_of(), 1)


FORGED: tuple[tuple[str, bytes], ...] = (
    ("a changed byte of the specification", changed(running(), spec_text=running().spec_text.replace("gn7", "gn8"))),
    ("a blank in the specification", changed(running(), spec_text=running().spec_text + " ")),
    ("another key", changed(running(), key=key_of("eve").public)),
    ("no key", changed(running(), key="")),
    ("a key that is not hex", changed(running(), key="x" * 64)),
    ("a signature that is not hex", changed(running(), signature="x" * 128)),
    ("a signature with half of a surrogate pair", changed(running(), signature="\ud800")),
    ("the signature of an order", changed(running(), signature=running().order.signature if running().order else "")),
    ("an order by another key", changed(running(), order=asdict(order_of(record(), "start", key_of("eve"))))),
    ("a changed action", changed(running(), **in_order(action="restart"))),
    ("a later generation", changed(running(), generation=2, **in_order(generation=2))),
    ("an order of a later generation", changed(running(), generation=0)),
    ("another version", changed(running(), **in_order(version=2))),
    ("other nodes left out", changed(running(), **in_order(without=["gn7"]))),
    ("an order of another group", changed(running(name="other"), order=asdict(running()).get("order"))),
    ("running without an order", changed(record(), phase="running")),
    ("ending without an order", changed(record(), phase="ending")),
    ("finished without an order", changed(record(), phase="finished")),
    ("running after the owner stopped it", changed(ordered(running(), "stop"), phase="running")),
    ("running after the owner deleted it", changed(ordered(running(), "delete"), phase="running")),
    ("a node that the owner left out", changed(running("gn7"), excluded=[])),
)
ATTEMPT = {"generation": 1, "at_ns": 1, "cause": "failure", "reason": ""}
MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("nothing", b""),
    ("not JSON", b"{"),
    ("10,000 lists", b"[" * 10_000),
    ("10 MB", b" " * 10_000_000 + record().to_json()),
    ("no specification", changed(record(), spec_text="")),
    ("a specification with half of a surrogate pair", changed(record(), spec_text="\ud800")),
    ("no node is left", changed(running(), excluded=["gn6", "gn7"])),
    ("an unknown node is left out", changed(running(), excluded=["gn8"])),
    ("an unknown phase", changed(record(), phase="exploding")),
    ("a negative generation", changed(record(), generation=-1)),
    ("a huge generation", changed(record(), generation=1 << 53)),
    ("a generation of 400 digits", changed(record(), generation=10**400)),
    ("a negative time", changed(record(), since_ns=-1)),
    ("a huge time", changed(record(), since_ns=1 << 63)),
    ("a negative port", changed(running(), port=-1)),
    ("a huge port", changed(running(), port=65_536)),
    ("an escape sequence as address", changed(running(), address="\x1b[2J")),
    ("a long address", changed(running(), address="a" * 256)),
    ("a surrogate as reason", changed(running(), reason="\udc80")),
    ("a long reason", changed(running(), reason="a" * 301)),
    ("many attempts", changed(running(), attempts=[[]] * 101)),
    ("an attempt of a later generation", changed(running(), attempts=[{**ATTEMPT, "generation": 2}])),
    ("an attempt at a huge time", changed(running(), attempts=[{**ATTEMPT, "at_ns": 1 << 70}])),
    ("an attempt with a surrogate", changed(running(), attempts=[{**ATTEMPT, "cause": "\udc80"}])),
    ("an occupied path", changed(running(), occupied=["../x-0"])),
    ("a number as occupied", changed(running(), occupied=[6])),
)


@pytest.mark.parametrize("data", [case[1] for case in FORGED], ids=[case[0] for case in FORGED])
def test_a_forged_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Group.from_json(data)


@pytest.mark.parametrize("data", [case[1] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError) as refused:
        Group.from_json(data)
    assert refused.value.message.isprintable()


@given(st.integers(0, 2**32))
def test_a_changed_byte_of_what_is_signed_is_noticed(seed: int) -> None:
    chosen = random.Random(seed)
    group = running()
    field = chosen.choice(("spec_text", "signature", "key"))
    text = getattr(group, field)
    at = chosen.randrange(len(text))
    other = chosen.choice([digit for digit in "0123456789abcdef" if digit != text[at]])
    with pytest.raises(FormatError):
        Group.from_json(changed(group, **{field: text[:at] + other + text[at + 1 :]}))


def test_the_record_of_the_largest_group_can_be_changed_until_its_end() -> None:
    workers = tuple(f"gn{number // 8}-{number % 8}" for number in range(MAX_WORKERS))
    group = running(workers=workers, master="gn0", env={"A": '"' * 1000}, min_nodes=1)
    attempt = Attempt(1, BEGUN_NS, "failure", "\u4f60" * 100)
    tried = replace(group, attempts=(attempt,) * 100)
    again = tried.restarted("failure", "\u4f60" * 1000, BEGUN_NS + HOUR_NS, ("gn1", "gn2"))
    assert again is not None
    group = ordered(again.running(BEGUN_NS), "restart", *[f"gn{number}" for number in range(1, 2048)])
    assert len(group.occupied) == 8 * 2046
    for end in (again, group, ordered(group, "stop"), ordered(group, "delete")):
        assert Group.from_json(end.to_json()) == end


def test_start_stop_restart_and_delete() -> None:
    group = record()
    assert (group.phase, group.generation) == ("stopped", 0)
    group = ordered(group, "start")
    assert (group.phase, group.generation, group.occupied, group.reason) == ("ending", 1, (), "start by ada")
    group = group.running(BEGUN_NS + 1, address="10.0.0.6", port=29501)
    assert (group.phase, group.generation, group.occupied) == ("running", 1, ())
    assert {(rank.master_addr, rank.master_port) for rank in group.ranks()} == {("10.0.0.6", 29501)}
    group = ordered(group, "restart", "gn6")
    assert (group.phase, group.generation, group.occupied, group.excluded) == ("ending", 2, ALL, ("gn6",))
    assert (group.address, group.port) == ("", 0)
    group = ordered(group, "stop")
    assert (group.phase, group.generation, group.occupied) == ("stopped", 3, ALL)
    group = ordered(group, "start")
    assert (group.phase, group.generation, group.occupied, group.excluded) == ("ending", 4, ALL, ())
    group = ordered(group.running(BEGUN_NS), "delete")
    assert (group.phase, group.generation, group.occupied) == ("deleted", 5, ALL)
    with pytest.raises(UsageError, match="group llama is deleted"):
        ordered(group, "start")


def test_a_finished_group_may_have_left_processes() -> None:
    group = running().over("finished", "4 ranks ended with status 0", BEGUN_NS)
    assert (group.phase, group.generation) == ("finished", 1)
    assert ordered(group, "start").occupied == ALL


def test_a_finished_group_keeps_its_workers_when_they_are_replaced() -> None:
    finished = running().over("finished", "4 ranks ended with status 0", BEGUN_NS)
    other = finished.renewed(created(spec_of(version=2, workers=("gn9-0",), master="gn9"), key_of()))
    assert (other.phase, other.occupied) == ("finished", ALL)
    assert other.nodes == {"gn6", "gn7", "gn9"}
    again = other.renewed(created(spec_of(version=3, workers=("gn5-0",), master="gn5"), key_of()))
    # gn9-0 has never run.
    assert ordered(again, "start").occupied == ALL


def test_a_failure_ends_the_ranks_that_are_left() -> None:
    group = running().over("failed", "rank 1 (gn6-1) exited with 1", BEGUN_NS)
    assert (group.phase, group.generation, group.occupied) == ("failed", 2, ALL)
    assert ordered(group, "start").generation == 3


def test_an_administrator_stops_a_group_without_the_owners_key() -> None:
    group = running().stopped(BEGUN_NS, "unix: uid 0, pid 7")
    assert (group.phase, group.generation, group.occupied) == ("stopped", 2, ALL)
    assert group.reason == "stop by unix: uid 0, pid 7"
    assert Group.from_json(group.to_json()) == group


def test_a_reason_of_a_launcher_is_made_harmless() -> None:
    group = running().over("failed", "rank 1 ended: \x1b[2J\udc80\n" + "a" * 1000, BEGUN_NS)
    assert group.reason.startswith("rank 1 ended: \\x1b[2J\\udc80\\n")
    assert (len(group.reason), group.reason[-1]) == (300, "\u2026")
    assert Group.from_json(group.to_json()) == group


ORDERS: tuple[tuple[str, Callable[[], object], type[ProbingError], str], ...] = (
    (
        "a replayed start after a stop",
        lambda: ordered(running(), "stop").ordered(order_of(record(), "start", key_of()), BEGUN_NS),
        UsageError,
        "group llama was changed meanwhile",
    ),
    (
        "an order that was given for an earlier generation",
        lambda: ordered(running(), "restart").ordered(order_of(running(), "restart", key_of()), BEGUN_NS),
        UsageError,
        "group llama was changed meanwhile",
    ),
    (
        "an order for a later generation",
        lambda: record().ordered(order_of(running(), "stop", key_of()), BEGUN_NS),
        UsageError,
        "group llama was changed meanwhile",
    ),
    (
        "an order for an older specification",
        lambda: (
            record()
            .renewed(created(spec_of(version=2, command=("rm",)), key_of()))
            .ordered(order_of(record(), "start", key_of()), BEGUN_NS)
        ),
        UsageError,
        "group llama was changed meanwhile",
    ),
    (
        "an order of another group",
        lambda: record().ordered(order_of(record(name="other"), "start", key_of()), BEGUN_NS),
        PrivilegeError,
        "the order for group llama is not signed by its owner ada",
    ),
    (
        "an order of another owner",
        lambda: record().ordered(order_of(record(), "start", key_of("eve")), BEGUN_NS),
        PrivilegeError,
        "the order for group llama is not signed by its owner ada",
    ),
    (
        "an order whose action was changed",
        lambda: record().ordered(replace(order_of(record(), "stop", key_of()), action="start"), BEGUN_NS),
        PrivilegeError,
        "the order for group llama is not signed by its owner ada",
    ),
    ("a second start", lambda: ordered(running(), "start"), UsageError, "group llama is running"),
    ("a start while it starts", lambda: ordered(ordered(record(), "start"), "start"), UsageError, "is ending"),
    ("all nodes left out", lambda: ordered(record(), "start", "gn6", "gn7"), UsageError, "no node is left"),
    ("an unknown node left out", lambda: ordered(record(), "start", "gn8"), UsageError, "has no node gn8"),
    ("an unknown node that the client did not check", lambda: _unchecked("gn8"), UsageError, "has no node gn8"),
    ("an order for a deleted group", lambda: ordered(ordered(record(), "delete"), "stop"), UsageError, "is deleted"),
)


def _unchecked(node: str) -> Group:
    order = Order("llama", "start", 1, 1, (node,))
    return record().ordered(replace(order, signature=key_of().sign("order", order.text())), BEGUN_NS)


@pytest.mark.parametrize(("give", "kind", "problem"), [case[1:] for case in ORDERS], ids=[case[0] for case in ORDERS])
def test_an_order_is_refused(give: Callable[[], object], kind: type[ProbingError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        give()


def test_a_newer_specification_replaces_the_older_one() -> None:
    old = ordered(record(), "stop")
    new = old.renewed(created(spec_of(version=2, command=("python", "eval.py")), key_of()))
    assert (new.spec.command, new.generation, new.phase) == (("python", "eval.py"), 1, "stopped")
    deleted = ordered(running(), "delete").renewed(created(spec_of(version=2), key_of()))
    assert (deleted.phase, deleted.occupied) == ("stopped", ALL)
    other_port = ordered(running(), "stop").renewed(created(spec_of(version=2, master_port=4711), key_of()))
    assert Group.from_json(other_port.to_json()) == other_port
    assert other_port.ranks()[0].master_port == 4711
    left_out = ordered(running("gn7"), "stop")
    assert left_out.renewed(created(spec_of(version=2), key_of())).excluded == ()


@pytest.mark.parametrize(
    ("old", "new", "kind", "problem"),
    [
        (record(), created(spec_of(version=2), key_of("eve")), PrivilegeError, "group llama belongs to ada"),
        (record(), created(spec_of(version=2, uid=1001), key_of()), PrivilegeError, "group llama belongs to ada"),
        (record(id="1"), created(spec_of(version=2, id="2"), key_of()), PrivilegeError, "group llama belongs to ada"),
        (record(), created(spec_of(version=1), key_of()), UsageError, "was changed meanwhile"),
        (record(), created(spec_of(version=3), key_of()), UsageError, "was changed meanwhile"),
        (running(), created(spec_of(version=2), key_of()), UsageError, "is running: its specification cannot change"),
        (ordered(record(), "start"), created(spec_of(version=2), key_of()), UsageError, "is ending: its spec"),
    ],
)
def test_a_specification_is_not_replaced(old: Group, new: Group, kind: type[ProbingError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        old.renewed(new)


def test_restarts_are_limited_within_an_hour() -> None:
    group = running(max_restarts=3)
    for number in range(3):
        again = group.restarted("failure", f"failure {number}", BEGUN_NS + number)
        assert again is not None
        assert (again.phase, again.generation, again.occupied) == ("ending", number + 2, ALL)
        group = again.running(BEGUN_NS + number)
    assert (group.restarts, group.generation) == (3, 4)
    assert group.restarted("failure", "the fourth", BEGUN_NS + HOUR_NS - 1) is None
    again = group.restarted("failure", "the fourth", BEGUN_NS + HOUR_NS)
    assert again is not None
    assert again.restarts == 4
    # The owner's order begins to count anew, but the hour does not.
    ordered_again = ordered(again, "restart").running(BEGUN_NS)
    assert ordered_again.restarts == 0
    assert ordered_again.restarted("failure", "the fifth", BEGUN_NS + HOUR_NS) is None


def test_the_third_hang_within_an_hour_does_not_restart() -> None:
    group = running(max_restarts=100)
    for number in range(2):
        again = group.restarted("hang", "rank 3 hangs", BEGUN_NS + number)
        assert again is not None
        group = again.running(BEGUN_NS)
    assert not group.may_restart("hang", BEGUN_NS + HOUR_NS - 1)
    assert group.may_restart("failure", BEGUN_NS + HOUR_NS - 1)
    assert group.may_restart("hang", BEGUN_NS + HOUR_NS)


def test_attempts_at_a_time_far_ahead_do_not_count_for_ever() -> None:
    # The clock of the node that led was ahead, or this node's was set back.
    group = running(max_restarts=1).restarted("failure", "rank 1 exited with 1", BEGUN_NS + 24 * HOUR_NS)
    assert group is not None
    assert not group.may_restart("failure", BEGUN_NS + 24 * HOUR_NS)
    assert not group.may_restart("failure", BEGUN_NS + 23 * HOUR_NS + 1)
    assert group.may_restart("failure", BEGUN_NS)


@pytest.mark.parametrize("phase", ["stopped", "failed", "finished", "deleted"])
def test_only_a_group_that_is_meant_to_run_is_restarted(phase: str) -> None:
    groups = {
        "stopped": ordered(running(), "stop"),
        "failed": running().over("failed", "", BEGUN_NS),
        "finished": running().over("finished", "", BEGUN_NS),
        "deleted": ordered(running(), "delete"),
    }
    assert groups[phase].restarted("failure", "", BEGUN_NS) is None


def test_nodes_that_are_left_out_stay_out_until_the_owners_next_order() -> None:
    group = running("gn6", workers=("gn6-0", "gn7-0", "gn8-0"), master="gn6")
    again = group.restarted("failure", "no answer of gn7", BEGUN_NS, ("gn7",))
    assert again is not None
    assert (again.excluded, [rank.worker for rank in again.ranks()]) == (("gn6", "gn7"), ["gn8-0"])
    with pytest.raises(UsageError, match="no node is left"):
        again.running(BEGUN_NS).restarted("failure", "no answer of gn8", BEGUN_NS, ("gn8",))
    assert ordered(again, "restart").excluded == ()


@pytest.mark.parametrize(
    ("workers", "master", "voters"),
    [
        (("gn6-0", "gn6-1", "gn10-0"), "gn6", ("gn6", "gn10")),
        (("gn6-0", "gn7-0"), "gn7-0", ("gn7", "gn6")),
        (tuple(f"n{n}-0" for n in range(9)), "n8", ("n8", "n0", "n1", "n2", "n3", "n4", "n5")),
        # A worker's name may be the name of a node, too: the node comes first, as in the table of ranks.
        (("gn-0", "gn-0-0"), "gn-0", ("gn-0", "gn")),
    ],
)
def test_voters(workers: tuple[str, ...], master: str, voters: tuple[str, ...]) -> None:
    group = record(workers=workers, master=master)
    assert group.voters == voters
    assert group.ranks()[0].node == voters[0]


class Transitions(RuleBasedStateMachine):
    """Random transitions, beside a model of which workers may have processes of which generations."""

    @initialize()
    def create(self) -> None:
        self.group = record(min_nodes=1, max_restarts=100)
        self.now_ns = BEGUN_NS
        # Generations whose processes a worker may have.
        self.processes: dict[str, set[int]] = {}

    def _take(self, group: Group | None) -> None:
        if group is None:
            return
        assert (group.generation, group.spec.version) >= (self.group.generation, self.group.spec.version)
        assert Group.from_json(group.to_json()) == group
        self.group = group
        if group.phase == "running":
            for rank in group.ranks():
                self.processes.setdefault(rank.worker, set()).add(group.generation)

    @rule(
        action=st.sampled_from(("start", "stop", "restart", "delete")),
        without=st.sets(st.sampled_from(("gn6", "gn7", "gn8")), max_size=2),
    )
    def order(self, action: Action, without: set[str]) -> None:
        nodes = set(map(node_of, self.group.spec.workers))
        try:
            self._take(ordered(self.group, action, *sorted(without & nodes), now_ns=self.now_ns))
        except UsageError:
            assert self.group.phase in ("deleted", "ending", "running") or nodes <= without

    @rule(workers=st.sets(st.sampled_from((*ALL, "gn8-0", "gn9-0")), min_size=1))
    def renew(self, workers: set[str]) -> None:
        old = self.group.spec
        fields = {"workers": tuple(sorted(workers)), "master": min(workers), "version": old.version + 1}
        fields["master_port"] = 29500 + 1009 * (old.version % 2)
        try:
            self._take(self.group.renewed(created(spec_of(min_nodes=1, max_restarts=100, **fields), key_of())))
        except UsageError:
            assert self.group.phase in ("ending", "running")

    @rule(hours=st.integers(0, 2))
    def wait(self, hours: int) -> None:
        self.now_ns += hours * HOUR_NS

    @rule(cause=st.sampled_from(("failure", "hang", "always")), node=st.sampled_from(("", "gn6", "gn7", "gn9")))
    def restart(self, cause: str, node: str) -> None:
        nodes = {rank.node for rank in self.group.ranks()}
        without = {node} & nodes if len(nodes) > 1 else set()
        self._take(self.group.restarted(cause, "a failure", self.now_ns, without))

    @rule()
    def stop_by_an_administrator(self) -> None:
        if self.group.phase != "deleted":
            self._take(self.group.stopped(self.now_ns, "root"))

    @rule(data=st.data())
    def processes_end(self, data: st.DataObject) -> None:
        if self.processes:
            worker = data.draw(st.sampled_from(sorted(self.processes)))
            # Processes of the running generation live on, others are ended by the launcher.
            keep = {self.group.generation} if self.group.phase in ("running", "finished") else set()
            left = self.processes[worker] & keep
            self.processes.update({worker: left})

    @precondition(lambda self: self.group.phase == "ending")
    @rule()
    def run(self) -> None:
        if all(not self.processes.get(worker) for worker in self.group.occupied):
            port = self.group.spec.master_port + 7
            self._take(self.group.running(self.now_ns, address="10.0.0.6", port=port))

    @precondition(lambda self: self.group.phase == "running")
    @rule(phase=st.sampled_from(("finished", "failed")))
    def over(self, phase: str) -> None:
        self._take(self.group.over(phase, "it ended", self.now_ns))  # type: ignore[arg-type]

    @invariant()
    def no_worker_with_processes_is_forgotten(self) -> None:
        group = self.group
        runs = {rank.worker for rank in group.ranks()} if group.phase in ("running", "finished") else set()
        for worker, generations in self.processes.items():
            older = {generation for generation in generations if generation < group.generation}
            assert not older or worker in group.occupied
            assert group.generation not in generations or worker in runs or worker in group.occupied
            assert not generations or node_of(worker) in group.nodes

    @invariant()
    def two_generations_never_run_at_once(self) -> None:
        if self.group.phase == "running":
            assert all(generations <= {self.group.generation} for generations in self.processes.values())


TestTransitions = Transitions.TestCase
