"""The text of ``preflight``: a line for each result, the worst first, and the matrix of round trips."""

from __future__ import annotations

from collections.abc import Sequence

from probing.api.text import age, escape, plural
from probing.client.render.table import wrapped
from probing.diagnosis.preflight.checks.round_trips import Cell
from probing.diagnosis.preflight.result import FAIL, SKIPPED, STATES, WARN, Result

__all__ = ("results_text",)

# More nodes than this do not fit beside each other; the result names the pairs that matter.
_MOST_COLUMNS = 8
_CELL = 8
_COLOURS = {FAIL: "31;1", WARN: "33", SKIPPED: "2"}
_WORD = 8


def results_text(found: Sequence[Result], cells: Sequence[Cell], width: int | None, *, colour: bool = False) -> str:
    """Returns the text for a terminal of ``width`` columns; 80 where there is none."""
    lines = []
    for result in sorted(found, key=lambda one: STATES.index(one.state)):
        lines += _result(result, width or 80, colour=colour)
    matrix = _matrix(cells)
    counted = ", ".join(
        f"{number} {state}" for state in reversed(STATES) if (number := sum(r.state == state for r in found))
    )
    verdict = "do not start the job" if any(r.state == FAIL for r in found) else "nothing stands against the job"
    return "\n".join([*lines, *(["", *matrix] if matrix else []), "", f"{counted}: {verdict}"]) + "\n"


def _result(result: Result, width: int, *, colour: bool) -> list[str]:
    word = f"{result.state:<{_WORD}}"
    shown = f"\x1b[{_COLOURS[result.state]}m{word}\x1b[0m" if colour and result.state in _COLOURS else word
    text = list(wrapped(f"{result.check}: {escape(result.text)}", width - _WORD))
    if result.hint and result.state in (FAIL, WARN):
        text += [f"  {line}" for line in wrapped(escape(result.hint), width - _WORD - 2)]
    return [(shown if n == 0 else " " * _WORD) + line for n, line in enumerate(text)]


def _matrix(cells: Sequence[Cell]) -> list[str]:
    """Returns a table of the round trips from row to column; no lines for too many nodes, or without a measurement."""
    nodes = sorted({cell[0] for cell in cells})
    if not 1 < len(nodes) <= _MOST_COLUMNS or all(cell[2] is None for cell in cells):
        return []
    known = {(a, b): ns for a, b, ns, _ in cells}
    first = min(max(len(escape(node)) for node in nodes), 80 - (_CELL + 1) * len(nodes))

    def row(head: str, values: Sequence[str]) -> str:
        return f"{escape(head)[:first]:<{first}} " + " ".join(f"{escape(v)[-_CELL:]:>{_CELL}}" for v in values)

    def value(a: str, b: str) -> str:
        return "-" if a == b or (a, b) not in known else "lost" if known[a, b] is None else age(known[a, b])

    title = f"round trips of {plural(len(nodes), 'node')}, from row to column"
    return [title, row("", nodes), *(row(a, [value(a, b) for b in nodes]) for a in nodes)]
