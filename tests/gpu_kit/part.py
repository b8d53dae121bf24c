"""What a part is, and the checks that it makes: each is written to a file at once, which a killed part leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_kit.scene import Scene

__all__ = ("Check", "Checks", "Outcome", "Part", "Skip", "State", "outcome", "read_checks")

# Of a text that a report shows, characters.
MAX_TEXT = 600


class State(str, Enum):
    """What came of a part or of one check. ``measured``: a figure that nothing is compared with."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    TIMED_OUT = "timed_out"
    MEASURED = "measured"


class Skip(Exception):
    """Something that the part or the check needs is not there; the text says what."""


@dataclass(frozen=True)
class Check:
    """One comparison. ``expected`` and ``got`` are texts; ``why`` is that of a check that was skipped."""

    name: str
    state: State
    expected: str = ""
    got: str = ""
    why: str = ""


@dataclass(frozen=True)
class Part:
    """``needs`` are names of ``Machine.missing``: where one is missing the part is skipped with its reason."""

    name: str
    title: str
    deadline_s: float
    run: Callable[[Scene], None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a part: its checks, and why it was skipped or failed as a whole."""

    name: str
    title: str
    state: State
    seconds: float
    why: str = ""
    checks: list[Check] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Checks:
    """Writes each check into ``file``, a line each. Nothing is raised for a check that fails."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    def add(self, name: str, good: bool, expected: object, got: object) -> bool:
        """Returns ``good``: whether the check passed."""
        self._write(Check(name, State.PASSED if good else State.FAILED, _text(expected), _text(got)))
        return good

    def equal(self, name: str, expected: object, got: object) -> bool:
        return self.add(name, expected == got, expected, got)

    def near(self, name: str, expected: float, got: float | None, *, most: float) -> bool:
        """Passes where ``got`` differs from ``expected`` by at most ``most``; NULL fails."""
        good = got is not None and abs(got - expected) <= most
        return self.add(name, good, f"{expected:g} within {most:g}", got)

    def at_least(self, name: str, least: float, got: float | None) -> bool:
        return self.add(name, got is not None and got >= least, f"at least {least:g}", got)

    def one_of(self, name: str, expected: Iterable[object], got: object) -> bool:
        allowed = list(expected)
        return self.add(name, got in allowed, f"one of {allowed}", got)

    def no_problems(self, name: str, expected: str, problems: Sequence[str]) -> bool:
        """Passes where the list of problems is empty; else the first of them are shown."""
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        return self.add(name, not problems, expected, shown or "the same")

    def measured(self, name: str, value: object) -> None:
        """Notes a figure; a part with figures alone passes."""
        self._write(Check(name, State.MEASURED, got=_text(value)))

    def skip(self, name: str, why: str) -> None:
        self._write(Check(name, State.SKIPPED, why=_text(why)))

    def _write(self, check: Check) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(check)) + "\n")


def read_checks(file: Path) -> list[Check]:
    """Returns the checks of a file, without a last line that its writer was killed in."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [Check(**{**fields, "state": State(fields["state"])}) for fields in map(json.loads, lines)]


def outcome(part: Part, checks: list[Check], seconds: float, *, ended: State, why: str = "") -> Outcome:
    """Returns what came of a part whose process ended as ``ended``, with ``why``, and left ``checks``.

    A failed check fails the part, also one that ran out of time. A part all of whose checks were skipped is skipped,
    and a part that ended well and checked nothing has failed.
    """
    states = {check.state for check in checks}
    failed = sum(check.state is State.FAILED for check in checks)
    state = ended
    if ended is State.PASSED and failed:
        state, why = State.FAILED, f"{failed} of {len(checks)} checks failed"
    elif ended is State.PASSED and not checks:
        state, why = State.FAILED, "it checked nothing"
    elif ended is State.PASSED and states == {State.SKIPPED}:
        state, why = State.SKIPPED, checks[0].why
    elif ended is State.SKIPPED and failed:
        state = State.FAILED
    return Outcome(part.name, part.title, state, round(seconds, 1), _text(why), checks)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
