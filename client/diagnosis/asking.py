"""Makes the diagnoses of `diagnose`, from facts and stored findings of nodes, facts in a file, or dumps in a directory.

Facts of one moment may show less than earlier facts: a rank that polls seems to move, stacks cannot be read on a busy
machine, and a job that hung until somebody ended it shows only its end. A daemon gathers facts repeatedly, and closes a
finding only when the job goes on or facts with stacks refute it twice. So its stored findings are added to a diagnosis
that shows less.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from probing.api.errors import FormatError, NotFound, ProbingError, QueryTimeout
from probing.api.text import size, sql_text, utc
from probing.client.absence import partial
from probing.client.diagnosis.endings import facts_of_exits
from probing.client.diagnosis.finding_rows import COLUMNS, VERDICTS, finding_of
from probing.client.diagnosis.findings import Verdicts, by_run, newest_sql, ns_of, numbers, timed
from probing.client.diagnosis.page import worst_first, wrong
from probing.client.jobs import silent_nodes
from probing.client.render.rows import Row, rows_of
from probing.client.zone import clock
from probing.diagnosis.case import Case
from probing.diagnosis.deaths import how_it_ended, job_ended
from probing.diagnosis.facts import MAX_RANKS, Facts, Missing
from probing.diagnosis.facts_file import from_json, load
from probing.diagnosis.flight_recorder.dump import MAX_FILE, Group, RankDump, read_dump
from probing.diagnosis.flight_recorder.hang import diagnose_dumps
from probing.diagnosis.ladder import Diagnosis, diagnose_runs
from probing.diagnosis.merge import merge_runs
from probing.diagnosis.report import QUIET_NS, unread
from probing.diagnosis.verdict import CANNOT_TELL, ERROR, NOTE, Finding

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("diagnosed", "from_dumps", "from_file", "gathered", "with_stored_findings")


def gathered(cluster: Cluster, job: str | None) -> list[Facts]:
    """Returns the facts of each run of ``job`` (None: of all jobs); ``missing`` has the nodes that did not answer.

    If a job ended too long ago to have facts, its facts are the exits of its processes. If the facts of ``job`` could
    not be read in time, the result has no ranks. Raises NotFound for an unknown job, PartialAnswer if only a node that
    did not answer may have facts.
    """
    asked = len(cluster.outcomes)
    parts: list[Facts] = []
    absent: NotFound | None = None
    replies: list[tuple[str, list[bytes]]] = []
    try:
        replies = cluster.facts(job or "")
    except NotFound as e:
        absent = e
    except QueryTimeout as e:
        if job is None:
            raise
        unread = Missing("history", e.message)
        return [Facts(job, "", None, 0.0, time.time_ns(), (), (), missing=(unread,))]
    silent = silent_nodes(cluster, asked)
    for node, pieces in replies:
        try:
            parts += [from_json(piece) for piece in pieces]
        except FormatError as e:
            silent[node] = e.message
    if not parts and silent:
        what = "no training job was found" if job is None else f"job {job} was not found"
        raise partial(what, silent)
    if absent is not None:
        parts = facts_of_exits(cluster, job) if job else []
        if not parts:
            raise absent
    return merge_runs(parts, silent)


def from_file(path: Path) -> list[Diagnosis]:
    """Returns the diagnoses of the facts in a file, ordered from the worst. Raises FormatError as ``facts_file.load``
    does.
    """
    return diagnosed(load(path))


def diagnosed(facts: Sequence[Facts]) -> list[Diagnosis]:
    """Returns a diagnosis for each of ``facts``, ordered from the worst."""
    return worst_first(diagnose_runs(facts))


_MOST_JOBS = 64
_LOOK_BACK_NS = 7 * 86_400 * 10**9
_MOST_NAMED = 4


def with_stored_findings(cluster: Cluster, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Returns ``diagnoses``, ordered from the worst, with findings that the daemon stored.

    A job that stands still gets its open findings if its diagnosis shows nothing wrong, or cannot name the rank at
    fault, for example because only one of its nodes was asked. A job that has ended gets the findings that were open at
    its end. If some facts of a job could not be read, the job gets its open findings as notes.

    If the findings cannot be queried, ``missing`` says so.
    """
    asked = [d for d in diagnoses if job_ended(d.facts) or _undecided(d) or (_names_nobody(d) and _still(d.facts))]
    asked = asked[:_MOST_JOBS]
    if not asked:
        return list(diagnoses)
    jobs = ", ".join(sorted({sql_text(one.facts.job) for one in asked}))
    # The findings of a job that ended long ago are as old as its end, so the search goes back to that time.
    begin = min(one.facts.taken_ns for one in asked) - _LOOK_BACK_NS
    where = f"ts > make_timestamp_ns({begin}) AND job IN ({jobs})"
    try:
        rows = by_run(rows_of(cluster.query(newest_sql(where, COLUMNS))))
    except ProbingError as e:
        gap = Missing("history", f"whether a finding is open: {e.message}")
        return [replace(one, missing=(*one.missing, gap)) if one in asked else one for one in diagnoses]
    return worst_first([_with(one, rows) if one in asked else one for one in diagnoses])


def _with(diagnosis: Diagnosis, rows: Verdicts) -> Diagnosis:
    facts = diagnosis.facts
    ended = job_ended(facts)
    holds = _open_at_end if ended else _holds
    known = _rows_of(facts, rows)
    own = [row for row in known if holds(facts, row)]
    undecided = _undecided(diagnosis) and not ended
    unseen = [row for row in known if undecided and row["state"] == "open" and row not in own]
    if facts.nodes:
        shown = {finding.verdict.id for finding in diagnosis.findings}
        own = [row for row in own if row["verdict"] not in shown]
    else:
        # Exits alone say less than the finding that was open at the end.
        stored = {row["verdict"] for row in own}
        kept = tuple(finding for finding in diagnosis.findings if finding.verdict.id not in stored)
        diagnosis = replace(diagnosis, findings=kept)
    case = Case(facts)
    findings = [_finding(case, row) for row in own]
    errors = [finding for finding in findings if finding.severity == ERROR]
    # The order of the findings: what stopped the job, then its end, then what slowed it down.
    others = [finding for finding in findings if finding.severity != ERROR]
    others += [_not_seen(case, row) for row in unseen]
    if not errors and not others:
        return diagnosis
    if errors and not ended:
        # CANNOT_TELL is dropped, because the stored finding, which was made from the facts of all nodes, names the
        # rank.
        named = tuple(finding for finding in diagnosis.findings if finding.verdict is not CANNOT_TELL)
        diagnosis = replace(diagnosis, findings=named)
    ends = [finding for finding in diagnosis.findings if finding.severity != NOTE]
    notes = [finding for finding in diagnosis.findings if finding.severity == NOTE]
    found = (*errors, *ends, *others, *notes)
    return replace(diagnosis, findings=tuple(replace(f, severity=NOTE) for f in found) if diagnosis.outlived else found)


def _not_seen(case: Case, row: Row) -> Finding:
    """Returns the open finding in ``row`` as a note. Some facts about its job could not be read."""
    finding = _finding(case, row)
    sentence = f"open since {clock(row['opened'])}, and not checked again by this diagnosis: {finding.sentence}"
    return replace(finding, severity=NOTE, sentence=sentence)


def _rows_of(facts: Facts, rows: Verdicts) -> list[Row]:
    """Returns the rows with known verdicts about the run; if no rank could be read, those of all runs of the job."""
    keys = [(facts.job, facts.run)] if facts.ranks else [key for key in rows if key[0] == facts.job]
    return [row for key in keys for row in rows.get(key, ()) if row["verdict"] in VERDICTS]


def _undecided(diagnosis: Diagnosis) -> bool:
    """Returns whether the diagnosis has neither an error nor a warning, but facts that could not be read may hide
    some."""
    worst = any(finding.severity != NOTE for finding in diagnosis.findings)
    return not worst and bool(unread(diagnosis.facts, diagnosis.missing))


def _names_nobody(diagnosis: Diagnosis) -> bool:
    """Returns whether the diagnosis shows nothing wrong, or shows ranks that wait but not the ranks that they wait
    for."""
    return not wrong(diagnosis) or any(finding.verdict is CANNOT_TELL for finding in diagnosis.findings)


def _open_at_end(facts: Facts, row: Row) -> bool:
    """Returns whether a finding was open when the first rank of the job ended. A death counts only if no node has
    facts, because facts show deaths themselves.
    """
    first = min(rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None)
    opened, closed = ns_of(row["opened"]), ns_of(row["closed"])
    if opened is None or (closed is not None and closed < first):
        return False
    return opened <= first if VERDICTS[row["verdict"]].group != "death" else not facts.nodes


def _still(facts: Facts) -> bool:
    advanced = _advanced_ns(facts)
    living = any(rank.exit is None for rank in facts.ranks)
    return living and (advanced is None or facts.taken_ns - advanced >= QUIET_NS)


def _advanced_ns(facts: Facts) -> int | None:
    return max((node.advanced_ns for node in facts.nodes if node.advanced_ns is not None), default=None)


def _holds(facts: Facts, row: Row) -> bool:
    """Returns whether the job has stood still since the finding opened and the ranks that the finding names
    are alive.
    """
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
        missing=("the present facts alone do not show it",),
        stacks=case.stacks(present, [rank for rank in stored.victims if rank in case.ranks]),
        ends=stored.ends if stored.ends is not None and stored.ends.at_ns > facts.taken_ns else None,
    )


# PyTorch appends the rank to the prefix TORCH_NCCL_DEBUG_INFO_TEMP_FILE.
_RANK = re.compile(r"(\d{1,6})$")


def from_dumps(directory: Path) -> Diagnosis:
    """Returns the diagnosis of the dumps in ``directory``, whose file names end with the rank.

    Raises NotFound if there is no dump. A file that cannot be read is added to ``missing``.
    """
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file() and _RANK.search(path.name))
    except OSError as e:
        raise NotFound(f"{directory} cannot be read: {e.strerror}") from e
    if not files:
        hint = "names of dumps end with the rank, such as nccl_trace_rank_3; TORCH_NCCL_DEBUG_INFO_TEMP_FILE sets them"
        raise NotFound(f"no dump is in {directory}", hint=hint)
    dumps: dict[int, RankDump] = {}
    groups: dict[object, Group] = {}
    missing: list[Missing] = []
    for path in files[:MAX_RANKS]:
        rank = int((_RANK.search(path.name) or [""])[0])
        try:
            dump = read_dump(rank, _content(path), groups)
        except (ProbingError, OSError) as e:
            missing.append(Missing("history", f"the dump {path.name} cannot be read: {getattr(e, 'message', e)}", rank))
            continue
        if rank in dumps:
            missing.append(Missing("rank", f"the dump {path.name} is left out: another dump has the same rank", rank))
        else:
            dumps[rank] = dump
    return diagnose_dumps(directory.resolve().name, list(dumps.values()), missing)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise NotFound(f"it has more than {size(MAX_FILE)}")
    return data
