"""A connection of a launcher: who it is, and what it keeps waiting."""

from __future__ import annotations

import asyncio
import pwd
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.groups.workers import Workers
from probing.daemon.query.caller import Caller
from probing.daemon.service.group_launchers import GroupLaunchers
from probing.daemon.service.group_peers import Records

UID = 4711
DEADLINE_S = 30.0


def test_a_slow_list_of_users_keeps_no_other_call_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, workers = threading.Event(), Workers("gn6", 2, 5)

    def getpwuid(uid: int) -> Any:
        assert uid == UID
        # An LDAP that does not answer.
        assert answers.wait(DEADLINE_S), "nothing else ran meanwhile"
        return SimpleNamespace(pw_name="ada")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)

    async def reports() -> AsyncIterator[pb.WorkReport]:
        yield pb.WorkReport(workers=("gn6-0",), pid=7, rows=b"[]")
        joined.set()
        await asyncio.get_running_loop().create_future()

    async def scene() -> None:
        launchers = GroupLaunchers("gn6", None, Records(None), workers)  # type: ignore[arg-type]
        call = asyncio.create_task(launchers.work(reports(), None, Caller("unix", str(UID), 7)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        answers.set()
        await asyncio.wait_for(joined.wait(), DEADLINE_S)
        assert [row["user"] for row in workers.rows()] == ["ada"]
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    joined = asyncio.Event()
    asyncio.run(scene())
