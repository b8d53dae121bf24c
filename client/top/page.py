"""Draws the main page: jobs with their lines and ranks, and a pane about the selected rank. No input or output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from probing.api.text import escape, plural
from probing.client.render.rows import Row
from probing.client.render.table import ascii_only, cut_mark, wrapped
from probing.client.top.columns import cells, chosen, head
from probing.client.top.figures import Line, Span, brief_age, fitted
from probing.client.top.model import View, key_of
from probing.client.top.pane import filled, pane
from probing.client.top.state import SORTS, State, shown
from probing.client.top.trouble import Job
from probing.client.zone import now_text

__all__ = ("Page", "body_lines", "main_page")

# The minimum height, in lines, of a screen that shows the pane of the selected rank.
_LEAST_FOR_PANE = 14
_MOST_ABSENT = 3
_STALE_S = 3.0
# The minimum width of a screen that shows the sort order in its title line.
_WIDE_ENOUGH = 60
_WORD_STYLES = {
    "STUCK": "alarm",
    "FAILED": "alarm",
    "SLOW": "caution",
    "WARNING": "caution",
    "WAITS": "caution",
    "AWAY": "caution",
    "PAUSED": "caution",
    "OK": "fine",
    "ENDED": "dim",
}
_KEYS = "q quit  ? help  j/k move  Enter rank  s sort  r reverse  / filter  e ended  p pause"
_MEDIUM_KEYS = "q quit  ? help  j/k move  Enter rank  s sort  r reverse  / filter  e ended"
_FEW_KEYS = "q ? j/k Enter s r / e p"


@dataclass(frozen=True, slots=True)
class Page:
    """A page. ``lines`` fill the screen; ``cursor``: the number of the selected line, or None; ``rows``: the ranks in
    their order.
    """

    lines: tuple[Line, ...]
    cursor: int | None = None
    rows: tuple[Row, ...] = ()


def body_lines(height: int) -> int:
    """Returns how many lines PageDown moves: the minimum number of lines for jobs and ranks."""
    return max(1, height - 10)


def main_page(view: View, state: State, width: int, height: int, title: str, now: float) -> Page:
    """Returns the main page. ``title`` names the nodes that are asked; ``now`` is time.monotonic().

    Changes ``state`` so that it selects an existing row, and scrolls to that row.
    """
    jobs = shown(view, state)
    rows = tuple(row for job in jobs for row in job.ranks)
    state.follow(rows)
    columns = chosen(width, view.ranks, nodes=len(view.nodes))
    above = [_title(view, state, width, title, now), *_news_of_nodes(view, width, now), head(columns)]
    below = [*_selected(rows, state, width, height), _bottom(state, width)]
    room = max(1, height - len(above) - len(below))
    items = list(_items(jobs, width, room)) or [_nothing(view, state)]
    at = next((i for i, item in enumerate(items) if isinstance(item, dict) and key_of(item) == state.selected), None)
    state.top = _scrolled(items, at, state.top, room)
    visible = items[state.top : state.top + room]
    body = [cells(columns, item) if isinstance(item, dict) else item for item in visible]
    body += [()] * (room - len(body))
    cursor = None if at is None else len(above) + at - state.top
    return Page(filled((*above, *body, *below), width, height), cursor, rows)


def _title(view: View, state: State, width: int, title: str, now: float) -> Line:
    order = f" sort: {SORTS[state.sort][0]}{' reversed' if state.reverse else ''} "
    right = order if width >= _WIDE_ENOUGH else ""
    marks = []
    if state.paused:
        marks.append(Span(" PAUSED: p goes on ", "caution"))
    elif view.at is not None and now - view.at > _STALE_S:
        marks.append(Span(f" {brief_age((now - view.at) * 1e9)} old ", "caution"))
    clock = now_text()
    ended = sum(job.ended is not None for job in view.jobs)
    count = f"{plural(len(view.jobs) - ended, 'job')}, {plural(sum(job.live for job in view.jobs), 'rank')}"
    count += f", {ended} ended{'' if state.ended else ' (hidden)'}" if ended else ""
    left = f"probingctl top  {clock}  {escape(title)}  {count}"
    room = width - len(right) - sum(len(mark.text) for mark in marks)
    return (Span(fitted(left, max(0, room)), "title"), *marks, Span(right, "title"))


def _news_of_nodes(view: View, width: int, now: float) -> Iterator[Line]:
    for absent in view.absent[:_MOST_ABSENT]:
        name = absent.node or absent.address
        text = f"no answer for {brief_age((now - absent.since) * 1e9)} from {name}: {absent.reason}"
        yield (Span(fitted(text, width), "alarm"),)
    if len(view.absent) > _MOST_ABSENT:
        yield (Span(fitted(f"and {len(view.absent) - _MOST_ABSENT} more nodes do not answer", width), "alarm"),)
    for note in view.notes[:_MOST_ABSENT]:
        yield (Span(fitted(note, width), "caution"),)


def _nothing(view: View, state: State) -> Line:
    if view.at is None:
        return (Span("  asking ...", "dim"),)
    if state.filter:
        text = f"no rank passes the filter {escape(state.filter)}"
    elif view.jobs:
        text = "no training process runs; e shows the jobs that ended"
    elif view.absent and not view.nodes:
        text = "what runs on the nodes above is not known"
    elif not view.nodes:
        text = "no node has answered yet"
    else:
        text = f"no training process{' on the nodes that answer' if view.absent else ''}"
    return (Span(f"  {text}", "dim"),)


def _items(jobs: Sequence[Job], width: int, room: int) -> Iterator[Line | Row]:
    """Yields the lines of each job, and a row for each of its ranks."""
    # The lines of a job must leave space for its ranks.
    most = max(2, min(12, room // 3))
    for i, job in enumerate(jobs):
        if i and room > 20:
            yield ()
        yield _job_line(job, width)
        yield from _job_news(job, width, most if i == 0 else max(2, most // 2))
        yield from job.ranks


def _job_line(job: Job, width: int) -> Line:
    ranks = f"{job.live} of {job.world if job.world is not None else '?'} ranks"
    name = f" job {job.job}  run {job.run}  {ranks} "
    word = f" {job.word} "
    return (Span(word, _WORD_STYLES[job.word]), Span(fitted(name, max(0, width - len(word))), "job"))


def _job_news(job: Job, width: int, most: int) -> Iterator[Line]:
    found: list[tuple[str, str]] = []
    for i, line in enumerate(job.lines):
        style = ("alarm text" if job.level == 0 else "caution text") if i < job.verdicts else _news_style(line)
        found += [(f"  {part}", style) for part in wrapped(escape(line), max(20, width - 2))]
    cut = len(found) > most
    for i, (text, style) in enumerate(found[:most]):
        last = cut and i == most - 1
        yield (Span(fitted(f"{fitted(text, width - 2).rstrip()} {cut_mark()}" if last else text, width), style),)


def _news_style(line: str) -> str:
    if line.startswith(("FAILED", "PAUSED")):
        return "alarm text"
    return "caution text" if line.startswith(("WAITING", "in no collective")) else "dim"


def _scrolled(items: Sequence[Line | Row], at: int | None, top: int, room: int) -> int:
    """Returns the index of the first item to show, near ``top``, so that item ``at`` is visible, and the lines of its
    job if they fit.
    """
    last = max(0, len(items) - room)
    if at is None:
        return min(top, last)
    begin = at
    while begin > 0 and not isinstance(items[begin - 1], dict):
        begin -= 1
    if at - begin >= room:
        begin = at
    return min(max(min(top, begin), at - room + 1), last)


def _selected(rows: Sequence[Row], state: State, width: int, height: int) -> list[Line]:
    if height < _LEAST_FOR_PANE or not rows:
        return []
    rule = "-" if ascii_only() else "─"
    found = pane(rows[state.position], width, 2 if height < 40 else 6)
    return [(Span(rule * width, "dim"),), *found]


def _bottom(state: State, width: int) -> Line:
    if state.editing:
        return (Span(fitted(f"filter: {state.filter}_  (Enter keeps it, Esc ends it)", width), "prompt"),)
    active = f"filter: {state.filter}  " if state.filter else ""
    keys = next((keys for keys in (_KEYS, _MEDIUM_KEYS) if len(active) + len(keys) <= width), _FEW_KEYS)
    return (Span(fitted(active + keys, width), "prompt" if active else "keys"),)
