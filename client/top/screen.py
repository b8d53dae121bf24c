"""The screen of ``top`` on a terminal: textual reads keys and draws lines in the sixteen colours of the terminal; other
modules make the lines.

Textual's own markup is never used: a line is a list of segments with escaped text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.binding import Binding
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from probing.client.interrupt import end_soon
from probing.client.top.figures import Line, Span, fitted
from probing.client.top.page import body_lines, main_page
from probing.client.top.pane import filled
from probing.client.top.rank_page import rank_page
from probing.client.top.state import SORTS

if TYPE_CHECKING:
    from textual import events

    from probing.client.top.live import Live

__all__ = ("Canvas", "Changed", "TopApp", "help_page", "run_screen", "style_of")

_TEXT = f"""
KEYS
  q, Ctrl-C          leave
  j k, arrows        next and previous rank; g G: first, last; PgUp PgDn
  Enter              the rank's stack, last collectives, variables; Esc: back
  s S                next and previous order: {", ".join(name for name, *_ in SORTS[:4])},
                     {", ".join(name for name, *_ in SORTS[4:])}
  r                  reverse the order
  / f                filter: words that must be in job, node, rankN, pid, state,
                     operation, Python
  Esc                remove the filter
  e                  hide the jobs that have ended; again: show them
  p, Space           pause the screen; again: go on
  ? h                this page

JOBS: living jobs come first, and among them jobs in trouble
  STUCK FAILED       the daemon has found an error, or the first rank has failed
  SLOW WARNING       the daemon has found a warning; DIAGNOSIS is its sentence
  WAITS              a rank is in one operation for much longer than usual
  AWAY PAUSED        a node does not answer; the probes of a node are paused
  FAILED ENDED       below the living jobs: ended in the last 10 min

RANKS
  !                  blamed by a finding         .  waits for such a rank
  ?                  its node does not answer    x  has ended
  IN FLIGHT, AGE     the oldest operation that has not ended, and its age
  LAG                how much later the rank calls than the median rank
  CPU                100% is one CPU; run queue: ready to run, but without a CPU
  UTIL GMEM POWER    of all GPUs of the rank: mean, sum, sum; TEMP: the hottest
  Bars show the last seconds. Values that a node does not record are blank.
"""


def help_page(scroll: int, width: int, height: int) -> tuple[tuple[Line, ...], int]:
    """Returns the lines of the help page, and ``scroll`` limited to the length of the page."""
    text = _TEXT.strip("\n").split("\n")
    room = max(1, height - 2)
    first = max(0, min(scroll, len(text) - room))
    body: list[Line] = [
        (Span(fitted(line, width), "head" if line[:1].isupper() else ""),) for line in text[first : first + room]
    ]
    title: Line = (Span(fitted(" help of probingctl top", width), "title"),)
    keys: Line = (Span(fitted("Esc back  j/k scroll  q quit", width), "keys"),)
    return filled([title, *body, *([()] * (room - len(body))), keys], width, height), first


_STYLES = {
    "": "",
    "dim": "dim",
    "bold": "bold",
    "title": "reverse",
    "head": "bold underline",
    "keys": "dim",
    "prompt": "bold yellow",
    "job": "bold",
    "cursor": "reverse",
    "alarm": "bold white on red",
    "caution": "bold black on yellow",
    "fine": "bold black on green",
    "alarm text": "bold red",
    "caution text": "bold yellow",
    "bad": "bold red",
    "warn": "yellow",
    "cpu": "cyan",
    "gpu": "green",
    "mem": "blue",
    "power": "magenta",
    "temp": "yellow",
    "step": "green",
}


@lru_cache(maxsize=128)
def style_of(name: str, *, selected: bool = False) -> Style:
    """Returns the style of a span; the selected line is shown reversed and without colours."""
    return Style(reverse=True) if selected else Style.parse(_STYLES[name])


# The interval, s, at which the clock and the ages are redrawn even if no answer comes.
_REDRAW_S = 1.0


class Changed(Message):
    """The message that something has changed and must be drawn."""


class _Driver(LinuxDriver):
    """Draws on stdout; textual itself would draw on stderr, which may be a file."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._file = sys.__stdout__ or self._file

    def _get_terminal_size(self) -> tuple[int, int]:
        # The environment's COLUMNS and LINES do not change when the terminal is resized.
        with suppress(OSError):
            width, height = os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else 1)
            if width and height:
                return width, height
        return super()._get_terminal_size()


class Canvas(Widget):
    """A widget whose lines fill the screen."""

    DEFAULT_CSS = "Canvas { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Line, ...] = ()
        self._cursor: int | None = None

    def draw(self, lines: tuple[Line, ...], cursor: int | None) -> None:
        self._lines, self._cursor = lines, cursor
        self.refresh()

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else ()
        selected = y == self._cursor
        segments = [Segment(span.text, style_of(span.style, selected=selected)) for span in line]
        return Strip(segments).adjust_cell_length(self.size.width, style_of("", selected=selected))


class TopApp(App[int]):
    """Draws the pages of ``live`` and passes keys to ``live``."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("ctrl+z", "suspend_process", show=False)]  # noqa: RUF012

    def __init__(self, live: Live) -> None:
        super().__init__(driver_class=_Driver, ansi_color=True)
        self._live = live
        self._canvas = Canvas()
        self.problem: Exception | None = None
        self._leaving = False
        self._runs_in: asyncio.AbstractEventLoop | None = None

    def compose(self) -> Any:
        yield self._canvas

    def on_mount(self) -> None:
        self._runs_in = asyncio.get_running_loop()
        if self._leaving:
            self._leave()
        self._live.changed = self._wake
        self.set_interval(_REDRAW_S, self._draw)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def on_changed(self) -> None:
        self._draw()

    def on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+z":
            return
        event.prevent_default()
        event.stop()
        action = self._live.press(event.key, event.character, body_lines(self.size.height))
        if action == "quit":
            self._leave()
        else:
            self._draw()

    def leave_soon(self) -> None:
        """Ends the screen, even before the screen has started. Signal handlers may call this."""
        self._leaving = True
        if self._runs_in is not None:
            self._runs_in.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        # A terminal or a node that hangs must not keep the process alive.
        end_soon()
        self.exit(0)

    def _wake(self) -> None:
        # The fetching threads call this. The message waits in a queue until the loop of the screen takes it.
        if self.is_running:
            self.post_message(Changed())

    def _draw(self) -> None:
        width, height = self.size
        if width < 1 or height < 1:
            return
        try:
            self._draw_page(width, height)
        except Exception as e:
            # Textual itself would print the values of all variables.
            self.problem = e
            self.exit(1)

    def _draw_page(self, width: int, height: int) -> None:
        state, view = self._live.state, self._live.view
        if state.page == "help":
            lines, state.scroll = help_page(state.scroll, width, height)
            self._canvas.draw(lines, None)
        elif state.page == "rank":
            row, facts = self._live.chosen()
            lines, state.scroll = rank_page(row, facts, state.scroll, width, height)
            self._canvas.draw(lines, None)
        else:
            page = main_page(view, state, width, height, self._live.title, time.monotonic())
            self._canvas.draw(page.lines, page.cursor)


def run_screen(live: Live) -> None:
    """Shows the screen until q, Ctrl-C, SIGINT or SIGTERM; after that ``end_soon`` ends the process within 0.8 s."""
    app = TopApp(live)

    before = {
        number: signal.signal(number, lambda _number, _frame: app.leave_soon())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        app.run(mouse=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if app.problem is not None:
        raise app.problem
