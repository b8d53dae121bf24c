"""The lines of the audit log: each change has one, whatever its caller does, and it says who made what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from fakes import Now
from group_records import running

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.groups.workers import Workers
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.answering import answering
from probing.daemon.service.audit import Audit
from probing.daemon.service.group_peers import Entry, Records
from probing.daemon.service.groups import Groups
from probing.groups.group import Group

ADA = Caller("unix", "1000", 7)
PAUSE = pb.PauseRequest(paused=True)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.name == "probing.audit"]


def test_no_flood_of_calls_hides_a_change(lines: Callable[[], list[str]]) -> None:
    now = Now(1000.0)
    audit, bob = Audit(now), Caller("unix", "1001", 8)
    for number in range(100):
        audit.refused(bob, f"query {number}", "no")
        audit.call(bob, f"annotate {number}", Scope.PROBE, None)
    audit.call(bob, "eval", Scope.ADMIN, None)
    audit.call(ADA, "annotate", Scope.PROBE, None)
    assert lines()[-2:] == [f"{what} asked by {who}: done" for what, who in (("eval", bob), ("annotate", ADA))]
    assert len(lines()) == 20 + 20 + 2
    now.now += 1.0
    audit.call(bob, "annotate", Scope.PROBE, None)
    assert lines()[-2:] == [
        "80 lines of unix: uid 1001 were dropped: too many in a second",
        f"annotate asked by {bob}: done",
    ]


def test_a_refusal_whose_line_found_no_room_has_one_the_next_time(lines: Callable[[], list[str]]) -> None:
    now = Now(1000.0)
    audit = Audit(now)
    for number in range(20):
        audit.refused(Caller("unix", "1001", 8), f"query {number}", "no")
    audit.refused(ADA, "pause", "no")
    now.now += 1.0
    audit.refused(ADA, "pause", "no")
    audit.refused(ADA, "pause", "no")
    assert lines()[20:] == [
        "1 lines were dropped: too many in a second",
        f"pause asked by {ADA}: refused: no (and 1 times since the last line)",
    ]


FORGED = "no such job\n2026-11-29T07:00:00.000Z WARNING service probing.audit: eval asked by unix: uid 0, pid 1: done"


def test_no_text_of_a_caller_looks_like_a_line(lines: Callable[[], list[str]]) -> None:
    audit = Audit()
    audit.call(ADA, "annotate", Scope.PROBE, UsageError(FORGED))
    audit.call(ADA, "pause", Scope.PROBE, UsageError("\u2028\x1b[2J\r" + "a" * 10_000))
    audit.refused(ADA, "a call", FORGED)
    assert len(lines()) == 3
    assert all(line.isprintable() and len(line) <= 4000 for line in lines())


def test_the_reason_of_a_group_of_another_node_looks_like_no_line(caplog: pytest.LogCaptureFixture) -> None:
    groups = Groups("gn6", None, Records(None), Workers("gn6", 2, 5))  # type: ignore[arg-type]
    # Nodes take it, since it is not signed by the owner.
    group = Group.from_json(replace(running(), reason=FORGED).to_json())
    groups._learned("llama", Entry(known=group))
    assert [record.getMessage().isprintable() for record in caplog.records] == [True]


class Service:
    """A service whose Pause is begun, and then does ``rest``."""

    hints = False

    def __init__(self, rest: Callable[[], Any]) -> None:
        self.audit, self.timed, self._rest = Audit(), lambda *_: None, rest
        self.begun = asyncio.Event()

    async def identify(self, _context: object) -> Caller:
        return ADA

    @answering
    async def Pause(self, _request: object, _context: object, _caller: Caller) -> pb.PauseReply:
        self.begun.set()
        await self._rest()
        return pb.PauseReply()


class Context:
    """The context of a call that can be ended."""

    def set_trailing_metadata(self, _metadata: object) -> None:
        """Sends nothing."""

    async def abort(self, _code: object, _text: str) -> None:
        raise grpc.aio.AbortError


def test_a_change_whose_caller_goes_away_has_its_line(lines: Callable[[], list[str]]) -> None:
    async def scene() -> None:
        service = Service(asyncio.Event().wait)
        call = asyncio.create_task(service.Pause(PAUSE, Context()))
        await service.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(scene())
    assert lines() == ["pause asked by unix: uid 1000, pid 7: failed: the caller went away"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (grpc.aio.InternalError("the call has ended"), "failed: the caller went away"),
        (KeyError("a bug"), "failed: Pause failed: KeyError"),
        (UsageError("no"), "failed: no"),
        (None, "done"),
    ],
)
def test_a_change_has_its_line_however_it_ends(
    lines: Callable[[], list[str]], error: Exception | None, line: str
) -> None:
    async def rest() -> None:
        if error is not None:
            raise error

    async def scene() -> None:
        call = asyncio.create_task(Service(rest).Pause(PAUSE, Context()))
        await asyncio.wait({call})
        assert call.cancelled() or isinstance(call.exception(), (grpc.aio.AbortError, type(None)))

    asyncio.run(scene())
    assert lines() == [f"pause asked by unix: uid 1000, pid 7: {line}"]
