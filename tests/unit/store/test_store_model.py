"""The store against a model: no acknowledged row is lost and none comes twice, whatever fails when."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import store_faults
import store_support as support
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from long import LONG, examples

from probing.api.errors import StoreError
from probing.daemon.store import Store, StoreLimits, StoreSnapshot
from probing.daemon.store.limits import TableLimits
from probing.daemon.store.log.decode import decode_part

ROOT = Path("/state")
DAY_NS = 86_400_000_000_000
LIMITS = StoreLimits(part_bytes=2048, keep_free_bytes=0, max_age_s=86_400)


def open_store(files: support.MemoryFiles, clock: object = None) -> Store:
    return Store.open(
        ROOT,
        node="n1",
        clock=clock or support.clock(),  # type: ignore[arg-type]
        limits=LIMITS,
        files=files,
        tables=support.TABLES,
        background=False,
    )


def ids(store: Store) -> list[int]:
    return [i for name in support.TABLES for i in store.rows(name, ["id"]).column("id").to_pylist()]


def snapshot_ids(files: support.MemoryFiles, snapshot: StoreSnapshot) -> list[int]:
    found = []
    for name, segments in snapshot["tables"].items():
        for segment in segments:
            found += pq.read_table(io.BytesIO(files.read(Path(segment["path"])))).column("id").to_pylist()
        assert name in support.TABLES
    for part in snapshot["parts"]:
        tail = decode_part(files.read(Path(part["path"]), part["length"]), None, support.TABLES)
        assert not tail.problems
        assert {name: t.num_rows for name, t in tail.tables.items()} == part["tables"]
        found += [i for t in tail.tables.values() for i in t.column("id").to_pylist()]
    return found


class StoreModel(RuleBasedStateMachine):
    """``kept``: {id: (record, ts)} of acknowledged rows. ``open_questions``: ids of appends that failed or died since.
    ``synced``: the last record that survives a power cut. ``dropped``: rows that retention dropped."""

    @initialize()
    def start(self) -> None:
        self.files = support.MemoryFiles()
        self.clock = support.clock()
        self.store = open_store(self.files, self.clock)
        self.next_id = 1
        self.records = 0
        self.kept: dict[int, tuple[int, int]] = {}
        self.open_questions: list[list[int]] = []
        self.synced = 0
        self.dropped = 0
        self.no_space = self.taken = False
        self.snapshots: list[tuple[StoreSnapshot, list[int]]] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.files.fault = None
            self.store.close()
            assert not self.files.open

    def _append(self, counts: tuple[int, int]) -> None:
        groups = {}
        new = []
        for name, count in zip(support.TABLES, counts, strict=True):
            fresh = list(range(self.next_id, self.next_id + count))
            self.next_id += count
            new += fresh
            if fresh:
                groups[name] = [support.rows(fresh, self.clock.real_ns)]
        # Whole in the log or not at all, and not known which until the next record or start.
        self.open_questions.append(new)
        self.store.append(groups, support.position(self.records + 1))
        self.records += 1
        self.open_questions = []
        self.kept |= dict.fromkeys(new, (self.records, self.clock.real_ns))

    @rule(counts=st.tuples(st.integers(0, 12), st.integers(0, 3)))
    def append(self, counts: tuple[int, int]) -> None:
        self._append(counts)

    @rule(
        counts=st.tuples(st.integers(1, 12), st.integers(0, 3)),
        at=st.integers(1, 4),
        how=st.sampled_from(["short", "whole", "enospc", "eio", "twice"]),
    )
    def append_fails(self, counts: tuple[int, int], at: int, how: str) -> None:
        self._inject(at, how)
        try:
            self._append(counts)
        except StoreError:
            pass
        finally:
            self.files.fault = None

    @rule()
    def sync(self) -> None:
        self.store.sync()
        self.synced = self.records

    @rule(now=st.booleans())
    def seal(self, now: bool) -> None:
        self.store.seal(now=now)

    @rule(at=st.integers(1, 20), how=st.sampled_from(["short", "whole", "enospc", "eio", "twice"]))
    def seal_fails(self, at: int, how: str) -> None:
        self._inject(at, how)
        try:
            self.store.seal(now=True)
        except StoreError:
            pass
        finally:
            self.files.fault = None

    @rule(turns=st.integers(1, 3))
    def maintain(self, turns: int) -> None:
        """Runs some rounds of retention, sealing and merging."""
        for _ in range(turns):
            self.store.maintain()
            self.clock.advance(1_000_000)

    @rule(at=st.integers(1, 20), how=st.sampled_from(["short", "whole", "enospc", "eio", "twice"]))
    def maintain_fails(self, at: int, how: str) -> None:
        self._inject(at, how)
        try:
            self.store.maintain()
        except StoreError:
            pass
        finally:
            self.files.fault = None

    @rule(at=st.integers(1, 25), after=st.booleans())
    def kill_in_maintenance(self, at: int, after: bool) -> None:
        self._inject(at, "after" if after else "crash")
        with contextlib.suppress(support.Crash):
            self.store.maintain()
        self._restart(self.files.after_kill(), self.records)

    @rule(small=st.booleans(), segment_bytes=st.sampled_from([1 << 13, 1 << 20]))
    def change_limits(self, small: bool, segment_bytes: int) -> None:
        """With ``small`` all segments of t.other are dropped at once; the next start sets the old limits again."""
        tables = {"t.other": TableLimits(max_bytes=1)} if small else {}
        self.taken = self.taken or small
        self.store.set_limits(replace(LIMITS, tables=tables, segment_bytes=segment_bytes))

    @rule(days=st.sampled_from([0.1, 0.6]))
    def age(self, days: float) -> None:
        self.clock.advance(int(days * DAY_NS))
        for snapshot, _ in self.snapshots:
            self.store.release(snapshot["generation"])
        self.snapshots = []
        self.store.maintain()

    @rule()
    def take_snapshot(self) -> None:
        if len(self.snapshots) < 3:
            snapshot = self.store.snapshot()
            self.snapshots.append((snapshot, sorted(snapshot_ids(self.files, snapshot))))

    @precondition(lambda self: self.snapshots)
    @rule()
    def release(self) -> None:
        snapshot, _ = self.snapshots.pop(0)
        self.store.release(snapshot["generation"])

    @rule()
    def kill(self) -> None:
        self._restart(self.files.after_kill(), self.records)

    @rule(at=st.integers(1, 25), after=st.booleans(), seal=st.booleans())
    def kill_in_the_middle(self, at: int, after: bool, seal: bool) -> None:
        self._inject(at, "after" if after else "crash")
        try:
            self._append((5, 1))
            if seal:
                self.store.seal(now=True)
        except support.Crash:
            pass
        self._restart(self.files.after_kill(), self.records)

    @rule(seed=st.integers(0, 1 << 16))
    def power_cut(self, seed: int) -> None:
        self._restart(self.files.after_power_cut(random.Random(seed)), self.synced)

    def _inject(self, at: int, how: str) -> None:
        first = self.files.operations + at
        self.no_space = how == "enospc"

        def fault(n: int, operation: str, path: Path) -> str | None:
            if n == first:
                if how == "crash":
                    raise support.Crash
                if how == "enospc":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if how == "eio":
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return "whole" if how == "twice" else how
            if how == "twice" and n > first and operation == "truncate":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return None

        self.files.fault = fault

    def _restart(self, files: support.MemoryFiles, must_have: int) -> None:
        self.files, self.snapshots = files, []
        self.store = open_store(files, self.clock)
        found = ids(self.store)
        assert len(found) == len(set(found))
        present = set(found)
        whole = [i for question in self.open_questions if question and set(question) <= present for i in question]
        assert present <= set(self.kept) | set(whole)
        assert sum(1 for question in self.open_questions if set(question) & present) <= 1
        missing = [i for i in self.kept if i not in present and not self._aged(i) and not self.taken]
        assert all(self.kept[i][0] > must_have for i in missing)
        last = self.store.positions.get("ring", {}).get("position", 0)
        if whole:
            assert last == self.records + 1
            self.kept |= dict.fromkeys(whole, (last, self.clock.real_ns))
        assert all(self.kept[i][0] <= last for i in present)
        assert must_have <= last
        self.kept = {i: r for i, r in self.kept.items() if i in present}
        self.records, self.open_questions, self.dropped = last, [], 0
        self.synced = last
        self.taken = False

    def _aged(self, i: int) -> bool:
        return self.kept[i][1] < self.clock.real_ns - DAY_NS + 1_000_000

    @invariant()
    def all_rows_once(self) -> None:
        if not hasattr(self, "store"):
            return
        found = ids(self.store)
        assert len(found) == len(set(found))
        assert set(found) <= set(self.kept)
        missing = set(self.kept) - set(found)
        dropped = self.store.status()["dropped_rows"]
        assert len(missing) == dropped - self.dropped
        assert self.no_space or self.taken or all(self._aged(i) for i in missing)
        self.dropped, self.no_space = dropped, False
        self.kept = {i: r for i, r in self.kept.items() if i not in missing}

    @invariant()
    def snapshots_stay(self) -> None:
        for snapshot, rows in getattr(self, "snapshots", []):
            assert sorted(snapshot_ids(self.files, snapshot)) == rows


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


CHANGES = store_faults.trace()


@pytest.mark.parametrize("turn", [0, 2])
def test_no_change_of_a_file_that_goes_wrong_loses_or_doubles_anything(turn: int) -> None:
    """Every second change fails, in the gate every tenth, each in another way.

    tests/soak/faults.py has all changes in all ways.
    """
    ways = list(store_faults.ways(CHANGES))
    assert {fault.operation for fault in ways} == {"create", "write", "fsync", "rename", "fsync_dir", "unlink"}
    for step in range(turn + 1, len(CHANGES) + 1, 4 if LONG else 20):
        faults = [fault for fault in ways if fault.step == step]
        store_faults.check(faults[step * 7 % len(faults)])
