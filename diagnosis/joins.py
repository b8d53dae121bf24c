"""Finds which ranks have joined the operations in which other ranks wait, from their operations and stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from probing.diagnosis.facts import Rank, Thread
from probing.diagnosis.sequences import Sequence
from probing.diagnosis.wait_graph import Pending, WaitGraph
from probing.diagnosis.waits import (
    FILE_LOCK,
    INIT,
    Wait,
    halted,
    is_p2p,
    main_thread,
    open_operations,
    outside,
    wait_in,
)

__all__ = ("Joins", "with_file_locks")

_RECEIVES = ("recv", "recv_any_source")


@dataclass(frozen=True)
class Joins:
    """Decides which ranks have joined which operations. ``waits``: all waits, including short ones. ``now``: when the
    facts were read, on the clock of a rank's node.
    """

    ranks: Mapping[int, Rank]
    waits: Mapping[int, Wait]
    sequences: Mapping[str, Sequence]
    world: Iterable[int]
    now: Callable[[int], int]

    def graph(self, old: Mapping[int, Wait]) -> WaitGraph:
        """Returns the graph of the ``old`` waits. A rank whose wait is short makes progress: it waits for no rank."""
        old = {waiter: self._unmatched(waiter, wait) for waiter, wait in old.items()}
        alike: dict[object, list[int]] = {}
        for waiter, wait in old.items():
            # All ranks that wait in one collective at the same line have the same edges. All ranks that wait for an
            # unknown peer also have the same edges, because any rank may be this peer.
            paired, has_peer = is_p2p(wait.op), wait.peer is not None
            number = self._number(waiter, wait) if has_peer or not paired else None
            place = waiter if paired and has_peer else _place(main_thread(self.ranks[waiter]))
            alike.setdefault((wait.comm, number, wait.op, place), []).append(waiter)
        return WaitGraph(old, [self._pending(waiters, old) for waiters in alike.values()])

    def _unmatched(self, waiter: int, wait: Wait) -> Wait:
        """Returns ``wait``. If its send or receive is matched, returns the wait for an unmatched send or receive of the
        same rank and communicator instead, if there is one: coalesced sends and receives end together."""
        if not is_p2p(wait.op) or wait.peer is None or not all(self._states(waiter, wait).values()):
            return wait
        own = [one for one in open_operations(self.ranks[waiter]) if one.comm == wait.comm and is_p2p(one.op)]
        others = (replace(wait_in(one), firm=wait.firm) for one in own if one.peer is not None)
        return next((other for other in others if False in self._states(waiter, other).values()), wait)

    def in_flight(self) -> list[Pending]:
        """Returns all operations in flight with their waiters; for collectives also the ranks that have not joined.

        ``seq`` is the number on one of the waiters if the ranks' numbers cannot be compared.
        """
        calls: dict[tuple[str | None, int | None, str | None], dict[int, Wait]] = {}
        for rank in self.ranks.values():
            for wait in map(wait_in, open_operations(rank)):
                number = self._number(rank.rank, wait)
                key = wait.comm, wait.seq if number is None else number, wait.op
                calls.setdefault(key, {}).setdefault(rank.rank, wait)
        found = []
        for (comm, seq, op), waits in calls.items():
            if is_p2p(op):
                ages = [age for rank, wait in waits.items() if (age := self._age(rank, wait)) is not None]
                found.append(Pending(comm, seq, op, tuple(sorted(waits)), age_ns=max(ages, default=None)))
            else:
                found.append(replace(self._pending(list(waits), waits), seq=seq))
        return found

    def _pending(self, waiters: list[int], old: Mapping[int, Wait]) -> Pending:
        # Ranks are compared with the first waiter. A rank without a recorded call has certainly not joined if it is
        # halted, if its stack shows another place, or if all its operations since the first call were recorded.
        waiter = max(waiters, key=lambda rank: (self._age(rank, old[rank]) or 0, -rank))
        wait = old[waiter]
        sequence = self._sequence(wait)
        states = self._states(waiter, wait)
        if wait.comm is None and not self._single and wait.op != INIT and not is_p2p(wait.op):
            states = self._in_some_group(states)
        own = waiters if len(waiters) == 1 else ()
        return Pending(
            wait.comm,
            self._number(waiter, wait),
            wait.op,
            tuple(sorted(waiters)),
            frozenset(o for o, s in states.items() if s is False).difference(waiters),
            frozenset(o for o, s in states.items() if s is None).difference(own),
            0 if sequence is None or is_p2p(wait.op) else sequence.unidentified,
            self._age(waiter, wait),
        )

    def _states(self, waiter: int, wait: Wait) -> dict[int, bool | None]:
        """Returns whether each member has joined the operation of ``wait``; None if unknown."""
        return {other: self.joined(other, waiter, wait) for other in self._members(wait)}

    def _number(self, waiter: int, wait: Wait) -> int | None:
        sequence = self._sequence(wait)
        return sequence.number(waiter, wait.seq) if sequence else wait.seq

    def _age(self, waiter: int, wait: Wait) -> int | None:
        return self.now(waiter) - wait.since_ns if wait.since_ns is not None else None

    def joined(self, other: int, waiter: int, wait: Wait) -> bool | None:
        """Returns whether ``other`` has called the operation in which ``waiter`` waits; None if unknown."""
        rank = self.ranks.get(other)
        if rank is None:
            return None
        own = self.waits.get(other)
        if wait.op == INIT:
            return _in_init(rank, own)
        called = self._has_called(rank, waiter, wait)
        if called:
            # A process that is stopped in an operation does not take part in it.
            is_stopped = halted(rank) and any(o.comm == wait.comm for o in rank.open)
            return not (is_stopped or self._unlaunched(rank, waiter, wait))
        if halted(rank):
            return False
        shown = self._shown(own, waiter, wait) if own is not None and own.seq is None else False
        if shown is not False:
            return shown
        if is_p2p(wait.op) and wait.peer is None:
            # Any rank may be the sender.
            return None
        elsewhere = _elsewhere(rank, own, self.ranks.get(waiter))
        return False if elsewhere or self._complete(rank, waiter, wait) else None

    def _unlaunched(self, rank: Rank, waiter: int, wait: Wait) -> bool:
        """Returns whether ``rank`` called the operation of ``wait`` between ncclGroupStart and ncclGroupEnd, has not
        called ncclGroupEnd yet, and waits in no communication call according to its stack. NCCL launches grouped
        operations only at ncclGroupEnd."""
        own = [o for o in rank.open if o.launched is False and o.comm == wait.comm and is_p2p(o.op) == is_p2p(wait.op)]
        main = main_thread(rank) if own and rank.rank not in self.waits else None
        if main is None or not outside(rank, main):
            return False
        sequence = self._sequence(wait)
        if is_p2p(wait.op) or sequence is None or wait.seq is None:
            return True
        number = sequence.number(waiter, wait.seq)
        return any(sequence.number(rank.rank, o.seq) == number for o in own)

    @cached_property
    def _single(self) -> bool:
        # If the job has only one group, an operation of an unknown group belongs to it. A daemon that started late may
        # not have recorded the other groups.
        return len(self.sequences) == 1 and not any(rank.seen_from_ns is not None for rank in self.ranks.values())

    def _sequence(self, wait: Wait) -> Sequence | None:
        return self.sequences.get(wait.comm) if wait.comm is not None else None

    def _members(self, wait: Wait) -> tuple[int, ...]:
        sequence = self._sequence(wait)
        members = sequence.members if sequence else tuple(dict.fromkeys((*self.ranks, *self.world)))
        if is_p2p(wait.op) and wait.peer is not None:
            peer = sequence.job_rank(wait.peer) if sequence else wait.peer
            members = (peer,) if peer is not None else members
        return members

    def _in_some_group(self, states: Mapping[int, bool | None]) -> dict[int, bool | None]:
        # The group of the operation is unknown. A rank that waits in a collective may wait in this one. A rank that
        # waits in no collective is perhaps not a member; it counts as a member only if it is the only such rank.
        apart = [other for other, state in states.items() if state is not True and other not in self.waits]
        return {other: False if apart == [other] and state is False else None for other, state in states.items()}

    def _has_called(self, rank: Rank, waiter: int, wait: Wait) -> bool:
        # Returns whether ``rank`` has the operation of ``wait`` in flight, or the send or receive that matches it.
        sequence = self._sequence(wait)
        if is_p2p(wait.op):
            wanted = _RECEIVES if wait.op == "send" else ("send",)
            peers = [o.peer for o in rank.open if o.comm == wait.comm and o.op in wanted]
            return any((sequence.job_rank(p) if sequence else p) in (None, waiter) for p in peers)
        number = sequence.number(waiter, wait.seq) if sequence else None
        if number is not None and sequence is not None:
            return sequence.called.get(rank.rank, -1) >= number
        return any(o.comm == wait.comm and not is_p2p(o.op) for o in rank.open)

    def _shown(self, own: Wait, waiter: int, wait: Wait) -> bool | None:
        # Returns whether ``own``, which only a stack shows, is the same operation as ``wait``, or its counterpart.
        if own.op == INIT or own.comm not in (None, wait.comm) or is_p2p(own.op) != is_p2p(wait.op):
            return False
        if not is_p2p(wait.op):
            return True if own.comm == wait.comm or self._single else None
        if (own.op == "send") == (wait.op == "send"):
            return False
        return True if own.peer == waiter else None

    def _complete(self, rank: Rank, waiter: int, wait: Wait) -> bool:
        # Returns whether all operations of ``rank`` since the call of ``waiter`` were recorded. Ages are compared,
        # because clocks differ.
        sequence = self._sequence(wait)
        if rank.lost or (sequence is not None and rank.rank in sequence.gaps):
            return False
        if rank.seen_from_ns is None:
            return True
        seen = self.now(rank.rank) - rank.seen_from_ns
        return wait.since_ns is not None and seen >= self.now(waiter) - wait.since_ns


def _in_init(rank: Rank, own: Wait | None) -> bool | None:
    # Returns whether ``rank`` also waits in a store or creates a communicator; None if unknown.
    if own is not None and own.op == INIT:
        return True
    return None if not rank.threads and not rank.progress else False


def _elsewhere(rank: Rank, own: Wait | None, waiter: Rank | None) -> bool:
    # Returns whether the stack of ``rank`` shows that it is in another operation, or in none.
    if own is not None:
        return own.firm and own.comm is not None
    main = main_thread(rank)
    if main is None or outside(rank, main):
        return main is not None
    # Without native frames, a wait for an asynchronous operation looks like the line that calls it.
    place = _place(main)
    return place is not None and "torch/" not in place[1] and place != _place(main_thread(waiter) if waiter else None)


def _place(thread: Thread | None) -> tuple[str, str, int | None] | None:
    # The innermost Python frame, without its variables, which differ between ranks.
    frames = thread.frames if thread is not None else ()
    return next(((f.func, f.file, f.line) for f in frames if not f.native), None)


def with_file_locks(graph: WaitGraph, ranks: Iterable[Rank]) -> WaitGraph:
    """Returns ``graph`` with waits for file locks added, for ranks that wait in no operation. Such a wait is a wait for
    the rank that holds the lock.
    """
    living = [rank for rank in ranks if rank.exit is None]
    pids = {(rank.node, rank.pid): rank.rank for rank in living}
    waiters: dict[int, list[int]] = {}
    waits: dict[int, Wait] = {}
    for rank in living:
        condition = rank.condition
        if condition is None or condition.lock_holder is None or rank.rank in graph.waits or halted(rank):
            continue
        holder = pids.get((rank.node, condition.lock_holder))
        if holder is not None and holder != rank.rank:
            waiters.setdefault(holder, []).append(rank.rank)
            waits[rank.rank] = Wait(None, None, FILE_LOCK, condition.asleep_since_ns)
    if not waits:
        return graph
    locks = [Pending(None, None, FILE_LOCK, tuple(own), frozenset((holder,))) for holder, own in waiters.items()]
    return WaitGraph({**graph.waits, **waits}, [*graph.operations, *locks])
