"""What ``probingd verify`` finds in a state directory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from probing.daemon.store.format import FORMAT_VERSION

__all__ = ("Findings", "Problem")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the file ``path`` in the state directory, and what a start does ``then``.

    ``wrong`` is False for what a crash leaves behind and a start tidies up, and for files that are not ours.
    """

    path: str
    what: str
    then: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; a start {self.then}"


@dataclass(slots=True)
class Findings:
    """``daemon_pid`` is the daemon that has the directory locked, or "". Rows are counted in manifest and log."""

    state_dir: str
    format_version: int = FORMAT_VERSION
    daemon_pid: str = ""
    segments: int = 0
    rows: int = 0
    bytes: int = 0
    log_parts: int = 0
    log_rows: int = 0
    set_aside: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return any(problem.wrong for problem in self.problems)

    @property
    def summary(self) -> str:
        """One line for people."""
        count = sum(problem.wrong for problem in self.problems)
        verdict = f"{count} things are wrong" if count > 1 else "one thing is wrong" if count else "nothing is wrong"
        used = f", while probingd (pid {self.daemon_pid}) uses it" if self.daemon_pid else ""
        aside = f", {self.set_aside} files set aside earlier" if self.set_aside else ""
        return (
            f"{self.state_dir}: {verdict}; format {self.format_version}, {self.segments} segments with {self.rows} rows"
            f" in {self.bytes} bytes, {self.log_parts} log parts with {self.log_rows} rows{aside}{used}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings as JSON has them."""
        return {**asdict(self), "wrong": self.wrong}
