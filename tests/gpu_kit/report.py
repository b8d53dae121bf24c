"""The report: ``report.json`` with everything, and ``report.md``, a table for docs/verified.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_kit.part import Outcome, State

__all__ = ("exit_code", "markdown", "write")

# Of a cell of the table, characters.
MAX_CELL = 400


def write(folder: Path, machine: dict[str, Any], outcomes: Sequence[Outcome], waiting: Sequence[str] = ()) -> None:
    """Writes both files, each whole, so that a reader sees this report or the last. ``waiting``: parts to come."""
    content = {
        "machine": machine,
        "summary": _summary(outcomes),
        "parts": [outcome.to_dict() for outcome in outcomes],
        "not_run": list(waiting),
    }
    for name, text in (
        ("report.json", json.dumps(content, indent=1) + "\n"),
        ("report.md", markdown(machine, outcomes, waiting)),
    ):
        fresh = folder / f"{name}.new"
        fresh.write_text(text)
        fresh.replace(folder / name)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Returns 1 where a part failed or ran out of time, else 0."""
    return int(any(outcome.state in (State.FAILED, State.TIMED_OUT) for outcome in outcomes))


def markdown(machine: dict[str, Any], outcomes: Sequence[Outcome], waiting: Sequence[str] = ()) -> str:
    """Returns a line about the machine, a table with a row a part, and the checks that did not pass."""
    lines = [f"Machine: {_machine(machine)}.", "", "| part | result | time | what was compared |", "|---|---|---|---|"]
    lines += [
        f"| {_cell(outcome.title)} | {outcome.state.value.replace('_', ' ')} | {outcome.seconds:g} s"
        f" | {_cell(_compared(outcome))} |"
        for outcome in outcomes
    ]
    lines += [f"| {name} | not run | | the run ended before it |" for name in waiting]
    problems = [
        f"* {outcome.title}, {check.name}: expected {_cell(check.expected)}, got {_cell(check.got)}"
        for outcome in outcomes
        for check in outcome.checks
        if check.state is State.FAILED
    ]
    return "\n".join([*lines, *(["", "Failed:", "", *problems] if problems else [])]) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    words = [
        machine.get("gpu_name") or "no GPU",
        f"driver {machine['driver']}" if machine.get("driver") else "",
        f"Linux {machine.get('kernel', '?')}",
        f"CPython {machine.get('python', '?')}",
        *(f"{name} {machine[name]}" for name in ("torch", "nccl", "cupy", "jax") if machine.get(name)),
        "rehearsal with doubles" if machine.get("rehearsal") else "",
    ]
    return ", ".join(word for word in words if word)


def _compared(outcome: Outcome) -> str:
    if outcome.state is State.SKIPPED or not outcome.checks:
        return outcome.why
    counts = Counter(check.state for check in outcome.checks)
    words = [f"{counts[state]} {state.value}" for state in State if counts[state]]
    figures = [f"{check.name}: {check.got}" for check in outcome.checks if check.state is State.MEASURED]
    skipped = [f"{check.name} skipped: {check.why}" for check in outcome.checks if check.state is State.SKIPPED]
    text = f"{', '.join(words)}{': ' if figures else ''}{'; '.join(figures)}"
    more = [*([outcome.why] if outcome.why else []), *skipped]
    return "; ".join([text, *more])


def _summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = Counter(outcome.state.value for outcome in outcomes)
    checks: Counter[str] = Counter(check.state.value for outcome in outcomes for check in outcome.checks)
    return {**counts, **{f"checks_{name}": count for name, count in checks.items()}}


def _cell(text: str) -> str:
    flat = " ".join(text.replace("|", "\\|").split())
    return flat if len(flat) <= MAX_CELL else flat[: MAX_CELL - 3] + "..."
