"""A stricter limit deletes nothing for a while: what waits, what takes it back, and what restarts and clocks change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import store_support as support

from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits, TableLimits

ROOT = Path("/state")
DAY_S = 86_400
GRACE_S = 600.0
WIDE = StoreLimits(keep_free_bytes=0, max_age_s=30 * DAY_S, grace_s=GRACE_S, part_bytes=4096)
ONE_DAY = replace(WIDE, max_age_s=1.5 * DAY_S)
TWO_DAYS = replace(WIDE, max_age_s=2.5 * DAY_S)
# Ids of rows of the last three days and of today, and those within each limit.
ALL = [1, 11, 21, 31]
OF_TWO_DAYS, OF_ONE_DAY = ALL[1:], ALL[2:]


class Scene:
    """A store with one segment for each of four days."""

    def __init__(self, limits: StoreLimits = WIDE) -> None:
        self.files = support.MemoryFiles()
        self.clock = support.clock()
        self.store = self.open(limits)
        for day, first in enumerate(ALL):
            ts = support.START_NS - int((3 - day) * DAY_S * 1e9)
            self.store.append({"t.small": [support.rows([first], ts)]}, support.position(first))
            self.store.seal(now=True)

    def open(self, limits: StoreLimits) -> Store:
        return Store.open(
            ROOT,
            node="n1",
            clock=self.clock,
            limits=limits,
            files=self.files,
            tables=support.TABLES,
            background=False,
        )

    def restart(self, limits: StoreLimits) -> None:
        self.store.close()
        self.store = self.open(limits)

    def after(self, seconds: float) -> list[int]:
        """Returns the ids of the rows that are left so much later."""
        self.clock.advance(int(seconds * 1e9))
        self.store.maintain()
        return sorted(self.store.rows("t.small", ["id"]).column("id").to_pylist())


STRICTER = {
    "age": ONE_DAY,
    "free space": replace(WIDE, keep_free_bytes=1 << 50),
    "age of a table": replace(WIDE, tables={"t.small": TableLimits(max_age_s=1.5 * DAY_S)}),
    "bytes of a table": replace(WIDE, tables={"t.small": TableLimits(max_bytes=1)}),
    "bytes": replace(WIDE, max_bytes=1),
}


@pytest.mark.parametrize("limits", STRICTER.values(), ids=STRICTER)
def test_a_stricter_limit_deletes_after_the_grace_and_not_before(limits: StoreLimits) -> None:
    scene = Scene()
    would = scene.store.deletion(limits)
    scene.store.set_limits(limits)
    assert scene.after(0) == scene.after(GRACE_S - 1) == ALL
    (waiting,) = scene.store.waiting().values()
    assert waiting[:3] == would[:3]
    assert waiting.segments >= 2
    assert 0 < waiting.left_s <= 1
    left = scene.after(1)
    # What was announced is what went.
    assert len(ALL) - len(left) == waiting.segments == waiting.rows
    assert scene.store.waiting() == {}


@pytest.mark.parametrize("limits", STRICTER.values(), ids=STRICTER)
def test_a_limit_that_is_set_back_in_time_deletes_nothing(limits: StoreLimits) -> None:
    scene = Scene()
    scene.store.set_limits(limits)
    assert scene.after(GRACE_S - 1) == ALL
    scene.store.set_limits(WIDE)
    assert scene.store.waiting() == {}
    assert scene.after(10 * GRACE_S) == ALL


def test_what_waits_is_in_force_only_for_what_waits() -> None:
    """Limits that hold go on deleting while others wait."""
    scene = Scene(TWO_DAYS)
    scene.store.set_limits(replace(TWO_DAYS, tables={"t.small": TableLimits(max_bytes=1)}))
    assert scene.after(1) == OF_TWO_DAYS


def test_a_limit_that_is_stricter_again_waits_anew_and_a_looser_one_does_not() -> None:
    scene = Scene()
    scene.store.set_limits(ONE_DAY)
    assert scene.after(GRACE_S - 100) == ALL
    scene.store.set_limits(TWO_DAYS)
    # Rows of two days were announced from here on: those of one day were, too.
    assert scene.after(100) == OF_TWO_DAYS
    scene.store.set_limits(ONE_DAY)
    assert scene.after(GRACE_S - 1) == OF_TWO_DAYS
    assert scene.after(1) == OF_ONE_DAY


def test_a_change_in_small_steps_does_not_hurry() -> None:
    scene = Scene()
    for days in (20, 10, 5, 2.5):
        scene.store.set_limits(replace(WIDE, max_age_s=days * DAY_S))
        assert scene.after(GRACE_S - 1) == ALL
    assert scene.after(1) == OF_TWO_DAYS


@pytest.mark.parametrize("limits", STRICTER.values(), ids=STRICTER)
def test_a_restart_neither_forgets_the_grace_nor_ends_it(limits: StoreLimits) -> None:
    scene = Scene()
    scene.store.set_limits(limits)
    assert scene.after(GRACE_S - 1) == ALL
    scene.restart(limits)
    assert scene.after(0) == ALL
    assert len(scene.store.waiting()) == 1
    # It is written each minute: so much may be waited for again.
    assert scene.after(61) != ALL


def test_a_limit_that_is_stricter_from_the_start_waits_as_well() -> None:
    """As the configuration file may have it."""
    scene = Scene()
    scene.store.maintain()
    scene.restart(ONE_DAY)
    assert scene.after(GRACE_S - 1) == ALL
    scene.restart(WIDE)
    assert scene.after(2 * GRACE_S) == ALL


def test_after_a_kill_it_waits_on() -> None:
    scene = Scene()
    scene.store.set_limits(ONE_DAY)
    assert scene.after(1) == ALL
    scene.files = scene.files.after_kill()
    scene.store = scene.open(ONE_DAY)
    assert scene.after(GRACE_S - 2) == ALL
    assert scene.after(2) == OF_ONE_DAY


@pytest.mark.parametrize("step_s", [400 * DAY_S, -400 * DAY_S, 3600])
def test_a_step_of_the_wall_clock_does_not_shorten_it(step_s: int) -> None:
    scene = Scene()
    scene.store.set_limits(ONE_DAY)
    scene.clock.advance(1_000_000_000, wall_step_ns=step_s * 1_000_000_000)
    assert scene.after(GRACE_S - 2) == ALL
    assert scene.store.waiting()["store.max_age_days"].left_s == pytest.approx(1)


def test_a_fresh_boot_counts_from_where_it_was() -> None:
    scene = Scene()
    scene.store.set_limits(ONE_DAY)
    assert scene.after(GRACE_S - 1) == ALL
    scene.store.close()
    scene.clock = FakeClock(mono_ns=1_000_000, real_ns=scene.clock.real_ns, boot_id="another")
    scene.store = scene.open(ONE_DAY)
    assert scene.after(0) == ALL
    assert scene.after(61) == OF_ONE_DAY


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"limits": {"x": "y"}, "waiting": {}}', "\0", "[" * 10_000])
def test_a_broken_file_ends_nothing(text: str) -> None:
    scene = Scene()
    scene.store.set_limits(ONE_DAY)
    scene.store.close()
    path = ROOT / "limits.json"
    scene.files.unlink(path)
    fd = scene.files.create(path)
    scene.files.write(fd, text.encode())
    scene.files.close(fd)
    scene.store = scene.open(WIDE)
    assert scene.after(GRACE_S) == ALL


def test_the_file_says_what_waits_and_a_disk_that_fails_is_reported() -> None:
    scene = Scene()
    scene.store.set_limits(ONE_DAY)
    found = json.loads(scene.files.read(ROOT / "limits.json"))
    assert found["waiting"] == {"store.max_age_days": [30 * DAY_S, GRACE_S]}
    assert found["limits"]["store.max_age_days"] == 1.5 * DAY_S

    def fault(_: int, operation: str, path: Path) -> str | None:
        if operation == "create" and path.name.startswith("limits"):
            raise support.io_error()
        return None

    scene.files.fault = fault
    scene.store.set_limits(TWO_DAYS)
    assert "cannot be saved for the next start" in scene.store.status()["reason"]
    assert scene.after(GRACE_S - 1) == ALL
    scene.files.fault = None
    scene.store.set_limits(WIDE)
    assert scene.store.status()["state"] == "running"


def test_without_a_grace_it_is_as_before() -> None:
    scene = Scene(replace(WIDE, grace_s=0))
    scene.store.set_limits(replace(ONE_DAY, grace_s=0))
    assert scene.after(0) == OF_ONE_DAY
    assert not [path for path in scene.files.listdir(ROOT) if path.startswith("limits")]
