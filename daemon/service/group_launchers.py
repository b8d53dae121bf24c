"""Receives reports of the launchers that are connected to this node, and sends them records, leases and requests."""

from __future__ import annotations

import asyncio
import pwd
from typing import Any

from probing.api.errors import NotFound, Overloaded, PeerError, PrivilegeError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape
from probing.daemon.groups.workers import Launcher, Workers
from probing.daemon.query.caller import Caller
from probing.daemon.service.group_peers import Entry, GroupPeers, Records
from probing.daemon.service.limits import Context
from probing.groups.group import Group
from probing.groups.report import rows_from

__all__ = ("GroupLaunchers",)

_MAX_READINGS, _READ_S, _MAX_LOG = 16, 5.0, 256 << 10


class GroupLaunchers:
    """The connections of launchers. Belongs to one event loop."""

    def __init__(self, node: str, peers: GroupPeers, records: Records, workers: Workers) -> None:
        self._node, self._peers, self._records, self._workers = node, peers, records, workers
        self._readings = 0

    async def work(self, reports: Any, context: Context, caller: Caller) -> None:
        """Answers a launcher until it goes away. Raises UsageError, PrivilegeError or FormatError."""
        uid = caller.uid
        if uid is None:
            raise PrivilegeError(
                f"a launcher has to run on node {self._node} itself", hint="give --join the address of its own node"
            )
        # Where users come from LDAP, this may take seconds.
        user = await asyncio.to_thread(_user, uid)
        launcher: Launcher | None = None
        sender: asyncio.Task[None] | None = None
        try:
            async for report in reports:
                if launcher is None:
                    launcher = self._workers.join(uid, user, report.workers, report.pid, report.version[:64])
                    self._brief(launcher)
                    sender = asyncio.create_task(_send(launcher, context))
                self._workers.report(launcher, report.number, rows_from(report.rows))
                for part in report.logs:
                    if (reading := launcher.readings.pop(part.id, None)) is not None and not reading.done():
                        reading.set_result(part)
                if sender is not None and sender.done():
                    break
        finally:
            if sender is not None:
                sender.cancel()
            if launcher is not None:
                self._workers.leave(launcher)

    async def log(self, request: pb.GroupLogRequest, caller: Caller) -> pb.GroupLogReply:
        """Returns a part of the log of a rank; the launcher of the rank reads it. Raises ProbingError."""
        entry = self._records.find(request.name)
        if entry is None or (group := entry.known) is None:
            raise NotFound(
                f"node {self._node} knows no group {escape(request.name, 64)}", hint="ask a node of the group"
            )
        if caller.listener == "unix" and caller.uid not in (0, group.spec.uid):
            raise PrivilegeError(f"the logs of group {group.spec.name} are for {group.spec.owner}")
        worker = next((rank.worker for rank in group.ranks() if rank.rank == request.rank), "")
        if not (launchers := self._workers.serving([worker])):
            raise NotFound(
                f"no launcher here serves rank {request.rank} of group {group.spec.name}",
                hint=f"`probingctl group status {group.spec.name}` names the worker of each rank",
            )
        launcher, wanted = launchers[0], pb.LogWanted(group=request.name, rank=request.rank)
        setattr(wanted, "from", getattr(request, "from"))
        if launcher.uid != group.spec.uid:
            raise PrivilegeError(f"{worker} is served for {launcher.user}, not for {group.spec.owner}")
        if len(launcher.readings) >= _MAX_READINGS:
            raise Overloaded(f"{_MAX_READINGS} reads of the launcher's logs are under way", hint="ask again in a while")
        self._readings += 1
        wanted.id = self._readings
        reading = launcher.readings[wanted.id] = asyncio.get_running_loop().create_future()
        try:
            launcher.put(f"log {wanted.id}", request.name, pb.WorkOrder(log=wanted))
            part: pb.LogPart = await asyncio.wait_for(reading, _READ_S)
        except asyncio.TimeoutError:
            raise PeerError(f"the launcher of {worker} does not answer", hint="`probingctl group status`") from None
        finally:
            launcher.readings.pop(wanted.id, None)
        if part.problem:
            raise NotFound(f"rank {request.rank} of group {group.spec.name}: {escape(part.problem, 200)}")
        return pb.GroupLogReply(node=self._node, data=part.data[:_MAX_LOG], end=part.end)

    def tell(self, name: str, entry: Entry) -> None:
        """Sends the known record to the launchers of its workers."""
        if entry.known is not None:
            for launcher in self._workers.serving(_concerned(entry.known)):
                launcher.put("record", name, self.record_for(entry.known, entry.acceptor.committed.value))

    def _brief(self, launcher: Launcher) -> None:
        """Sends a launcher that has just connected the records of its groups."""
        mine = set(launcher.workers)
        for name, entry in self._records.entries.items():
            if entry.known is not None and not mine.isdisjoint(_concerned(entry.known)):
                launcher.put("record", name, self.record_for(entry.known, entry.acceptor.committed.value))

    def record_for(self, group: Group, record: bytes) -> pb.WorkOrder:
        """Returns the order that gives a launcher the record, with the address of the master as this node knows it."""
        try:
            master = self.host(group.ranks()[0].node) if group.port else ""
        except PeerError:
            # Without an address the ranks resolve the master's name themselves.
            master = ""
        return pb.WorkOrder(group=record, master=master)

    def host(self, node: str) -> str:
        """Returns the host of a node's address. Raises PeerError for an unknown node."""
        address = self._peers.address(node)
        return "127.0.0.1" if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")


def _concerned(group: Group) -> tuple[str, ...]:
    return (*group.spec.workers, *group.occupied)


async def _send(launcher: Launcher, context: Context) -> None:
    while True:
        await context.write(await launcher.next_order())


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
