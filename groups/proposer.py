"""Changes the value of a register by two requests to its voters: to promise a ballot, and to accept a proposal.
``register`` says why this is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from probing.api.errors import PeerError, ProbingError
from probing.api.text import escape, plural
from probing.groups.register import Accepted, Ballot, Committed, Promise, Proposal, Quorum, Refusal

__all__ = ("Peers", "Proposer")

_UNSURE = "the change may still be made: look at the record before you repeat the change"
_MAX_REASON = 200

_T = TypeVar("_T")


class Peers(Protocol):
    """Calls to the acceptors of one register, on this and other nodes. A call that fails raises a ProbingError."""

    async def prepare(self, node: str, ballot: Ballot) -> Promise | Refusal: ...
    async def accept(self, node: str, proposal: Proposal) -> Accepted | Refusal: ...


@dataclass(frozen=True, slots=True)
class Proposer:
    """Changes the register from ``node``.

    ``quorum_of`` returns the quorum of a value, also of the empty value. ``pause`` waits for a random time, which grows
    with its argument, the number of attempts so far. All voters are asked at once. They have ``deadline_s`` to promise,
    and ``deadline_s`` to accept. An attempt that other proposers disturbed is repeated, up to ``attempts`` in all.
    """

    node: str
    peers: Peers
    quorum_of: Callable[[bytes], Quorum]
    pause: Callable[[int], Awaitable[None]]
    deadline_s: float = 2.0
    attempts: int = 10

    async def change(self, learned: Committed, update: Callable[[bytes], bytes | None]) -> Committed:
        """Returns the committed value after a change. ``learned``: the newest committed value that this node knows.

        ``update`` gets the present value, which is committed, and returns the new value; None leaves the present value.
        ``update`` is called again for each newer value, so it must return None for a value that already has the change.

        Raises PeerError if too few voters answer or all attempts were disturbed. Its hint says whether the change may
        still be made. Errors of ``update`` and ``quorum_of`` end the change.
        """
        ballot, proposed = learned.ballot, False
        try:
            for attempt in range(1, self.attempts + 1):
                ballot = Ballot(ballot.counter + 1, self.node)
                try:
                    newest = await self._newest(ballot, learned)
                    present = newest.proposal
                    if not newest.is_committed:
                        learned = await self._commit(replace(present, ballot=ballot))
                        continue
                    value = update(present.value)
                    if value is None or value == present.value:
                        return Committed(present.ballot, present.value)
                    proposed = True
                    return await self._commit(Proposal(ballot, value, self.quorum_of(present.value).voters))
                except _Refused as refused:
                    ballot = max(ballot, refused.promised)
                    await self.pause(attempt)
            raise PeerError(
                f"{plural(self.attempts, 'attempt')} to change the record conflicted with changes by {ballot.node}"
            )
        except PeerError as e:
            raise PeerError(e.message, hint=_UNSURE if proposed else e.hint) from None

    async def _newest(self, ballot: Ballot, learned: Committed) -> _Newest:
        def newest(promises: Mapping[str, Promise]) -> _Newest:
            committed = max([learned, *(promise.committed for promise in promises.values())], key=_ballot)
            accepted = max([Proposal(), *(promise.accepted for promise in promises.values())], key=_ballot)
            if (latest := max(accepted.ballot, committed.ballot)) >= ballot:
                raise _Refused(latest)
            if accepted.ballot <= committed.ballot:
                return _Newest(Proposal(committed.ballot, committed.value), True, [self.quorum_of(committed.value)])
            quorums = self._quorums(accepted)
            nodes = [node for node, promise in promises.items() if promise.accepted.ballot == accepted.ballot]
            return _Newest(accepted, all(quorum.is_met(nodes) for quorum in quorums), quorums)

        promises = await _answers(
            lambda node: self.peers.prepare(node, ballot), lambda promises: newest(promises).quorums, self.deadline_s
        )
        result = newest(promises)
        if all(promise.accepted.ballot < result.proposal.ballot for promise in promises.values()):
            nodes = ", ".join(sorted(promises))
            raise PeerError(f"the record is lost on {nodes}", hint="was the state directory deleted there?")
        return result

    async def _commit(self, proposal: Proposal) -> Committed:
        proposal.check()
        quorums = self._quorums(proposal)
        await _answers(lambda node: self.peers.accept(node, proposal), lambda _: quorums, self.deadline_s)
        return Committed(proposal.ballot, proposal.value)

    def _quorums(self, proposal: Proposal) -> list[Quorum]:
        return [self.quorum_of(proposal.value), Quorum(proposal.base)]


class _Newest(NamedTuple):
    proposal: Proposal
    is_committed: bool
    quorums: list[Quorum]


class _Refused(Exception):
    def __init__(self, promised: Ballot) -> None:
        super().__init__(promised)
        self.promised = promised


async def _answers(
    call: Callable[[str], Awaitable[_T | Refusal]],
    quorums_for: Callable[[Mapping[str, _T]], list[Quorum]],
    deadline_s: float,
) -> dict[str, _T]:
    # Returns the answers of voters that agree, once these voters meet the quorums that follow from their answers.
    agreed: dict[str, _T] = {}
    refused: list[Ballot] = []
    failures: dict[str, ProbingError] = {}
    calls: dict[str, asyncio.Task[_T | Refusal]] = {}
    in_flight: list[str] = []
    clock = asyncio.get_running_loop().time
    end = clock() + deadline_s
    try:
        while unmet := [quorum for quorum in quorums_for(agreed) if not quorum.is_met(agreed)]:
            for voter in [voter for quorum in unmet for voter in quorum.voters]:
                if voter not in calls:
                    calls[voter] = asyncio.create_task(_checked(call, voter))
                    in_flight.append(voter)
            hopeful = [*agreed, *(in_flight if clock() < end else ())]
            if lost := [quorum for quorum in unmet if not quorum.is_met(hopeful)]:
                raise _Refused(max(refused)) if refused else _silence(lost[0], hopeful, failures)
            tasks = [calls[node] for node in in_flight]
            await asyncio.wait(tasks, timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)
            for node in [node for node in in_flight if calls[node].done()]:
                in_flight.remove(node)
                try:
                    answer = calls[node].result()
                except ProbingError as e:
                    failures[node] = e
                    continue
                if isinstance(answer, Refusal):
                    refused.append(answer.promised)
                else:
                    agreed[node] = answer
    finally:
        for task in calls.values():
            task.cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)
    return agreed


async def _checked(call: Callable[[str], Awaitable[_T | Refusal]], voter: str) -> _T | Refusal:
    answer = await call(voter)
    if isinstance(answer, Refusal):
        answer.promised.check()
    elif isinstance(answer, Promise):
        answer.check()
    return answer


def _silence(quorum: Quorum, hopeful: Collection[str], failures: Mapping[str, ProbingError]) -> PeerError:
    silent = [voter for voter in quorum.voters if voter not in hopeful]
    verb = "does" if len(silent) == 1 else "do"
    text = f"{len(silent)} of {plural(len(quorum.voters), 'node')} {verb} not answer: {', '.join(silent)}"
    reasons = [escape(failures[voter].message, _MAX_REASON) for voter in silent if voter in failures]
    return PeerError(f"{text} ({reasons[0]})" if reasons else text)


def _ballot(of: Proposal | Committed) -> Ballot:
    return of.ballot
