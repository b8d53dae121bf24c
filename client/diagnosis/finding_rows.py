"""Turns a row of diagnosis.findings back into the finding that was stored."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from probing.client.diagnosis.findings import PARTS, SHOWN, ns_of, numbers, parsed
from probing.client.render.rows import Row
from probing.diagnosis.facts import Facts, Frame, Thread
from probing.diagnosis.ladder import RULES, Diagnosis
from probing.diagnosis.supplements import ACTIONS
from probing.diagnosis.verdict import Advice, Culprit, Ending, Finding, StackOf, Verdict

__all__ = ("COLUMNS", "VERDICTS", "diagnosis_of", "finding_of")

VERDICTS = {verdict.id: verdict for rule in RULES for verdict in rule.VERDICTS}
"""The verdicts that this version knows, by id."""
COLUMNS = (
    *SHOWN,
    *PARTS,
    *("about", "since", "closed", "found_by", "advice", "advice_nodes", "advice_reason", "ends", "ends_by"),
)
"""The columns that ``finding_of`` reads."""


def diagnosis_of(row: Row) -> Diagnosis:
    """Returns a diagnosis with the finding of ``row`` alone, as of the time when the row was written."""
    facts = Facts(str(row["job"]), str(row["run"]), None, 0.0, ns_of(row["ts"]) or 0, (), ())
    return Diagnosis(facts, (finding_of(row),), ())


def finding_of(row: Row) -> Finding:
    """Returns the finding of a row with COLUMNS. Values that another version wrote in an unknown form are left out."""
    verdict = VERDICTS.get(row["verdict"]) or Verdict(str(row["verdict"]), "general", "", "", "", "", "", ())
    ends = ns_of(row["ends"])
    return Finding(
        verdict,
        str(row["severity"]),
        float(row["confidence"] or 0.0),
        str(row["sentence"]),
        tuple(_culprits(row["culprits"])),
        tuple(numbers(row["victims"])),
        ns_of(row["since"]),
        str(row["about"] or ""),
        tuple(_texts(row["evidence"])),
        tuple(_texts(row["missing"])),
        tuple(_texts(row["refuted_by"])) or (verdict.refuted_by,),
        tuple(_texts(row["next_steps"])) or verdict.next_steps,
        tuple(_stacks(row["stacks"])),
        _advice(row),
        Ending(ends, str(row["ends_by"] or "")) if ends is not None else None,
    )


def _advice(row: Row) -> Advice | None:
    if row["advice"] not in ACTIONS:
        return None
    nodes = tuple(str(row["advice_nodes"] or "").split(",")) if row["advice_nodes"] else ()
    return Advice(str(row["advice"]), str(row["advice_reason"] or ""), nodes)


def _culprits(value: Any) -> list[Culprit]:
    found = []
    for one in _items(value):
        with suppress(KeyError, TypeError, ValueError):
            found.append(
                Culprit(int(one["rank"]), str(one["node"]), int(one["pid"]), str(one["why"]), str(one["activity"]))
            )
    return found


def _stacks(value: Any) -> list[StackOf]:
    found = []
    for one in _items(value):
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            thread = Thread(
                int(one["tid"]),
                str(one["thread"] or ""),
                one["tid"] == one["pid"],
                one["state"] if isinstance(one["state"], str) else None,
                one["gil"] if isinstance(one["gil"], bool) else None,
                tuple(map(_frame, one["frames"])),
                ns_of(one["since"]),
                one["moving"] if isinstance(one["moving"], bool) else None,
                str(one["native_missing"] or ""),
            )
            found.append(StackOf(int(one["rank"]), str(one["node"]), int(one["pid"]), str(one["role"]), thread))
    return found


def _frame(one: Any) -> Frame:
    line = one["lineno"]
    values = tuple((str(name), str(text)) for name, text in one.get("values", {}).items())
    native = one["frame_type"] == "Native"
    return Frame(str(one["func"]), str(one["file"]), line if isinstance(line, int) else None, native, values)


def _texts(value: Any) -> list[str]:
    return [one for one in _items(value) if isinstance(one, str)]


def _items(value: Any) -> list[Any]:
    """Returns the list in ``value``, which is JSON text or was already parsed from it."""
    found = parsed(value) if isinstance(value, str) else value
    return found if isinstance(found, list) else []
