"""How long ranks have made no progress, and how long a wait must last to count."""

from __future__ import annotations

from probing.diagnosis.facts import Facts, Rank
from probing.diagnosis.waits import main_thread

__all__ = ("STUCK_PATIENCE", "gate_ns", "last_seen_ns", "now_of", "patience_ns", "quiet_ns")

STUCK_PATIENCE = 2
"""How many times ``gate_ns`` a job must stand still until waits of unknown kind count, too."""
_S = 10**9


def gate_ns(facts: Facts) -> int:
    """Returns the time after which a wait counts as a stall, ns: W, or twice the longest usual gap of the job."""
    return max(round(facts.stall_s * _S), 2 * (facts.usual_gap_ns or 0))


def patience_ns(facts: Facts) -> int:
    """Returns the time after which a rank that makes progress elsewhere counts as holding the job up, ns."""
    return max(6 * round(facts.stall_s * _S), 60 * _S, gate_ns(facts))


def now_of(rank: Rank, facts: Facts) -> int:
    """Returns when the facts were taken, by the clock of the rank's node, ns."""
    return next((node.taken_ns for node in facts.nodes if node.node == rank.node), facts.taken_ns)


def last_seen_ns(rank: Rank) -> int | None:
    """Returns when ``rank`` was last seen to begin or end an operation or a step, by its clock, ns; None if never."""
    seen = [t for p in rank.progress for t in (p.last_call_ns, p.last_done_ns) if t is not None]
    operations = rank.open if seen else (*rank.open, *rank.done)
    seen += [t for o in operations for t in (o.t_call_ns, o.t_done_ns) if t is not None]
    seen += [s.t_start_ns + s.duration_ns for s in rank.steps]
    return max(seen, default=None)


def quiet_ns(rank: Rank, facts: Facts) -> int | None:
    """Returns how long ``rank`` has begun or ended no operation or step, at least, ns; None if not known."""
    now, seen = now_of(rank, facts), last_seen_ns(rank)
    if seen is not None:
        return max(0, now - seen)
    main = main_thread(rank)
    still = [main.since_ns] if main is not None and main.since_ns is not None else []
    if rank.condition is not None and rank.condition.asleep_since_ns is not None:
        still.append(rank.condition.asleep_since_ns)
    if still:
        return max(0, now - min(still))
    watching = [n.watching_since_ns for n in facts.nodes if n.node == rank.node and n.watching_since_ns is not None]
    # The daemon has recorded nothing of it since it started.
    return max(0, now - max(watching[0], rank.started_ns or 0)) if watching else None
