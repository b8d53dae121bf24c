"""Keeps the user's choices on the screen, and applies keys to them. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from probing.client.render.rows import Row
from probing.client.top.model import RankKey, View, key_of
from probing.client.top.trouble import Job

__all__ = ("SORTS", "State", "shown")

# The orders of ranks: title, key, and whether the largest value comes first.
SORTS: tuple[tuple[str, str, bool], ...] = (
    ("trouble", "", False),
    ("rank", "rank", False),
    ("lag", "lag_ns", True),
    ("age", "age_ns", True),
    ("steps/s", "steps_per_s", False),
    ("cpu", "cpu_pct", True),
    ("rss", "rss_bytes", True),
    ("gpu", "gpu_pct", True),
    ("gpu memory", "gpu_used_bytes", True),
    ("power", "power_w", True),
    ("temperature", "temperature_c", True),
)
_BLAME = {"culprit": 0, "victim": 2}
_LONG_FILTER = 60
_LONG_PAGE = 1_000_000
_MOVES = {"j": 1, "down": 1, "k": -1, "up": -1}


@dataclass(slots=True)
class State:
    """The choices of the user. ``page``: ``main``, ``rank`` or ``help``. ``top``: the number of the first line that the
    main page shows of its jobs and ranks; ``scroll``: the number of the first line that another page shows.

    ``selected`` names a process, so that it stays selected when the order changes; ``position`` is its last position.
    ``chosen``: the user has selected a rank; until then the first rank is selected. ``ended``: jobs that have ended are
    shown.
    """

    page: str = "main"
    selected: RankKey | None = None
    chosen: bool = False
    position: int = 0
    top: int = 0
    scroll: int = 0
    sort: int = 0
    reverse: bool = False
    filter: str = ""
    ended: bool = True
    editing: bool = False
    paused: bool = False

    def press(self, key: str, character: str | None, view: View, lines: int) -> str:
        """Applies a key and returns ``quit``, ``pause``, ``open``, ``close`` or an empty text. ``lines``: how far
        PageDown moves.
        """
        if self.editing:
            return self._edit(key, character)
        if key in ("q", "ctrl+c", "ctrl+q"):
            return "quit"
        if key in ("p", "space"):
            self.paused = not self.paused
            return "pause"
        if self.page != "main":
            return self._leaf(key, character, lines)
        return self._main(key, character, view, lines)

    def follow(self, rows: Sequence[Row]) -> None:
        """Keeps the process selected if it is among the shown ``rows``; else selects the row at its last position."""
        keys = [key_of(row) for row in rows]
        if not self.chosen and self.page == "main":
            self.selected, self.position = None, 0
        if self.selected in keys:
            self.position = keys.index(self.selected)
            return
        self.position = max(0, min(self.position, len(keys) - 1))
        if self.page == "main":
            self.selected = keys[self.position] if keys else None

    def _main(self, key: str, character: str | None, view: View, lines: int) -> str:
        rows = [row for job in shown(view, self) for row in job.ranks]
        if (to := _moved(self.position, len(rows) - 1, key, character, lines)) is not None:
            self.position, self.chosen = to, True
            self.selected = key_of(rows[to]) if rows else None
        elif key == "enter" and self.selected is not None:
            self.page, self.scroll, self.chosen = "rank", 0, True
            return "open"
        elif character in ("?", "h"):
            self.page, self.scroll = "help", 0
        elif character in ("/", "f"):
            self.editing = True
        elif key == "escape":
            self.filter = ""
        elif character in ("s", "S"):
            self.sort = (self.sort + (1 if character == "s" else -1)) % len(SORTS)
        elif character == "r":
            self.reverse = not self.reverse
        elif character == "e":
            self.ended = not self.ended
        return ""

    def _leaf(self, key: str, character: str | None, lines: int) -> str:
        """Applies a key on any page other than the main page."""
        if key in ("escape", "enter", "backspace", "left") or (self.page == "help" and character in ("?", "h")):
            left, self.page = self.page, "main"
            return "close" if left == "rank" else ""
        if character in ("?", "h"):
            self.page, self.scroll = "help", 0
            return "close"
        # The length of the page is known only when the page is drawn.
        to = _moved(self.scroll, _LONG_PAGE, key, character, lines)
        self.scroll = self.scroll if to is None else to
        return ""

    def _edit(self, key: str, character: str | None) -> str:
        if key == "ctrl+c":
            return "quit"
        if key == "escape":
            self.editing, self.filter = False, ""
        elif key == "enter":
            self.editing = False
        elif key in ("backspace", "ctrl+h"):
            self.filter = self.filter[:-1]
        elif key == "ctrl+u":
            self.filter = ""
        elif character is not None and character.isprintable() and len(self.filter) < _LONG_FILTER:
            self.filter += character
        return ""


def shown(view: View, state: State) -> tuple[Job, ...]:
    """Returns the jobs with the ranks that pass the filter, in the chosen order. Jobs without such ranks are left out,
    as are ended jobs if they are hidden.

    Each word of the filter must occur in the names of a rank or in the text about its activity.
    """
    words = state.filter.lower().split()
    jobs = []
    for job in view.jobs:
        if job.ended is not None and not state.ended:
            continue
        ranks = [row for row in job.ranks if not words or _passes(row, job, words)]
        if ranks:
            jobs.append(_with(job, _sorted(ranks, state)))
    return tuple(jobs)


def _moved(position: int, last: int, key: str, character: str | None, lines: int) -> int | None:
    """Returns the position, from 0 to ``last``, to which a key moves from ``position``; None if the key does not
    move.
    """
    step = _MOVES.get(key, {"pagedown": lines, "pageup": -lines}.get(key))
    if step is not None:
        return max(0, min(position + step, last))
    if key == "home" or character == "g":
        return 0
    return max(0, last) if key == "end" or character == "G" else None


def _with(job: Job, ranks: Sequence[Row]) -> Job:
    return replace(job, ranks=tuple(ranks))


def _passes(row: Row, job: Job, words: Sequence[str]) -> bool:
    named = (
        job.job,
        job.run,
        job.word,
        row["node"],
        f"rank{row['rank']}",
        row["pid"],
        row["state"],
        row["op"],
        row["python"],
        row["comm"],
        row.get("command"),
    )
    text = " ".join(str(part) for part in named if part is not None).lower()
    return all(word in text for word in words)


def _sorted(ranks: Sequence[Row], state: State) -> list[Row]:
    _, name, largest = SORTS[state.sort]
    if not name:
        found = sorted(ranks, key=lambda row: (row["ended"] is not None, _BLAME.get(row["blame"], 1), *_order(row)))
        return found[::-1] if state.reverse else found
    known = sorted((row for row in ranks if row.get(name) is not None), key=lambda row: (row[name], *_order(row)))
    # Rows without a value come last, whatever the direction.
    unknown = sorted((row for row in ranks if row.get(name) is None), key=_order)
    return [*(known[::-1] if largest != state.reverse else known), *unknown]


def _order(row: Row) -> tuple[bool, int, str, int]:
    return row["rank"] is None, row["rank"] or 0, str(row["node"]), row["pid"]
