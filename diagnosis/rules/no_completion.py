"""All ranks have joined an operation, but it does not complete: the network or a GPU kernel hangs."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import doubts, longest_wait, lowered, operation_text
from probing.diagnosis.verdict import ERROR, Finding, Verdict
from probing.diagnosis.waits import INIT, is_p2p, open_operations
from probing.diagnosis.words import clean, ranks_wait

__all__ = ("VERDICTS", "find")

NO_COMPLETION = Verdict(
    "no_completion",
    "hang",
    "All ranks have joined an operation that does not complete",
    "All members of a communicator have called the same operation with the same arguments, and it completes on no rank,"
    " or only on some ranks.",
    "The ranks that wait, the ranks on which it has completed, the states of the operation, and errors of the library.",
    "0.8; less if operations were lost or only stacks show the operation.",
    "A rank that has not joined, or whose arguments differ.",
    (
        "Check the network between the nodes: links, counters of errors and retransmits.",
        "On GPUs look at the kernel's log for XIDs, and at NVLink.",
        "Take the native stacks of two ranks: `probingctl stacks --job J --native`.",
    ),
    ("none_completes", "communicator_error"),
)
VERDICTS = (NO_COMPLETION,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each operation that all members have joined and in which some members wait."""
    explained = _with_partners(case)
    differing = {(one.comm, one.number) for one in case.disagreements}
    places: dict[tuple[str | None, int | None, bool], list[int]] = {}
    for rank, wait in sorted(case.graph.waits.items()):
        pending = case.graph.pending[rank]
        if pending.doubtful or pending.awaited or wait.op == INIT or rank in explained:
            continue
        sequence = case.sequences.get(wait.comm) if wait.comm is not None else None
        number = sequence.number(rank, wait.seq) if sequence else None
        if (wait.comm or "", number) not in differing:
            places.setdefault((wait.comm, number, wait.peer is None), []).append(rank)
    for (comm, number, _), ranks in places.items():
        yield _finding(case, comm, number, ranks)


def _with_partners(case: Case) -> frozenset[int]:
    """Returns the explained ranks, and the ranks with sends or receives in flight to or from them, directly or through
    other ranks. These ranks are explained, too, because coalesced sends and receives end together."""
    reached = set(case.explained)
    partners: dict[int, list[int]] = {}
    for rank in case.graph.waits if reached else ():
        for one in open_operations(case.ranks[rank]):
            sequence = case.sequences.get(one.comm)
            peer = sequence.job_rank(one.peer) if sequence is not None else one.peer
            if is_p2p(one.op) and peer is not None:
                partners.setdefault(peer, []).append(rank)
    todo = list(reached)
    while todo:
        new = {rank for rank in partners.pop(todo.pop(), ()) if rank not in reached}
        reached |= new
        todo += new
    return frozenset(reached)


def _finding(case: Case, comm: str | None, number: int | None, ranks: list[int]) -> Finding:
    wait = longest_wait(case, ranks)
    call = operation_text(case, comm, case.graph.waits[ranks[0]].op, number)
    missing = doubts(case, (), ranks)
    sure = 0.8 if all(case.graph.waits[rank].firm for rank in ranks) else 0.6
    return Finding(
        NO_COMPLETION,
        ERROR,
        lowered(sure, missing),
        f"{ranks_wait(ranks)} in {call} for {time_text(wait.age_ns)}, which all ranks have joined: the network or"
        " a kernel holds it up, no rank does",
        (),
        tuple(sorted({*ranks, *case.graph.victims(ranks)})),
        wait.since_ns,
        f"{comm} {number}",
        tuple(_evidence(case, comm, number, ranks)),
        tuple(missing),
        (NO_COMPLETION.refuted_by,),
        NO_COMPLETION.next_steps,
        case.stacks((), ranks),
    )


def _evidence(case: Case, comm: str | None, number: int | None, ranks: list[int]) -> Iterator[str]:
    sequence = case.sequences.get(comm) if comm is not None else None
    if sequence is not None and number is not None:
        calls = sequence.at(number)
        done = [rank for rank, one in calls.items() if one.t_done_ns is not None]
        yield f"it has ended on {ranks_of(done)}" if done else f"all of {ranks_of(sequence.members)} have called it"
        states: dict[str, list[int]] = {}
        for rank, one in calls.items():
            if one.t_done_ns is None and one.state:
                states.setdefault(one.state, []).append(rank)
        if len(states) > 1:
            yield "; ".join(f"{clean(state)} on {ranks_of(own)}" for state, own in sorted(states.items()))
    known = case.communicators.get(comm) if comm is not None else None
    if known is not None and known.async_error:
        yield f"the library holds an error of this communicator: {clean(known.async_error)}"
    if known is not None and known.aborted:
        yield "the communicator was aborted"
    nodes = {case.ranks[rank].node for rank in ranks}
    yield f"the ranks lie on {len(nodes)} node{'s' if len(nodes) > 1 else ''}: {clean(', '.join(sorted(nodes)))}"
