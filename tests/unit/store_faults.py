"""Runs a store in which each change of a file fails in each way: all acknowledged rows must survive.

``ways(trace)`` are all faults of a life of which ``trace`` are the changes; ``check(fault)`` lives it again with that
fault, and then starts again. tests/soak/faults.py does all of them.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import store_support as support

from probing.api.errors import StoreError
from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits

ROOT = Path("/state")
LIMITS = StoreLimits(part_bytes=2048, keep_free_bytes=0, max_age_s=1e9)
DAY_NS = 86_400_000_000_000
# Bytes of a write that reach the file: none, some of a record's frame or a header, some of its body, all but one.
TORN = (0, 5, 40, -1)
POWER_CUTS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """``how`` the change number ``step`` (from 1) fails; ``path`` is for messages only."""

    step: int
    how: str
    operation: str = ""
    path: str = ""

    @property
    def dies(self) -> bool:
        return not self.how.startswith("error")


def open_store(files: support.MemoryFiles, clock: FakeClock) -> Store:
    return Store.open(
        ROOT,
        node="n1",
        clock=clock,
        limits=LIMITS,
        files=files,
        tables=support.TABLES,
        background=False,
    )


def ids(store: Store) -> list[int]:
    return sorted(i for name in support.TABLES for i in store.rows(name, ["id"]).column("id").to_pylist())


@dataclass
class Life:
    """``acknowledged``: ids of appends that returned. ``asked``: ids of the append in progress. ``synced``: ids that
    survive a power cut."""

    files: support.MemoryFiles
    acknowledged: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)
    dropped: int = 0

    def live(self) -> None:
        """Runs two days of a store that is opened twice. Failed calls are tried again, as in the daemon."""
        clock = support.clock()
        for first in (1, 101):
            store = _again(lambda: open_store(self.files, clock))
            snapshot = None
            for number in range(4):
                self._append(store, clock, list(range(first + 10 * number, first + 10 * number + 10)))
                if number % 2 == 0:
                    self._sync(store)
                if number == 1:
                    snapshot = store.snapshot()
                    _again(lambda store=store: store.seal(now=True))
                if number == 2 and snapshot is not None:
                    store.release(snapshot["generation"])
            _again(lambda store=store: store.seal(now=True))
            # Merging is done a little at a time; of a day that is over two small ones are enough.
            clock.advance(DAY_NS)
            for _ in range(4):
                _again(store.maintain)
                clock.advance(1_000_000_000)
            self._append(store, clock, [first + 50])
            self.dropped += store.status()["dropped_rows"]
            store.close()

    def _append(self, store: Store, clock: FakeClock, new: list[int]) -> None:
        ns = clock.real_ns
        batches = {"t.small": [support.rows(new, ns)]}
        if len(new) > 3:
            batches = {"t.small": [support.rows(new[:-3], ns)], "t.other": [support.rows(new[-3:], ns, support.OTHER)]}
        self.asked = new
        _again(lambda: store.append(batches, support.position(new[-1])))
        self.acknowledged, self.asked = self.acknowledged + new, []

    def _sync(self, store: Store) -> None:
        before = list(self.acknowledged)
        _again(store.sync)
        self.synced = before


def _again(do: Callable[[], T]) -> T:
    for _ in range(2):
        with contextlib.suppress(StoreError):
            return do()
    return do()


def trace() -> list[tuple[str, Path]]:
    """Returns the changes of a run without failures."""
    files = support.MemoryFiles()
    found: list[tuple[str, Path]] = []
    files.fault = lambda n, operation, path: found.append((operation, path))
    life = Life(files)
    life.live()
    assert life.dropped == 0
    return found


def ways(changes: list[tuple[str, Path]]) -> Iterator[Fault]:
    for step, (operation, path) in enumerate(changes, 1):
        kinds = ["before", "after", "manifest before", "manifest after", "error EIO", "error ENOSPC"]
        kinds += [f"power {when} {seed}" for when in ("before", "after") for seed in range(POWER_CUTS)]
        if operation == "write":
            kinds += [f"{what} {kept}" for what in ("torn", "error torn") for kept in TORN] + ["error whole"]
        for kind in kinds:
            yield Fault(step, kind, operation, str(path))


def check(fault: Fault) -> None:
    """Raises AssertionError when an acknowledged row is lost or a row is doubled."""
    files = support.MemoryFiles()
    files.fault = lambda n, operation, path: _happens(fault) if n == fault.step else None
    life = Life(files)
    died = True
    with contextlib.suppress(support.Crash):
        life.live()
        died = False
    assert died == fault.dies, fault
    if fault.how.startswith("power"):
        _check_start(fault, life, files.after_power_cut(random.Random(f"{fault.step} {fault.how}")), life.synced)
        return
    left = files.after_kill()
    if fault.how.startswith("manifest"):
        # Two misfortunes at once: who is killed finds no manifest.
        left.names.pop(ROOT / "manifest", None)
    _check_start(fault, life, left, life.acknowledged)
    if not died:
        _check_start(fault, life, files.after_power_cut(random.Random(fault.step)), life.synced)


def _happens(fault: Fault) -> str | support.Torn | None:
    what, *words = fault.how.split()
    if what == "error":
        if words[0] == "torn":
            return support.Torn(int(words[1]), support.io_error())
        if words[0] == "whole":
            return "whole"
        raise support.io_error(getattr(errno, words[0]))
    if what == "torn":
        return support.Torn(int(words[0]), support.Crash())
    if what == "after" or words[:1] == ["after"]:
        return "after"
    raise support.Crash


def _check_start(fault: Fault, life: Life, files: support.MemoryFiles, must_have: list[int]) -> None:
    clock = support.clock()
    clock.advance(3 * DAY_NS)
    if fault.how.startswith("power"):
        clock.boot_id = "another boot"
    store = open_store(files, clock)
    found = ids(store)
    assert len(set(found)) == len(found), fault
    assert set(found) <= {*life.acknowledged, *life.asked}, fault
    missing = set(must_have) - set(found)
    assert len(missing) <= life.dropped, fault
    assert not set(life.asked) & set(found) or set(life.asked) <= set(found), fault
    last = int(store.positions.get("ring", {}).get("position", 0))
    # Positions of what is sealed are in the manifest alone; without it the ring itself knows where it was read to.
    assert last == max(found, default=0) or missing or (fault.how.startswith("manifest") and last == 0), fault
    if not fault.how.startswith(("power", "manifest")) and must_have is life.acknowledged:
        assert store.recovery_losses == (), (fault, store.recovery_losses)
    # It goes on as if nothing had been, and the next start finds nothing amiss.
    store.append({"t.small": [support.rows([1000])]}, support.position(1000))
    store.seal(now=True)
    store.close()
    store = open_store(files.after_kill(), clock)
    assert store.recovery_losses == (), (fault, store.recovery_losses)
    assert ids(store) == sorted([*found, 1000]), fault
    store.close()
