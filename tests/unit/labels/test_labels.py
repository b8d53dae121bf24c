"""Labels of ranks: who may set them, what is stored, and what a later daemon restores."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from fakes import TOTALS, Sink

from probing.api.errors import CorruptTarget, NotFound, Overloaded, PrivilegeError, ProbingError, UsageError
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Message
from probing.daemon.labels import source
from probing.daemon.labels.source import CHANGES_S, MAX_CHANGES, MAX_LABELS, Label, Labels
from probing.daemon.source import Identity

SECOND = 10**9
OWNER, STRANGER = 1007, 1023
RANKS = [Identity(2**22 + rank, 7 + rank, "j", "r", "trainer", rank, rank, 3, owner=OWNER) for rank in range(3)]
LOADER = Identity(2**22 + 5, 12, "j", "r", "data_loader", owner=OWNER)
OTHER = Identity(2**22 + 6, 13, "k", "r", "trainer", 0, 0, 1, owner=STRANGER)


class Contexts:
    """Answers as readers do, with the process context of each pid: (address, published_ns, attributes)."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, int, dict[str, str]] | ProbingError] = {}
        self.asked: list[tuple[int, int, int]] = []

    def call_each(self, op: str, asks: Any, *, timeout: float, patience: float) -> Any:
        assert op == "process_context"
        for key, ask in asks.items():
            request = ask()
            self.asked.append((key[0], request["address"], request["published_ns"]))
            answer = self.answers.get(key[0], (0, 0, {}))
            if isinstance(answer, ProbingError):
                yield key, answer
                continue
            address, published, attributes = answer
            same = published and published == request["published_ns"]
            header = {"address": address, "published_ns": published, "attributes": None if same else attributes}
            yield key, Message(header)


class Scene:
    def __init__(self) -> None:
        self.sink, self.clock, self.readers = Sink("train.labels"), FakeClock(), Contexts()
        self.labels = Labels(self.readers, self.sink, self.clock, "n1", lambda: [*RANKS, LOADER, OTHER])  # type: ignore[arg-type]
        for who in (*RANKS, LOADER, OTHER):
            self.labels.process_identified(who)

    def label(self, **request: Any) -> int:
        answer, payload = self.labels.answer({"op": "label", **request})
        assert payload == b""
        return int(answer["ranks"])

    def stored(self) -> list[tuple[Any, ...]]:
        rows = self.sink.take("train.labels")
        return [(row["job"], row["rank"], row["key"], row["value"], row["source"], row["uid"]) for row in rows]

    def phases(self) -> list[str | None]:
        return [label.value if (label := self.labels.phase(who.key)) else None for who in RANKS]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_annotation_of_a_job_labels_its_ranks(scene: Scene) -> None:
    assert scene.label(labels={"phase": "eval"}, job="j") == 3
    assert scene.phases() == ["eval"] * 3
    assert scene.stored() == [("j", rank, "phase", "eval", "annotate", None) for rank in range(3)]
    assert scene.label(labels={"phase": "", "team": "vision"}, job="j", rank=1) == 1
    assert scene.phases() == ["eval", None, "eval"]
    assert scene.stored() == [
        ("j", 1, "phase", None, "annotate", None),
        ("j", 1, "team", "vision", "annotate", None),
    ]
    # What a label has already is no change.
    assert scene.label(labels={"phase": "eval"}, pids=[RANKS[0].pid]) == 1
    assert scene.stored() == []


def test_a_datagram_labels_its_sender_or_its_senders_job(scene: Scene) -> None:
    sender = {"by_pid": RANKS[2].pid, "by_uid": OWNER}
    assert scene.label(labels={"phase": "compile"}, **sender) == 1
    assert scene.phases() == [None, None, "compile"]
    assert scene.stored() == [("j", 2, "phase", "compile", "datagram", OWNER)]
    assert scene.label(labels={"phase": "eval"}, by_pid=LOADER.pid, by_uid=OWNER) == 3
    assert scene.label(labels={"phase": "checkpoint"}, rank=0, **sender) == 1
    assert scene.phases() == ["checkpoint", "eval", "eval"]
    # A process that is none of the job's names it.
    assert scene.label(labels={"a": "b"}, job="j", by_pid=1, by_uid=OWNER) == 3


def test_only_the_jobs_user_and_root_may_label_its_ranks(scene: Scene) -> None:
    for request in ({"job": "j"}, {"pids": [RANKS[1].pid]}, {"job": "j", "rank": 0}):
        with pytest.raises(
            PrivilegeError, match=f"uid {STRANGER} has no right to label ranks of job j, which belongs to uid {OWNER}"
        ):
            scene.label(labels={"phase": "eval"}, by_pid=OTHER.pid, by_uid=STRANGER, **request)
    assert scene.phases() == [None] * 3
    assert scene.stored() == []
    (state,) = scene.labels.states(TOTALS)
    assert state.detail.startswith("0 ranks with labels, 3 requests refused, the last: uid 1023 has no right")
    assert scene.label(labels={"phase": "eval"}, job="j", by_pid=1, by_uid=0) == 3


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"labels": {}, "job": "j"}, UsageError),
        ({"labels": {"a b": "c"}, "job": "j"}, UsageError),
        ({"labels": {"a": "c" * 257}, "job": "j"}, UsageError),
        ({"labels": {"a": 7}, "job": "j"}, UsageError),
        ({"labels": {f"k{n}": "v" for n in range(MAX_LABELS + 1)}, "job": "j"}, UsageError),
        ({"labels": {"a": "b"}, "job": "none"}, NotFound),
        ({"labels": {"a": "b"}, "job": "j", "rank": 7}, NotFound),
        ({"labels": {"a": "b"}, "pids": [LOADER.pid]}, NotFound),
        ({"labels": {"a": "b"}, "by_pid": 1, "by_uid": OWNER}, NotFound),
    ],
)
def test_what_cannot_be_set_is_refused(scene: Scene, request_: dict[str, Any], kind: type[ProbingError]) -> None:
    with pytest.raises(kind):
        scene.label(**request_)
    assert scene.stored() == []


def test_changes_are_limited_by_user(scene: Scene) -> None:
    for value in range(MAX_CHANGES):
        scene.label(labels={"n": str(value)}, by_pid=RANKS[0].pid, by_uid=OWNER)
    for who in RANKS[:2]:
        with pytest.raises(Overloaded):
            scene.label(labels={"n": "more"}, by_pid=who.pid, by_uid=OWNER)
    assert scene.label(labels={"n": "0"}, by_pid=OTHER.pid, by_uid=STRANGER) == 1
    # An administrator is not held up.
    assert scene.label(labels={"n": "admin"}, job="j") == 3
    scene.clock.advance(SECOND)
    for value in range(CHANGES_S):
        assert scene.label(labels={"n": str(value)}, by_pid=RANKS[1].pid, by_uid=OWNER) == 1
    with pytest.raises(Overloaded):
        scene.label(labels={"n": "more"}, by_pid=RANKS[1].pid, by_uid=OWNER)


def test_a_request_sets_all_of_its_labels_or_none(scene: Scene) -> None:
    scene.label(labels={f"k{number}": "v" for number in range(MAX_LABELS)}, job="j", rank=2)
    scene.stored()
    with pytest.raises(UsageError, match="64 labels at most"):
        scene.label(labels={"phase": "eval"}, job="j")
    assert scene.phases() == [None] * 3
    assert scene.stored() == []


def test_labels_that_are_switched_off_count_no_more(scene: Scene) -> None:
    scene.label(labels={"phase": "eval"}, job="j")
    scene.labels._enabled = lambda who: who.rank == 1
    assert scene.phases() == [None, "eval", None]
    for request in ({"by_pid": RANKS[0].pid, "by_uid": OWNER}, {"job": "j", "rank": 0}):
        with pytest.raises(NotFound):
            scene.label(labels={"phase": "train"}, **request)


def test_the_process_context_is_read_when_it_changes(scene: Scene) -> None:
    first = RANKS[0].pid
    scene.readers.answers[first] = (0x7000, 23, {"phase": "eval", "service.name": "a\nb", "no key": "x"})
    scene.labels.turn()
    assert scene.stored() == [
        ("j", 0, "phase", "eval", "opentelemetry", None),
        ("j", 0, "service.name", "a\\nb", "opentelemetry", None),
    ]
    scene.clock.advance(SECOND)
    scene.labels.turn()
    # The others are searched more rarely.
    assert scene.readers.asked[-1] == (first, 0x7000, 23)
    assert scene.stored() == []
    scene.label(labels={"team": "vision"}, job="j", rank=0)
    scene.readers.answers[first] = (0x7000, 29, {"phase": "train"})
    scene.clock.advance(SECOND)
    scene.labels.turn()
    assert scene.stored()[1:] == [
        ("j", 0, "phase", "train", "opentelemetry", None),
        ("j", 0, "service.name", None, "opentelemetry", None),
    ]
    # What was said later by another way stays, unless the attribute itself changes.
    scene.label(labels={"phase": "checkpoint"}, job="j", rank=0)
    scene.readers.answers[first] = (0x7000, 31, {"phase": "train", "step": "7"})
    scene.clock.advance(SECOND)
    scene.labels.turn()
    assert scene.phases()[0] == "checkpoint"
    scene.readers.answers[first] = (0, 0, {})
    scene.clock.advance(SECOND)
    scene.labels.turn()
    assert scene.phases() == [None] * 3
    assert scene.labels._processes[RANKS[0].key].labels.keys() == {"team"}
    scene.readers.answers[first] = CorruptTarget("the process context ends within a field")
    scene.clock.advance(60 * SECOND)
    scene.labels.turn()
    assert [loss.reason for loss in scene.sink.losses] == ["the process context ends within a field"]


def test_labels_are_restored_for_processes_that_live(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.label(labels={"phase": "eval", "team": "vision"}, job="j", by_pid=1, by_uid=OWNER)
    scene.clock.advance(SECOND)
    scene.label(labels={"team": ""}, job="j", rank=0)
    rows = pa.Table.from_batches(scene.sink.batches)
    later = Scene()
    (columns, restore), *_ = later.labels.restored_tables.values()
    later.labels._processes.clear()
    # Those of RANKS[2] have ended meanwhile.
    monkeypatch.setattr(source, "is_alive", lambda pid, _: pid != RANKS[2].pid)
    restore(rows.select(list(columns)))
    assert later.labels._restored.keys() == {RANKS[0].key, RANKS[1].key}
    later.labels.process_identified(RANKS[0])
    since = scene.clock.pair().real_ns - SECOND
    assert later.labels._processes[RANKS[0].key].labels == {"phase": Label("eval", since, "datagram", OWNER)}
    later.labels.started(lambda *_: True)
    later.labels.process_identified(RANKS[1])
    assert later.phases() == ["eval", None, None]


def test_processes_of_the_users_are_read_in_turn(scene: Scene) -> None:
    scene.labels.turn()
    assert [pid for pid, _, _ in scene.readers.asked] == [RANKS[0].pid, OTHER.pid, RANKS[1].pid, RANKS[2].pid]


def test_labels_of_a_program_end_when_it_calls_exec(scene: Scene) -> None:
    # GIVEN labels that a rank published and sent, and one of an administrator
    who = RANKS[0]
    scene.readers.answers[who.pid] = (0x7000, 23, {"phase": "eval"})
    scene.labels.turn()
    scene.label(labels={"step": "7"}, by_pid=who.pid, by_uid=OWNER)
    scene.label(labels={"team": "vision"}, job="j", rank=0)
    scene.stored()
    # WHEN the rank runs another program, whose context is at the same place
    scene.labels.process_replaced(*who.key)
    # THEN only the administrator's stays
    assert scene.stored() == [
        ("j", 0, "phase", None, "opentelemetry", None),
        ("j", 0, "step", None, "datagram", OWNER),
    ]
    assert scene.labels._processes[who.key].labels.keys() == {"team"}
    # AND the context of the new program is searched at once
    scene.labels.turn()
    assert scene.readers.asked[-1] == (who.pid, 0, 0)
    assert scene.phases()[0] == "eval"
    scene.labels.process_replaced(1, 1)
