"""The states of sources, each a row of ``probingctl status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ("SourceState", "Totals", "first_of")

# The maximum number of texts that a reason lists, and of characters of each text.
MAX_NAMED = 8
MAX_TEXT = 400


class SourceState(NamedTuple):
    """The state of a source. ``state``: running, degraded, paused or stopped; ``reason``: why it is not running."""

    name: str
    state: str
    reason: str = ""
    rows: int = 0
    lost: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """The collector's counts for all sources: ``rows`` by table, ``lost`` rows by source.

    ``state`` is running or paused. ``probes_off``: probes that were switched off because they were hit too often.
    ``attached``: the number of probed files by path; ``refused``: why files have no probes.
    """

    state: str
    rows: Mapping[str, int]
    lost: Mapping[str, int]
    probes_off: Sequence[str] = ()
    attached: Mapping[str, int] = field(default_factory=dict)
    refused: Sequence[str] = ()

    def of(
        self, name: str, table: str = "", source: str = "", *, state: str = "", reason: str = "", detail: str = ""
    ) -> SourceState:
        """Returns the state of ``name``, with the rows of ``table`` and the losses of ``source``."""
        return SourceState(
            name, state or self.state, reason, self.rows.get(table, 0), self.lost.get(source or name, 0), detail
        )


def first_of(texts: Sequence[str], separator: str = "; ") -> str:
    """Joins the first MAX_NAMED of ``texts``, each cut to MAX_TEXT, and appends the number of texts left out."""
    named = [text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…" for text in texts[:MAX_NAMED]]
    more = [f"and {len(texts) - MAX_NAMED} more"] if len(texts) > MAX_NAMED else []
    return separator.join([*named, *more])
