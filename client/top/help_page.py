"""Draws the page of keys and signs. Pure."""

from __future__ import annotations

from probing.client.top.figures import Line, Span, fitted
from probing.client.top.pane import filled
from probing.client.top.state import SORTS

__all__ = ("help_page",)

_TEXT = f"""
KEYS
  q, Ctrl-C          leave
  j k, arrows        next and previous rank; g G: first, last; PgUp PgDn
  Enter              the rank's stack, last collectives, variables; Esc: back
  s S                next and previous order: {", ".join(name for name, *_ in SORTS[:4])},
                     {", ".join(name for name, *_ in SORTS[4:])}
  r                  the other way round
  / f                filter: words that must be in job, node, rankN, pid, state,
                     operation, Python
  Esc                no filter
  e                  hide the jobs that have ended; again: show them
  p, Space           stand still; again: go on
  ? h                this page

JOBS, those that live first, of them the one in trouble
  STUCK FAILED       the daemon has found an error, or the first rank has failed
  SLOW WARNING       the daemon has found a warning; DIAGNOSIS is its sentence
  WAITS              a rank is in one operation for much longer than usual
  AWAY PAUSED        a node does not answer; its probes are paused
  FAILED ENDED       below those that live: ended in the last 10 min

RANKS
  !                  blamed by a finding         .  waits for such a rank
  ?                  its node does not answer    x  has ended
  IN FLIGHT, AGE     the oldest operation that is not finished, and since when
  LAG                how much later than the rank in the middle it calls
  CPU                100% is one CPU; run queue: it could run and had none
  UTIL GMEM POWER    of all GPUs of the rank: mean, sum, sum; TEMP: the hottest
  Bars show the last seconds. What a node does not record is left blank.
"""


def help_page(scroll: int, width: int, height: int) -> tuple[tuple[Line, ...], int]:
    """Returns the lines of the page, and the first one that can be shown at ``scroll``."""
    text = _TEXT.strip("\n").split("\n")
    room = max(1, height - 2)
    first = max(0, min(scroll, len(text) - room))
    body: list[Line] = [
        (Span(fitted(line, width), "head" if line[:1].isupper() else ""),) for line in text[first : first + room]
    ]
    title: Line = (Span(fitted(" help of probingctl top", width), "title"),)
    keys: Line = (Span(fitted("Esc back  j/k scroll  q quit", width), "keys"),)
    return filled([title, *body, *([()] * (room - len(body))), keys], width, height), first
