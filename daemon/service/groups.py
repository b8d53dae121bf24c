"""Groups of workers on this node: answers launchers, clients and other nodes, and carries out the groups' policies.

One node leads a group: the first voter that is healthy and has the record, as far as this node knows. The leader asks
all nodes of the group for their workers, and proposes the next change of the record. If two nodes lead at the same
time, the record itself decides between them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any

from probing.api.errors import NotFound, PrivilegeError, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables.schema import Row
from probing.api.text import escape, plural, with_owner
from probing.api.typed import typed_json
from probing.daemon.groups.policy import Step, Watched, absences, next_step
from probing.daemon.groups.workers import Workers
from probing.daemon.query.caller import Caller
from probing.daemon.service.group_launchers import GroupLaunchers
from probing.daemon.service.group_peers import Entry, GroupPeers, Records, packed_ballot
from probing.daemon.service.group_votes import GroupVotes
from probing.daemon.source_state import SourceState
from probing.diagnosis.facts import Missing
from probing.groups.group import Group, Order
from probing.groups.proposer import Proposer
from probing.groups.register import Ballot, Quorum
from probing.groups.report import rows_from
from probing.groups.spec import NAME, node_of

__all__ = ("Groups",)

_TICK_S = 0.5
# The leader asks each node of a group at this interval, s. In a group of more than 50 nodes the interval is longer: the
# leader asks _NODES_A_SECOND nodes a second.
_ASK_S = 1.0
_NODES_A_SECOND = 50
# The number of times that a lease is renewed within the time of the fence.
_RENEWALS = 6
_TELL = 16
# If the proposer of a change went away, the first voter finishes the change after this time, s. Each later voter waits
# this much longer than the voter before it.
_OPEN_S = 5.0
_MAX_FINDINGS, _MAX_ABSENT = 4096, 64
# The default of torchrun's ``--rdzv-id``. No group can have this name: torchrun and probingd treat it as a missing
# name, so the job would be named after the master.
_NO_RUN_ID, _OTHER = "none", "give the group another name"
_log = logging.getLogger("probing.groups")
_Update = Callable[[Group | None], Group | None]


class Groups:
    """The groups of this node. Belongs to one event loop; any thread may call ``finding`` and ask for rows.

    ``now``: a clock like time.monotonic(), s; ``wall_ns``: Unix time.
    """

    def __init__(
        self,
        node: str,
        peers: GroupPeers,
        records: Records,
        workers: Workers,
        now: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._node, self._peers, self._records, self._workers = node, peers, records, workers
        self.launchers = GroupLaunchers(node, peers, records, workers)
        self._votes = GroupVotes(node, records, workers, now)
        self._now, self._wall_ns = now, wall_ns
        records.on_news = self._learned
        self._watched: dict[str, Watched] = {}
        # By group and node: the ballot of the newest record that the node has confirmed to know.
        self._told: dict[str, dict[str, Ballot]] = {}
        # By group: the ballot of the record that all nodes have confirmed to know.
        self._told_all: dict[str, Ballot] = {}
        self._asked: dict[str, float] = {}
        # By group: the generation for which leases were last requested, and the time of the request.
        self._leased: dict[str, tuple[int, float]] = {}
        # By group: the ballot of a proposal that is not known to be committed, and the time when it was first seen.
        self._open: dict[str, tuple[Ballot, float]] = {}
        self._busy: set[str] = set()
        # By group: the generation that hangs, and the step to take because of it.
        self._hangs: dict[str, tuple[int, Step]] = {}
        # By group: the generation that runs, and the time of its start on the clock ``now``.
        self._began: dict[str, tuple[int, float]] = {}
        # Ids of the findings that were acted on, each with the generation, the oldest first.
        self._findings: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._problem = ""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat = asyncio.create_task(self._run())

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._beat] if self._beat else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def group(self, request: pb.GroupRequest, caller: Caller, new: Group | None = None) -> pb.GroupReply:
        """Makes the change in ``request``, if there is one, and returns the requested records. ``new``: the record of a
        ``create``, if the caller has parsed it already. Raises ProbingError.
        """
        await self._records.await_loaded()
        kind = request.WhichOneof("change")
        if kind is None:
            known = [entry.known for _, entry in sorted(self._records.entries.items()) if entry.known is not None]
            chosen = [one for one in known if not request.name or one.spec.name == request.name]
            return pb.GroupReply(node=self._node, groups=[one.to_json() for one in chosen])
        if not NAME.fullmatch(request.name):
            raise UsageError(
                f"{escape(request.name, 80)!r} is not a valid name of a group", hint="letters, digits, ., _ and -"
            )
        if kind == "create":
            record = await self._create(request.name, new or Group.from_json(request.create), caller)
        elif kind == "order":
            record = await self._order(request.name, _order(request.order))
        else:
            record = await self._change(request.name, lambda group: self._stopped(_there(group), str(caller)))
        _log.warning("group %s: %s by %s: generation %d", request.name, kind, caller, record.generation)
        return pb.GroupReply(node=self._node, groups=[record.to_json()])

    def _stopped(self, group: Group, who: str) -> Group | None:
        return group.stopped(self._wall_ns(), who) if group.phase in ("ending", "running") else None

    async def _create(self, name: str, new: Group, caller: Caller) -> Group:
        if new.spec.name != name:
            raise UsageError("the request and the record name two groups")
        if caller.listener == "unix" and caller.uid not in (0, new.spec.uid):
            raise PrivilegeError(f"uid {caller.uid} has no right to create a group of uid {new.spec.uid}")
        self._records.check_room(name, new, len(new.spec_text))

        def update(group: Group | None) -> Group | None:
            if group is None:
                if name == _NO_RUN_ID:
                    raise UsageError(
                        f"a job cannot have the name {name}: torchrun and probingd treat it as a missing name",
                        hint=_OTHER,
                    )
                if new.spec.version != 1:
                    raise UsageError(f"there is no group {name}", hint=f"probingctl group create {name} ...")
                # The new record has only the fields that the owner signed.
                return Group(new.spec_text, new.signature, new.key)
            return None if group.signature == new.signature else group.renewed(new)

        return await self._change(name, update, new)

    async def _order(self, name: str, order: Order) -> Group:
        def update(group: Group | None) -> Group | None:
            return None if _there(group, order).order == order else _there(group, order).ordered(order, self._wall_ns())

        return await self._change(name, update)

    async def agree(self, request: pb.AgreeRequest, caller: Caller | None = None) -> pb.AgreeReply:
        """Answers another node, or this node if ``caller`` is None. Raises ProbingError."""
        await self._records.await_loaded()
        return await self._votes.agree(request, caller)

    def finding(self, row: Mapping[str, Any], owner: Hashable) -> None:
        """Passes a stored row of ``diagnosis.findings`` to the policy of the group that runs the job in the row.

        ``owner``: the uid of the job's user, since anybody may give a job the name of a group. Does not wait. Only the
        node that made a finding acts on it, and only once.
        """
        made_here = row.get("found_by") == self._node
        if made_here and row.get("severity") == "error" and row.get("state") == "open" and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hang, dict(row), owner)

    def absences(self, job: str) -> list[Missing]:
        """Returns which ranks of the group ``job`` do not run, and why, for its diagnosis. Thread-safe."""
        entry, watched = self._records.entries.get(job), self._watched.get(job)
        if entry is None or entry.known is None or watched is None:
            return []
        return [Missing("rank", text, rank, node) for rank, node, text in absences(entry.known, watched)][:_MAX_ABSENT]

    def group_rows(self) -> Iterable[Row]:
        """Yields rows of ``cluster.groups``."""
        for group in self._shown():
            yield _group_row(group, self._watched.get(group.spec.name))

    def worker_rows(self) -> Iterable[Row]:
        """Returns rows of ``cluster.workers``."""
        return self._workers.rows()

    def sources(self) -> list[SourceState]:
        """Returns the row of the source ``groups``, for ``status`` and ``probing.sources``."""
        detail = plural(len(self._shown()), "group")
        state = "running" if self._records.loaded and not self._problem else "degraded"
        return [SourceState("groups", state, self._problem, detail=detail)]

    def _shown(self) -> list[Group]:
        """Returns the groups of this node that are not deleted, in the order of their names. Thread-safe.

        Groups without this node are left out: a node hears nothing about a group that it left, or that was only created
        through it.
        """
        known = (entry.known for _, entry in sorted(self._records.entries.items()))
        return [group for group in known if group and group.phase != "deleted" and self._node in group.nodes]

    async def _change(self, name: str, update: _Update, new: Group | None = None) -> Group:
        """Changes the record of a group by agreement of its voters, and tells its nodes. Raises ProbingError."""
        entry = self._records.entry(name)
        start = entry.known or new
        if start is None:
            raise NotFound(f"node {self._node} knows no group {name}", hint="ask a node of the group")

        def updated(value: bytes) -> bytes | None:
            group = update(Group.from_json(value) if value else None)
            return None if group is None else group.to_json()

        def voters(value: bytes) -> Quorum:
            return Quorum((Group.from_json(value) if value else start).voters)

        proposer = Proposer(self._node, self._peers.for_group(name, start.spec.id), voters, _pause)
        committed = await proposer.change(entry.acceptor.committed, updated)
        await self._records.learn(name, committed)
        await self._tell(name, self._records.entry(name))
        return Group.from_json(committed.value)

    def _learned(self, name: str, entry: Entry) -> None:
        group = entry.known
        assert group is not None
        # The reason is escaped: another node wrote it, and the group's owner did not sign it.
        _log.warning("group %s: generation %d is %s: %s", name, group.generation, group.phase, escape(group.reason))
        self._watched.setdefault(name, Watched()).note(group, self._now())
        if group.phase == "running":
            # A node that was away learns of the generation late, so the time since its start is subtracted.
            self._began[name] = group.generation, self._now() - max(0, self._wall_ns() - group.since_ns) / 1e9
        self.launchers.tell(name, entry)

    async def _run(self) -> None:
        while True:
            try:
                if not self._records.loaded:
                    await self._records.load()
                    # Launchers may have connected before.
                    for name, entry in self._records.entries.items():
                        self.launchers.tell(name, entry)
                for name, entry in list(self._records.entries.items()):
                    if name not in self._busy and not self._is_idle(name, entry):
                        self._begin(name, self._turn(name, entry))
                self._problem = ""
            except ProbingError as e:
                self._problem = e.message
            except Exception:  # a bug in handling one group must not stop the other groups
                _log.exception("a turn of the groups failed")
            await asyncio.sleep(_TICK_S)

    def _begin(self, name: str, turn: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await turn
            except ProbingError as e:
                _log.info("group %s: %s", name, escape(e.message))
            finally:
                self._busy.discard(name)

        self._busy.add(name)
        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_idle(self, name: str, entry: Entry) -> bool:
        """Returns whether a group needs no turn: its ranks are stopped, all its nodes know its record, and no newer
        record was accepted. That holds for most groups.
        """
        living = entry.known is not None and entry.known.phase in ("ending", "running")
        told = self._told_all.get(name) == entry.ballot
        return told and not living and entry.acceptor.accepted.ballot <= entry.ballot

    async def _turn(self, name: str, entry: Entry) -> None:
        if self._is_left(name, entry):
            await self._change(name, lambda _: None, Group.from_json(entry.acceptor.accepted.value))
        group, now = entry.known, self._now()
        if group is None:
            return
        watched = self._watched.setdefault(name, Watched())
        watched.note(group, now)
        if self._node in group.voters:
            await self._tell(name, entry)
        await self._renew(name, group, now)
        if (hang := self._hangs.get(name)) is not None:
            if hang[0] == group.generation:
                # If too few voters answer, ``_take`` raises and the step stays for the next turn: no second finding
                # would cause it again.
                await self._take(name, group, hang[1])
            if self._hangs.get(name) is hang:
                del self._hangs[name]
            return
        if group.phase not in ("ending", "running") or not self._leads(name, group, entry):
            return
        nodes = group.nodes
        watched.every = max(_ASK_S, len(nodes) / _NODES_A_SECOND)
        if now - self._asked.get(name, -math.inf) >= watched.every:
            self._asked[name] = now
            await self._hear(name, sorted(nodes), watched)
        if (step := next_step(group, watched, self._now(), self._wall_ns())) is not None:
            await self._take(name, group, step)

    def _is_left(self, name: str, entry: Entry) -> bool:
        """Returns whether the proposer of a change seems to have gone away before it told this node the outcome."""
        accepted = entry.acceptor.accepted
        if accepted.ballot <= entry.ballot:
            self._open.pop(name, None)
            return False
        ballot, since = self._open.setdefault(name, (accepted.ballot, self._now()))
        if ballot != accepted.ballot:
            del self._open[name]
            return False
        voters = Group.from_json(accepted.value).voters
        turn = voters.index(self._node) if self._node in voters else len(voters)
        if self._now() - since < _OPEN_S * (turn + 1):
            return False
        # If too few voters answer, the change is tried again after the same wait.
        del self._open[name]
        return True

    def _leads(self, name: str, group: Group, entry: Entry) -> bool:
        """Returns whether this node is the first voter that is healthy and has confirmed the record. So a voter whose
        record cannot be read, or on which groups are not enabled, does not lead.
        """
        states, told = self._peers.states(), self._told.get(name, {})
        healthy = (node for node in group.voters if states.get(node) in ("healthy", "recovering"))
        return next((node for node in healthy if told.get(node) == entry.ballot), "") == self._node

    async def _hear(self, name: str, nodes: Iterable[str], watched: Watched) -> None:
        async def one(node: str) -> None:
            try:
                reply = await self._peers.ask(node, pb.AgreeRequest(group=name, rows=True))
                # Only rows about the node's own workers count.
                rows = [row for row in rows_from(reply.rows) if row.group == name and node_of(row.worker) == node]
                watched.heard(node, rows, self._now())
            except ProbingError:
                watched.heard(node, None, self._now())

        await asyncio.gather(*map(one, nodes))

    async def _take(self, name: str, group: Group, step: Step) -> None:
        """Carries out a step of the policy, if the record still has the generation and phase of ``group``."""
        address, port = await self._place(name, group) if step.kind == "run" else ("", 0)

        def update(present: Group | None) -> Group | None:
            same = present is not None and (present.generation, present.phase) == (group.generation, group.phase)
            if not same or present is None:
                return None
            now_ns = self._wall_ns()
            if step.kind == "run":
                return present.running(now_ns, address=address, port=port)
            if step.kind == "restart":
                return present.restarted(step.cause, step.reason, now_ns, step.without)
            return present.over(step.kind, step.reason, now_ns)

        await self._change(name, update)

    async def _place(self, name: str, group: Group) -> tuple[str, int]:
        """Returns the address at which the ranks meet, and a port that is free there."""
        master = group.ranks()[0].node
        reply = await self._peers.ask(master, pb.AgreeRequest(group=name, port=group.spec.master_port))
        return self.launchers.host(master), reply.port

    async def _tell(self, name: str, entry: Entry) -> None:
        """Sends the record to nodes that have not confirmed it."""
        group, ballot = entry.known, entry.ballot
        assert group is not None
        told = self._told.setdefault(name, {})
        told[self._node] = ballot
        states = self._peers.states()
        # A node that left the group gets the record, unless the node is gone.
        left = {node for node in told.keys() - group.nodes if states.get(node) != "failed"}
        late = [node for node in sorted(group.nodes | left) if told.get(node) != ballot]
        if not late:
            self._told_all[name] = ballot
            return
        late = [node for node in late if states.get(node) != "failed"]
        proposal = pb.Proposal(ballot=packed_ballot(ballot), record=entry.acceptor.committed.value)

        async def one(node: str) -> None:
            try:
                await self._peers.ask(node, pb.AgreeRequest(group=name, id=group.spec.id, learn=proposal))
                told[node] = ballot
                if node not in group.nodes:
                    del told[node]
            except ProbingError as e:
                _log.info("group %s: %s", name, escape(e.message))

        for at in range(0, len(late), _TELL):
            await asyncio.gather(*map(one, late[at : at + _TELL]))

    async def _renew(self, name: str, group: Group, now: float) -> None:
        """Renews the leases of this node's launchers, if a quorum of voters knows no newer generation."""
        spec = group.spec
        if group.phase != "running" or not spec.fenced:
            return
        leased, asked = self._leased.get(name, (-1, 0.0))
        if leased == group.generation and now - asked < spec.fence_s / _RENEWALS:
            return
        launchers = self._workers.serving([rank.worker for rank in group.ranks() if rank.node == self._node])
        if not launchers:
            return
        self._leased[name] = group.generation, now
        # The lease begins at the last report that the launcher sent before the voters were asked.
        numbers = [(launcher, launcher.number) for launcher in launchers]
        request = pb.AgreeRequest(group=name, id=spec.id, lease=group.generation)
        answers = await asyncio.gather(
            *(self._peers.ask(node, request) for node in group.voters), return_exceptions=True
        )
        agreed = [
            node
            for node, answer in zip(group.voters, answers, strict=True)
            if isinstance(answer, pb.AgreeReply) and answer.agrees
        ]
        if Quorum(group.voters).is_met(agreed):
            for launcher, number in numbers:
                order = pb.WorkOrder(leased=name, generation=group.generation, report=number)
                launcher.put("lease", name, order)

    def _hang(self, row: Mapping[str, Any], owner: Hashable) -> None:
        group = self._of_job(str(row.get("job")), owner)
        if group is None or group.phase != "running" or group.spec.on_hang == "report" or self._is_older(row, group):
            return
        # Runs with the same master have the same name, so their findings have the same id. The generation tells them
        # apart.
        finding = str(row.get("finding_id")), group.generation
        if finding in self._findings:
            return
        self._findings[finding] = None
        while len(self._findings) > _MAX_FINDINGS:
            self._findings.popitem(last=False)
        if not group.may_restart("hang", self._wall_ns()):
            _log.warning("group %s: a finding is only reported: %s", group.spec.name, escape(str(row.get("sentence"))))
            return
        self._hangs[group.spec.name] = group.generation, _restart(group, row)

    def _is_older(self, row: Mapping[str, Any], group: Group) -> bool:
        """Returns whether a finding is about an earlier generation, for example about the end of that generation in a
        restart.
        """
        generation, began = self._began.get(group.spec.name, (-1, 0.0))
        names = ("opened",) if row.get("verdict") in _of_hardware() else ("since", "opened")
        times = [at_ns for at_ns in map(row.get, names) if isinstance(at_ns, int)]
        if generation != group.generation or not times:
            return False
        return self._now() - (self._wall_ns() - min(times)) / 1e9 < began

    def _of_job(self, job: str, owner: Hashable) -> Group | None:
        """Returns the group of ``owner`` whose ranks form ``job``. The name of the job is the name of the group, with
        the owner appended in some cases.
        """
        name = job.removesuffix(with_owner("", owner)) if isinstance(owner, int) else job
        entry = self._records.entries.get(name)
        group = entry.known if entry else None
        return group if group is not None and group.spec.uid == owner else None


@cache
def _of_hardware() -> frozenset[str]:
    """Returns the verdicts about hardware. A hardware fault may begin before the generation that it holds up."""
    # The import costs nothing here: the node has made a finding, so the rules are imported already.
    from probing.diagnosis.ladder import RULES

    return frozenset(verdict.id for rule in RULES for verdict in rule.VERDICTS if verdict.group == "hardware")


def _restart(group: Group, row: Mapping[str, Any]) -> Step:
    without: set[str] = set()
    ranks = {rank.rank: rank.node for rank in group.ranks()}
    if group.spec.on_hang == "restart_without_node":
        blamed = {int(word) for word in str(row.get("ranks") or "").split(",") if word.isdecimal()}
        culprits = {node for rank, node in ranks.items() if rank in blamed}
        left = set(ranks.values()) - culprits
        without = culprits if culprits and len(left) >= max(1, group.spec.min_nodes) else set()
    return Step("restart", "hang", escape(str(row.get("sentence")), 250), tuple(sorted(without)))


def _group_row(group: Group, watched: Watched | None) -> Row:
    spec, ranks = group.spec, group.ranks()
    return {
        "group_name": spec.name,
        "owner": spec.owner,
        "phase": group.phase,
        "since": group.since_ns or None,
        "reason": group.reason or None,
        "generation": group.generation,
        "version": spec.version,
        "restarts": group.restarts,
        "workers": len(spec.workers),
        "world_size": len(ranks),
        "master": ranks[0].worker,
        "address": f"{group.address}:{group.port}" if group.port else None,
        "excluded": ",".join(group.excluded) or None,
        "waits_for": (watched.waits_for or None) if watched and group.phase == "ending" else None,
        "restart": spec.restart,
        "on_hang": spec.on_hang,
        "command": " ".join(spec.command),
    }


def _there(group: Group | None, order: Order | None = None) -> Group:
    if group is None or (group.phase == "deleted" and group.order != order):
        raise NotFound("there is no such group", hint="`probingctl group list` shows the groups")
    return group


def _order(data: bytes) -> Order:
    try:
        return typed_json(Order, data[: 64 << 10])
    except ValueError as e:
        raise UsageError(f"the order is malformed: {escape(str(e), 200)}") from None


async def _pause(met: int) -> None:
    """Waits a random time, so that two proposers that collided do not collide again. ``met``: the number of failed
    attempts before this one.
    """
    await asyncio.sleep(random.uniform(0.01, 0.05 * 2 ** min(met, 5)))  # noqa: S311
