"""A register: one value on several nodes, changed by consensus without a master (CASPaxos: Rystsov, arXiv 1802.07000).

An acceptor is the state of the register on one node. A proposer asks voters to promise a ballot, learns the newest
proposal from their promises, and asks voters to accept a new proposal. A value names its voters. A proposal has a base,
too: the voters of the committed value that it replaces. A proposal is committed when a quorum of its voters and a
quorum of its base have accepted it. From then on each value that is committed is made from it, because:

1. A new value is made only from a value that is known to be committed; the voters of that value become the base. Any
   other newest proposal is proposed again first, with the same value and base. So each proposal has the voters of the
   last value that was committed before it, as its own voters or as its base.
2. Let N be the newest proposal that the promises show. A proposer continues once a quorum of N's voters and a quorum of
   N's base have promised; if N is known to be committed, a quorum of N's voters is enough. N must be older than the new
   ballot. Then no proposal between N and the new ballot is committed. Assume the contrary, and let C be the first such
   proposal. The last value committed before C is N or was committed before N. By 1, C and N share the voters of this
   value. A quorum of them accepted C, and a quorum of them promised the new ballot, so one node did both. It accepted C
   first, because it refuses C after the promise. So its promise shows C, which is newer than N: a contradiction.
3. Therefore it does not matter how old the value is that gives a proposer its first voters.
4. A ballot has at most one proposal, even if a node forgets which ballots it has used. By 2, two attempts with the same
   ballot need promises of two quorums of the same voters, and an acceptor promises a ballot only once.
5. A value that is known to be committed is read without a second request. If a newer value had been committed before, a
   quorum of the same voters would have promised a higher ballot to the attempt that made it, and would refuse this
   ballot.

The caller must do the rest. It writes a state to disk before it sends the answer. It counts an answer only for the call
that is answered. It never deletes a state or replaces it by an older one, even on a node that is no longer a voter: a
node that lost its state must not vote under the same name. All proposers have the same voters for the empty value.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from probing.api.errors import FormatError, UsageError
from probing.api.typed import typed

__all__ = (
    "MAX_COUNTER",
    "MAX_VALUE",
    "MAX_VOTERS",
    "ZERO",
    "Accepted",
    "Acceptor",
    "Ballot",
    "Committed",
    "Promise",
    "Proposal",
    "Quorum",
    "Refusal",
)

MAX_COUNTER = 1 << 48
MAX_VALUE = 1 << 20
MAX_VOTERS = 7
_NAME = re.compile(r"[\w.:@-]{1,255}")


class Ballot(NamedTuple):
    """The number of an attempt to change the register, with the node of its proposer. A higher ballot is newer."""

    counter: int
    node: str

    def check(self) -> None:
        """Raises UsageError if the ballot is out of bounds."""
        if not 0 < self.counter <= MAX_COUNTER or not _NAME.fullmatch(self.node):
            raise UsageError("the ballot of a record is out of bounds")


ZERO = Ballot(0, "")


@dataclass(frozen=True, slots=True)
class Quorum:
    """More than half of the votes of ``voters``. Each voter has one vote; if the number of voters is even, the first
    voter has two.

    Raises UsageError unless ``voters`` are 1 to 7 different names.
    """

    voters: tuple[str, ...]

    def __post_init__(self) -> None:
        number = len(self.voters)
        if not 0 < number <= MAX_VOTERS or len(set(self.voters)) < number:
            raise UsageError(f"a record has {number} voters", hint=f"it takes 1 to {MAX_VOTERS} different nodes")
        if not all(map(_NAME.fullmatch, self.voters)):
            raise UsageError("a voter of a record has no valid name")

    def is_met(self, nodes: Collection[str]) -> bool:
        """Returns whether the voters among ``nodes`` have more than half of the votes."""
        even = len(self.voters) % 2 == 0
        votes = sum(voter in nodes for voter in self.voters) + (even and self.voters[0] in nodes)
        return 2 * votes > len(self.voters) + even


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed value. It replaces a committed value with a lower ballot. Empty: no value was committed."""

    ballot: Ballot = ZERO
    value: bytes = b""

    def check(self) -> None:
        """Raises UsageError if the value is empty or out of bounds."""
        self.ballot.check()
        if not 0 < len(self.value) <= MAX_VALUE:
            raise UsageError(f"a record has {len(self.value):,} bytes", hint=f"it takes 1 to {MAX_VALUE:,} bytes")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A value to accept. ``base``: the voters of the committed value that it replaces. Empty: no value was accepted."""

    ballot: Ballot = ZERO
    value: bytes = b""
    base: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError if the proposal is empty or out of bounds."""
        Committed(self.ballot, self.value).check()
        Quorum(self.base)


class Promise(NamedTuple):
    """The answer of an acceptor that refuses lower ballots from now on: what it had accepted and learned before."""

    accepted: Proposal
    committed: Committed

    def check(self) -> None:
        """Raises UsageError if a part that is not empty is out of bounds."""
        if self.accepted != Proposal():
            self.accepted.check()
        if self.committed != Committed():
            self.committed.check()


class Accepted(NamedTuple):
    """The answer of an acceptor that accepted the proposal with ``ballot``."""

    ballot: Ballot


class Refusal(NamedTuple):
    """The answer of an acceptor that has promised the ballot ``promised`` to another attempt."""

    promised: Ballot


@dataclass(frozen=True, slots=True)
class Acceptor:
    """The state of the register on one node. ``committed``: the newest committed value that the node has learned.

    Each method returns the state after a request, and the answer: write the state to disk before you send the answer.
    If the state is the same object as before, it need not be written. A request that is out of bounds raises
    UsageError.
    """

    promised: Ballot = ZERO
    accepted: Proposal = Proposal()
    committed: Committed = Committed()

    def prepare(self, ballot: Ballot) -> tuple[Acceptor, Promise | Refusal]:
        """Returns the state after a request to promise ``ballot``, and the answer."""
        ballot.check()
        if ballot <= self.promised:
            return self, Refusal(self.promised)
        return replace(self, promised=ballot), Promise(self.accepted, self.committed)

    def accept(self, proposal: Proposal) -> tuple[Acceptor, Accepted | Refusal]:
        """Returns the state after a request to accept ``proposal``, and the answer."""
        proposal.check()
        if proposal.ballot < self.promised:
            return self, Refusal(self.promised)
        return replace(self, promised=proposal.ballot, accepted=proposal), Accepted(proposal.ballot)

    def learn(self, committed: Committed) -> Acceptor:
        """Returns the state after the node has learned of a committed value."""
        committed.check()
        return replace(self, committed=committed) if committed.ballot > self.committed.ballot else self

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as values for JSON."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_dict(cls, document: object) -> Acceptor:
        """Returns the state from values of ``to_dict``. Raises FormatError."""
        try:
            state = typed(cls, document)
            if state.promised != ZERO:
                state.promised.check()
            Promise(state.accepted, state.committed).check()
            if state.accepted.ballot > state.promised:
                raise ValueError("the accepted ballot is above the promised ballot")
        except (UsageError, ValueError) as e:
            raise FormatError(f"the state of a record is malformed: {e}") from None
        return state
