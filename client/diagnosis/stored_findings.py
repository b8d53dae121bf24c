"""Adds what the watch of a node found to a diagnosis that shows less: of a job that stands still, or that has ended.

One look may show less than the look before: a rank that polls seems to move, a busy machine gives no stack. The watch
looks again and again, and closes a finding once the job goes on or two looks with stacks refute it. A job that hung
until somebody ended it shows nothing but its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from probing.api.errors import ProbingError
from probing.client.diagnosis.findings import SHOWN, Verdicts, by_run, newest_sql, numbers, parsed
from probing.client.diagnosis.outcome import settled, worst_first, wrong
from probing.client.render.rows import Row, rows_of
from probing.client.render.text import clock, utc
from probing.client.session import sql_text
from probing.diagnosis.advice import ACTIONS
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.ladder import RULES, Diagnosis
from probing.diagnosis.report import QUIET_NS, unread
from probing.diagnosis.verdict import ERROR, NOTE, Advice, Culprit, Ending, Finding
from probing.diagnosis.words import exit_text, ranks_of, time_text

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("with_stored_findings",)

_VERDICTS = {verdict.id: verdict for rule in RULES for verdict in rule.VERDICTS}
_MOST_JOBS = 64
_MOST_NAMED = 4
_COLUMNS = (
    *("about", "since", "closed", "culprits", "evidence", "next_steps", "advice", "advice_nodes", "advice_reason"),
    *("ends", "ends_by"),
)


def with_stored_findings(cluster: Cluster, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Returns ``diagnoses``, the worst first; with the findings that are open, where a look shows nothing wrong in a
    job that stands still, with those that were open when a job ended, and as notes with those of a job of which
    something could not be read.

    An answer that does not come is one of ``missing``.
    """
    asked = [one for one in diagnoses if _ended(one.facts) or _undecided(one) or (not wrong(one) and _still(one.facts))]
    asked = asked[:_MOST_JOBS]
    if not asked:
        return list(diagnoses)
    jobs = ", ".join(sorted({sql_text(one.facts.job) for one in asked}))
    where = f"ts > now() - INTERVAL 7 DAY AND job IN ({jobs})"
    try:
        rows = by_run(rows_of(cluster.query(newest_sql(where, (*SHOWN, *_COLUMNS)))))
    except ProbingError as e:
        unread = Missing("history", f"whether a finding is open: {e.message}")
        return [replace(one, missing=(*one.missing, unread)) if one in asked else one for one in diagnoses]
    return worst_first(settled([_with(one, rows) if one in asked else one for one in diagnoses]))


def _with(diagnosis: Diagnosis, rows: Verdicts) -> Diagnosis:
    facts = diagnosis.facts
    holds = _open_at_end if _ended(facts) else _holds
    case = Case(facts)
    findings = []
    for row in _rows_of(facts, rows):
        if holds(facts, row):
            findings.append(_finding(case, row))
        elif _undecided(diagnosis) and not _ended(facts) and row["state"] == "open":
            noted = _finding(case, row)
            sentence = f"open since {clock(row['opened'])}, and not read again by this look: {noted.sentence}"
            findings.append(replace(noted, severity=NOTE, sentence=sentence))
    return replace(diagnosis, findings=(*findings, *diagnosis.findings)) if findings else diagnosis


def _rows_of(facts: Facts, rows: Verdicts) -> list[Row]:
    """Returns the rows of known verdicts about the run; of all runs of the job where no rank could be read."""
    keys = [(facts.job, facts.run)] if facts.ranks else [key for key in rows if key[0] == facts.job]
    return [row for key in keys for row in rows.get(key, ()) if row["verdict"] in _VERDICTS]


def _undecided(diagnosis: Diagnosis) -> bool:
    """Whether nothing wrong was seen, and something that may hide it could not be read."""
    worst = any(finding.severity != NOTE for finding in diagnosis.findings)
    return not worst and bool(unread(diagnosis.facts, diagnosis.missing))


def _ended(facts: Facts) -> bool:
    return bool(facts.ranks) and all(rank.exit is not None for rank in facts.ranks)


def _open_at_end(facts: Facts, row: Row) -> bool:
    """Whether a hang was not over when the first rank of the job ended."""
    first = min(rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None)
    opened, closed = _ns(row["opened"]), _ns(row["closed"])
    hang = row["severity"] == ERROR and _VERDICTS[row["verdict"]].group == "hang"
    return hang and opened is not None and opened <= first and (closed is None or closed >= first)


def _still(facts: Facts) -> bool:
    advanced = _advanced_ns(facts)
    living = any(rank.exit is None for rank in facts.ranks)
    return living and (advanced is None or facts.taken_ns - advanced >= QUIET_NS)


def _advanced_ns(facts: Facts) -> int | None:
    return max((node.advanced_ns for node in facts.nodes if node.advanced_ns is not None), default=None)


def _holds(facts: Facts, row: Row) -> bool:
    """Whether the job has not gone on since the finding opened, and the ranks that it names live."""
    opened, advanced = _ns(row["opened"]), _advanced_ns(facts)
    if row["severity"] != ERROR or row["state"] != "open" or opened is None:
        return False
    named = numbers(row["ranks"])
    ended = any(rank.exit is not None for rank in facts.ranks if rank.rank in named)
    return not ended and (advanced is None or advanced <= opened)


def _finding(case: Case, row: Row) -> Finding:
    verdict, facts = _VERDICTS[row["verdict"]], case.facts
    culprits = tuple(_culprits(row["culprits"]))
    present = [rank for one in culprits if (rank := one.rank) in case.ranks]
    victims = tuple(numbers(row["victims"]))
    doubts: tuple[str, ...] = ()
    if _ended(facts):
        end = max(rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None)
        sentence = f"until it ended at {clock(utc(end))}: {_timed(row, end)}"
        lines = [f"found at {clock(row['opened'])}, and the job did not go on", *_ends(facts)]
    else:
        sentence, doubts = _timed(row, facts.taken_ns), ("this look alone does not show it",)
        lines = [f"found at {clock(row['opened'])}, and the job has not gone on since"]
        lines += [f"rank {rank} now: {case.activity(rank).why}" for rank in present[:_MOST_NAMED]]
    return Finding(
        verdict,
        ERROR,
        float(row["confidence"] or 0.0),
        sentence,
        culprits,
        victims,
        _ns(row["since"]),
        str(row["about"] or ""),
        (*lines, *_texts(row["evidence"])),
        doubts,
        (verdict.refuted_by,),
        tuple(_texts(row["next_steps"])) or verdict.next_steps,
        case.stacks(present, [rank for rank in victims if rank in case.ranks]),
        _advice(row),
        _ending(row, facts.taken_ns),
    )


def _ends(facts: Facts) -> Iterator[str]:
    """Yields how the ranks and the launcher ended."""
    alike: dict[str, list[int]] = {}
    for rank in facts.ranks:
        if rank.exit is not None:
            alike.setdefault(exit_text(rank.exit, rank.condition), []).append(rank.rank)
    for text, ranks in list(alike.items())[:_MOST_NAMED]:
        yield f"{ranks_of(ranks)} {text if len(ranks) == 1 else text.replace('was ', 'were ', 1)}"
    for process in facts.processes:
        if process.role == "launcher" and process.exit is not None:
            yield f"the launcher (pid {process.pid}) {exit_text(process.exit)}"


def _advice(row: Row) -> Advice | None:
    if row["advice"] not in ACTIONS:
        return None
    nodes = tuple(str(row["advice_nodes"] or "").split(",")) if row["advice_nodes"] else ()
    return Advice(str(row["advice"]), str(row["advice_reason"] or ""), nodes)


def _ending(row: Row, now_ns: int) -> Ending | None:
    at = _ns(row["ends"])
    return Ending(at, str(row["ends_by"] or "")) if at is not None and at > now_ns else None


def _timed(row: Row, now_ns: int) -> str:
    """Returns the sentence with the time that has passed by now, not when the row was written."""
    since, written, sentence = _ns(row["since"]), _ns(row["ts"]), str(row["sentence"])
    if since is None or written is None:
        return sentence
    return sentence.replace(f" for {time_text(written - since)}", f" for {time_text(now_ns - since)}", 1)


def _culprits(text: Any) -> list[Culprit]:
    found = []
    for one in _items(text):
        try:
            found.append(
                Culprit(int(one["rank"]), str(one["node"]), int(one["pid"]), str(one["why"]), str(one["activity"]))
            )
        except (KeyError, TypeError, ValueError):
            continue  # another version wrote it
    return found


def _texts(text: Any) -> list[str]:
    return [one for one in _items(text) if isinstance(one, str)]


def _items(text: Any) -> list[Any]:
    found = parsed(text)
    return found if isinstance(found, list) else []


def _ns(text: Any) -> int | None:
    """Returns a time of an answer, as "2026-11-28T01:14:04.562500000Z", in UTC ns."""
    if not isinstance(text, str):
        return None
    moment = datetime.fromisoformat(text[:19]).replace(tzinfo=timezone.utc)
    return int(moment.timestamp()) * 10**9 + int((text[20:].rstrip("Z") or "0").ljust(9, "0")[:9])
