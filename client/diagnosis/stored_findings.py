"""Adds what the watch of a node found to a diagnosis that shows less: of a job that stands still, or that has ended.

One look may show less than the look before: a rank that polls seems to move, a busy machine gives no stack. The watch
looks again and again, and closes a finding once the job goes on or two looks with stacks refute it. A job that hung
until somebody ended it shows nothing but its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from probing.api.errors import ProbingError
from probing.client.diagnosis.exits import how_it_ended, job_ended
from probing.client.diagnosis.finding_rows import COLUMNS, VERDICTS, finding_of
from probing.client.diagnosis.findings import Verdicts, by_run, newest_sql, ns_of, numbers, timed
from probing.client.diagnosis.outcome import QUIET_NS, settled, worst_first, wrong
from probing.client.render.rows import Row, rows_of
from probing.client.render.text import clock, utc
from probing.client.session import sql_text
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.verdict import ERROR, NOTE, Finding

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("with_stored_findings",)

_MOST_JOBS = 64
_LOOK_BACK_NS = 7 * 86_400 * 10**9
_MOST_NAMED = 4


def with_stored_findings(cluster: Cluster, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Returns ``diagnoses``, the worst first; with the findings that are open, where a look shows nothing wrong in a
    job that stands still, and with those that were open when a job ended.

    An answer that does not come is one of ``missing``.
    """
    asked = [one for one in diagnoses if job_ended(one.facts) or (not wrong(one) and _stands_still(one.facts))]
    asked = asked[:_MOST_JOBS]
    if not asked:
        return list(diagnoses)
    jobs = ", ".join(sorted({sql_text(one.facts.job) for one in asked}))
    # Findings of a job that ended long ago are as old as its end.
    begin = min(one.facts.taken_ns for one in asked) - _LOOK_BACK_NS
    where = f"ts > make_timestamp_ns({begin}) AND job IN ({jobs})"
    try:
        rows = by_run(rows_of(cluster.query(newest_sql(where, COLUMNS))))
    except ProbingError as e:
        unread = Missing("history", f"whether a finding is open: {e.message}")
        return [replace(one, missing=(*one.missing, unread)) if one in asked else one for one in diagnoses]
    return worst_first(settled([_with(one, rows) if one in asked else one for one in diagnoses]))


def _with(diagnosis: Diagnosis, rows: Verdicts) -> Diagnosis:
    facts = diagnosis.facts
    holds = _open_at_end if job_ended(facts) else _holds
    own = [row for row in rows.get((facts.job, facts.run), ()) if row["verdict"] in VERDICTS and holds(facts, row)]
    if facts.nodes:
        shown = {finding.verdict.id for finding in diagnosis.findings}
        own = [row for row in own if row["verdict"] not in shown]
    else:
        # Exits alone say less than what was found at the end.
        stored = {row["verdict"] for row in own}
        kept = tuple(finding for finding in diagnosis.findings if finding.verdict.id not in stored)
        diagnosis = replace(diagnosis, findings=kept)
    if not own:
        return diagnosis
    case = Case(facts)
    findings = [_finding(case, row) for row in own]
    errors = [finding for finding in findings if finding.severity == ERROR]
    # What held the job up comes before its end, and its end before what slowed it down.
    others = [finding for finding in findings if finding.severity != ERROR]
    ends = [finding for finding in diagnosis.findings if finding.severity != NOTE]
    notes = [finding for finding in diagnosis.findings if finding.severity == NOTE]
    return replace(diagnosis, findings=(*errors, *ends, *others, *notes))


def _open_at_end(facts: Facts, row: Row) -> bool:
    """Whether a finding was not over when the first rank of the job ended. Of the end itself the facts tell."""
    first = min(rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None)
    opened, closed = ns_of(row["opened"]), ns_of(row["closed"])
    if opened is None or (closed is not None and closed < first):
        return False
    return opened <= first if VERDICTS[row["verdict"]].group != "death" else not facts.nodes


def _stands_still(facts: Facts) -> bool:
    advanced = _advanced_ns(facts)
    living = any(rank.exit is None for rank in facts.ranks)
    return living and (advanced is None or facts.taken_ns - advanced >= QUIET_NS)


def _advanced_ns(facts: Facts) -> int | None:
    return max((node.advanced_ns for node in facts.nodes if node.advanced_ns is not None), default=None)


def _holds(facts: Facts, row: Row) -> bool:
    """Whether the job has not gone on since the finding opened, and the ranks that it names live."""
    opened, advanced = ns_of(row["opened"]), _advanced_ns(facts)
    if row["severity"] != ERROR or row["state"] != "open" or opened is None:
        return False
    named = numbers(row["ranks"])
    ended = any(rank.exit is not None for rank in facts.ranks if rank.rank in named)
    return not ended and (advanced is None or advanced <= opened)


def _finding(case: Case, row: Row) -> Finding:
    facts, stored = case.facts, finding_of(row)
    present = [one.rank for one in stored.culprits if one.rank in case.ranks]
    found_at = f"found at {clock(row['opened'])}"
    if job_ended(facts):
        end = max(rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None)
        group, sentence = stored.verdict.group, timed(row, end)
        lines = [f"{found_at}, and the job did not go on" if group == "hang" else found_at, *how_it_ended(facts)]
        if group != "death":
            sentence = f"until it ended at {clock(utc(end))}: {sentence}"
        return replace(stored, sentence=sentence, evidence=(*lines, *stored.evidence), ends=None)
    lines = [f"{found_at}, and the job has not gone on since"]
    lines += [f"rank {rank} now: {case.activity(rank).why}" for rank in present[:_MOST_NAMED]]
    return replace(
        stored,
        sentence=timed(row, facts.taken_ns),
        evidence=(*lines, *stored.evidence),
        missing=("this look alone does not show it",),
        stacks=case.stacks(present, [rank for rank in stored.victims if rank in case.ranks]),
        ends=stored.ends if stored.ends is not None and stored.ends.at_ns > facts.taken_ns else None,
    )
