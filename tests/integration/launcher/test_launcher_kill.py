"""A launcher that is killed anywhere and started again: no rank starts twice, none is lost, none is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from launcher_helpers import LauncherProcess, Owner, living
from long import long_unless
from waiting import until

SLEEP = ("sleep", "1009")
RANKS = 2
# A launcher that starts and stops two ranks passes about so many points; at later ones it is not killed.
POINTS = 131
IN_GATE = frozenset(random.Random(23).sample(range(1, POINTS), 23))


def starts(directory: Path, name: str) -> Counter[tuple[str, str]]:
    """Returns how often each generation and rank ran its command, by the first lines of its log."""
    found: Counter[tuple[str, str]] = Counter()
    for path in (directory / "state" / "logs" / name).glob("*.log"):
        found.update(re.findall(r"^=== .* generation (\d+), rank (\d+) ===$", path.read_text(), re.M))
    return found


def checked(directory: Path, name: str, launcher: LauncherProcess) -> list[dict]:
    """Returns the report, after it was compared with what an observer sees."""
    rows: list[dict] = []

    def agree() -> bool:
        rows[:] = launcher.rows()
        alive = [row for row in rows if row["state"] in ("starting", "running", "ending")]
        return {row["pid"]: (row["generation"], row["rank"]) for row in alive} == living(name)

    until(agree, what=lambda: f"a report like {living(name)}: {rows}")
    assert set(starts(directory, name).values()) <= {1}
    assert max(Counter(rank for _, rank in living(name).values()).values(), default=1) == 1
    return rows


@pytest.mark.parametrize("point", [long_unless(point in IN_GATE, point) for point in range(1, POINTS)])
def test_a_launcher_killed_at_any_point(directory: Path, name: str, point: int) -> None:
    owner = Owner(directory, name, *SLEEP, number=RANKS, grace_s=30.0)
    launcher = LauncherProcess(directory, RANKS, die_at=point)
    with suppress(EOFError):
        launcher.ready()
        launcher.start(owner)
        launcher.stop(owner)
    launcher.kill()
    with LauncherProcess(directory, RANKS) as launcher:
        if owner.group.order is None:
            owner.order("start")
        if owner.group.phase == "ending":
            owner.run()
        assert launcher.apply(owner.group) == ""
        if owner.group.phase == "running":
            rows = launcher.until(lambda rows: all(row["state"] in ("running", "ended") for row in rows))
            rows = checked(directory, name, launcher)
            assert len(rows) == RANKS
            for row in rows:
                assert row["generation"] == 1
                assert row["state"] == "running" or row["reason"]
            launcher.stop(owner)
        else:
            launcher.until(lambda rows: all(row["clear"] for row in rows))
        assert living(name) == {}
        launcher.start(owner)
        checked(directory, name, launcher)
        launcher.stop(owner)
        assert living(name) == {}
    assert set(starts(directory, name).values()) == {1}


class Schedule:
    """A random order of what may happen to a launcher and its group."""

    def __init__(self, directory: Path, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory, self.name = directory, name
        self.owner = Owner(directory, name, *SLEEP, number=RANKS, max_restarts=100)
        self.launcher = LauncherProcess(directory, RANKS).ready()
        self.launcher.start(self.owner)
        self.old = self.owner.group

    def step(self) -> None:
        whats = (self.generation, self.stop, self.end_rank, self.kill, self.kill, self.reexec, self.replay)
        what = self.random.choice(whats)
        with suppress(EOFError):
            what()
        # A launcher may be killed at any time of what it was told to do.
        if self.random.random() < 0.3:
            self.kill()
        checked(self.directory, self.name, self.launcher)

    def generation(self) -> None:
        owner = self.owner
        if owner.group.phase == "running" and self.random.random() < 0.5:
            self.launcher.apply(owner.restart())
        else:
            self.launcher.apply(owner.order("restart"))
        if self.random.random() < 0.3:
            self.kill()
        self.launcher.until(lambda rows: all(row["clear"] for row in rows))
        self.launcher.apply(owner.run())
        if self.random.random() < 0.5:
            self.launcher.until(lambda rows: all(row["state"] in ("running", "ended") for row in rows))

    def stop(self) -> None:
        self.launcher.apply(self.owner.order("stop"))

    def end_rank(self) -> None:
        if pids := sorted(living(self.name)):
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)

    def kill(self) -> None:
        self.launcher.kill()
        self.launcher = LauncherProcess(self.directory, RANKS).ready()
        assert self.launcher.problem == ""
        assert self.launcher.apply(self.owner.group) == ""

    def reexec(self) -> None:
        pid = self.launcher.process.pid
        self.launcher.reexec()
        assert self.launcher.process.pid == pid
        assert self.launcher.apply(self.owner.group) == ""

    def replay(self) -> None:
        old, self.old = self.old, self.owner.group
        if old.generation < self.owner.group.generation:
            assert self.launcher.apply(old).startswith("an older record")


@pytest.mark.parametrize("seed", [long_unless(seed < 23, seed) for seed in range(113)])
def test_random_schedules(directory: Path, name: str, seed: int) -> None:
    schedule = Schedule(directory, name, seed)
    try:
        for _ in range(7):
            schedule.step()
        schedule.launcher.stop(schedule.owner)
        assert living(name) == {}
    finally:
        schedule.launcher.kill()
