"""Takes findings that the coordinator of a job found, for the other nodes of the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from probing.api.errors import FormatError, UsageError
from probing.daemon.row_check import checked_row

__all__ = ("take_findings",)

_TABLE = "diagnosis.findings"
_OWN = frozenset({"node", "ts"})
_MAX_ROWS = 16
_NAMES = ("job", "run", "finding_id", "verdict", "severity", "state", "sentence", "found_by")
_LISTS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")


class _Watch(Protocol):
    """``diagnose.watch.JobWatch``."""

    def watches(self, job: str, run: str) -> bool: ...

    def take(self, row: Mapping[str, Any]) -> None: ...


def take_findings(watch: _Watch, rows: bytes) -> int:
    """Gives rows of ``diagnosis.findings``, a JSON list, to the watch; those of jobs without ranks here are left out.

    Returns how many were taken. Raises FormatError and UsageError for anything else than such rows.
    """
    try:
        found = json.loads(rows)
    except (ValueError, RecursionError) as e:
        raise FormatError("the findings are no JSON") from e
    if not isinstance(found, list) or len(found) > _MAX_ROWS:
        raise UsageError(f"a call takes a list of at most {_MAX_ROWS} findings")
    checked = [_checked(row) for row in found]
    known = [row for row in checked if watch.watches(row["job"], row["run"])]
    for row in known:
        watch.take(row)
    return len(known)


def _checked(row: Any) -> dict[str, Any]:
    found = checked_row(_TABLE, row, _OWN)
    if any(not isinstance(found.get(name), str) for name in _NAMES) or type(found.get("opened")) is not int:
        raise UsageError("a finding lacks a field that names it")
    if found["state"] not in ("open", "closed"):
        raise UsageError("a finding is open or closed")
    for name in _LISTS:
        _check_list(found.get(name))
    return found


def _check_list(text: Any) -> None:
    try:
        valid = isinstance(text, str) and isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise UsageError("a list of a finding is no JSON list")
