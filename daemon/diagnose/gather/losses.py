"""Which operations of a rank are missing: those before its probes were attached, and those that were lost."""

from __future__ import annotations

from collections.abc import Iterable

from probing.daemon.diagnose.gather.processes import JobProcess
from probing.daemon.diagnose.gather.tables import Row, Rows
from probing.diagnosis.facts import Missing

__all__ = ("Losses",)

_ATTACH = "attach"
_MAX_TEXTS = 8


class Losses:
    """Reads the rows of the statement ``losses``: each is about a pid, or about all processes."""

    def __init__(self, rows: Rows) -> None:
        self._attached: dict[int, list[Row]] = {}
        self._lost: list[Row] = []
        for row in rows.get("losses", ()):
            if row["stage"] != _ATTACH:
                self._lost.append(row)
            elif row["pid"] is not None:
                self._attached.setdefault(row["pid"], []).append(row)

    def seen_from(self, one: JobProcess, attached_ns: int | None) -> int | None:
        """Returns since when the operations of a process are recorded, UTC ns; None: from its start. ``attached_ns``:
        that of comm.progress."""
        # A row about an earlier process of that pid is older than this one.
        own = (row["until_ns"] for row in self._attached.get(one.key.pid, ()))
        times = [at for at in own if at >= (one.started_ns or 0)]
        return max([*times, *([attached_ns] if attached_ns is not None else [])], default=None)

    def lost(self, one: JobProcess) -> int:
        """Returns how many operations of a process were lost lately. A loss of unknown number counts 1."""
        return sum(row["count"] or 1 for row in self._lost if _concerns(row, one))

    def missing(self, processes: Iterable[JobProcess]) -> list[Missing]:
        """Returns the losses of ``processes``, the newest eight, as missing facts."""
        known = list(processes)
        found = []
        for row in self._lost:
            if any(_concerns(row, one) for one in known):
                count = "some" if row["count"] is None else row["count"]
                whose = "" if row["pid"] is None else f" of pid {row['pid']}"
                found.append(Missing("operations", f"{count} operations{whose} were lost: {row['reason']}"))
        return found[:_MAX_TEXTS]


def _concerns(row: Row, one: JobProcess) -> bool:
    return row["pid"] in (None, one.key.pid) and row["until_ns"] >= (one.started_ns or 0)
