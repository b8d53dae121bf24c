"""Calls about groups: what takes long is done beside the event loop, and bounded for each user."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from group_records import record

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.caller import Caller
from probing.daemon.service.answering import CallAdmission, CallKind
from probing.daemon.service.audit import Audit
from probing.daemon.service.servicer import NodeService
from probing.groups.group import Group

DEADLINE_S = 30.0
ADA, EVE = Caller("unix", "1000", 7), Caller("unix", "1001", 8)
NEW = record()


class Groups:
    """Takes each new group."""

    async def group(self, request: pb.GroupRequest, _caller: Caller, new: Group | None = None) -> pb.GroupReply:
        assert (new or Group.from_json(request.create)) == NEW
        return pb.GroupReply(node="gn6", groups=[NEW.to_json()])


class Context:
    """The context of a call, with the caller."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def set_trailing_metadata(self, _metadata: object) -> None:
        """Sends nothing."""

    async def abort(self, code: object, text: str) -> None:
        raise grpc.aio.AbortError(code, text)


async def _caller(context: Any) -> Caller:
    return context.caller


def service() -> NodeService:
    made = NodeService.__new__(NodeService)
    made.identify, made.audit, made.timed = _caller, Audit(), lambda *_: None
    made._groups, made._admission = Groups(), CallAdmission()  # type: ignore[assignment]
    return made


def test_large_groups_of_one_user_keep_no_other_call_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, real = threading.Event(), Group.from_json

    def slow(data: bytes) -> Group:
        assert goes_on.wait(DEADLINE_S), "nothing else ran meanwhile"
        return real(data)

    request = pb.GroupRequest(name=NEW.spec.name, create=NEW.to_json())

    async def scene() -> None:
        one = service()
        call: Callable[[Caller], Any] = lambda who: asyncio.create_task(one.Group(request, Context(who)))  # noqa: E731
        calls = [call(EVE) for _ in range(CallKind.CONTROL.each)]
        await asyncio.sleep(0)
        # One more of the same user is refused, and another user's is not.
        with pytest.raises(grpc.aio.AbortError, match="are under way"):
            await asyncio.wait_for(call(EVE), DEADLINE_S)
        calls.append(call(ADA))
        await asyncio.sleep(0)
        goes_on.set()
        replies = await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)
        assert [list(reply.groups) for reply in replies] == [[NEW.to_json()]] * len(calls)
        one._admission.close()

    monkeypatch.setattr(Group, "from_json", staticmethod(slow))
    asyncio.run(scene())
