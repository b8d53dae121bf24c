"""Makes the row of ``diagnosis.findings`` for a finding, and the finding's id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from probing.api.tables.schema import Row
from probing.diagnosis.report import ending_dict, finding_dict, utc_text
from probing.diagnosis.verdict import Finding

__all__ = ("culprit_ranks", "finding_id", "finding_report", "finding_row")

_JSON_COLUMNS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")
# The maximum size of one JSON column, which keeps a whole row below the size limit of a message to the collector.
_MAX_JSON = 128 << 10
_MAX_TEXT = 4096
_MAX_RANKS = 512


def finding_id(job: str, run: str, finding: Finding) -> str:
    """Returns the id of a finding: the same on all nodes, and after a restart of the daemon."""
    ranks = ",".join(map(str, sorted({culprit.rank for culprit in finding.culprits})))
    text = f"{job}\0{run}\0{finding.verdict.id}\0{ranks}\0{finding.about}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def finding_row(job: str, run: str, finding: Finding, opened_ns: int) -> Row:
    """Returns the row of an open finding, without ``node`` and ``ts``, which the collector adds. Times are UTC ns."""
    fields, advice = finding_dict(finding), finding.advice
    return {
        "job": job,
        "run": run,
        "finding_id": finding_id(job, run, finding),
        "verdict": finding.verdict.id,
        "severity": finding.severity,
        "state": "open",
        "confidence": float(finding.confidence),
        "sentence": finding.sentence[:_MAX_TEXT],
        "ranks": culprit_ranks(finding),
        "nodes": ",".join(dict.fromkeys(culprit.node for culprit in finding.culprits))[:_MAX_TEXT],
        "victims": _numbers(finding.victims),
        "about": finding.about[:_MAX_TEXT],
        **{name: _json(fields[name]) for name in _JSON_COLUMNS},
        "advice": advice.action if advice is not None else None,
        "advice_nodes": ",".join(advice.nodes)[:_MAX_TEXT] if advice is not None else None,
        "advice_reason": advice.reason[:_MAX_TEXT] if advice is not None else None,
        "ends": finding.ends.at_ns if finding.ends is not None else None,
        "ends_by": finding.ends.by if finding.ends is not None else None,
        "since": finding.since_ns,
        "opened": opened_ns,
        "closed": None,
    }


def culprit_ranks(finding: Finding) -> str:
    """Returns the column ``ranks``: the ranks of the culprits."""
    return _numbers([culprit.rank for culprit in finding.culprits])


def finding_report(row: Mapping[str, Any]) -> Row:
    """Returns the row in the form of `diagnose -f json`, with ``finding_id``, ``state``, ``opened`` and ``closed``."""
    times = {name: utc_text(row[name]) for name in ("since", "opened", "closed")}
    lists = {name: json.loads(row[name]) for name in _JSON_COLUMNS}
    victims = [int(rank) for rank in _split(row["victims"])]
    plain = ("job", "run", "finding_id", "state", "verdict", "severity", "confidence", "sentence", "about")
    advice = {"action": row.get("advice"), "nodes": _split(row.get("advice_nodes")), "reason": row.get("advice_reason")}
    known = advice if row.get("advice") else None
    ends = ending_dict(row["ends"], row["ends_by"]) if row.get("ends") else None
    more = {"victims": victims, "advice": known, "ends": ends, "others": []}
    return {**{name: row[name] for name in plain}, **times, **lists, **more}


def _split(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _numbers(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks[:_MAX_RANKS]))


def _json(items: Sequence[Any]) -> str:
    """Returns ``items`` as JSON. If they exceed _MAX_JSON, the later half is left out until the rest fits."""
    kept = list(items)
    while len(text := json.dumps(kept, separators=(",", ":"))) > _MAX_JSON:
        kept = kept[: len(kept) // 2]
    return text
