"""Limits of the store as settings: what is refused, and that a change holds in a store that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import store_support as support

from probing.api.errors import ConfigError, UsageError
from probing.daemon.collector.control import MAX_DAMAGED, Requests
from probing.daemon.collector.live_settings import Changes
from probing.daemon.collector.settings import limits_of
from probing.daemon.config import Config, StoreConfig
from probing.daemon.store import Store, StoreLimits, TableLimits
from probing.daemon.store.needs import Need, Range

DAY_S = 86_400.0


def made(folder: Path, times: list[int]) -> Changes:
    return Changes(Config(), folder / "changes.json", lambda: times[0])


AT_ONCE = Config(store=StoreConfig(grace_s=0.0))


def limits(**options: Any) -> StoreLimits:
    config = Config(store=StoreConfig(**options))
    return limits_of(config, lambda key: getattr(config.store, key.removeprefix("store.")))


def test_tables_have_limits_of_their_own() -> None:
    found = limits(
        table_max_bytes=("python.samples=2000000000", "user.mine=5e6"),
        table_max_age_days=("python.samples=1.5", "comm.ops=0.05"),
        segment_bytes=1 << 20,
    )
    assert found.tables == {
        "python.samples": TableLimits(2_000_000_000, 1.5 * DAY_S),
        "user.mine": TableLimits(max_bytes=5_000_000),
        "comm.ops": TableLimits(max_age_s=0.05 * DAY_S),
    }
    assert (found.segment_bytes, found.max_age_s) == (1 << 20, 7 * DAY_S)


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("python.sample=1", "did you mean python.samples?"),
        ("nothing=1", "comm.ops"),
        ("python.samples", "python.samples=1.5"),
        ("python.samples=", "TABLE=NUMBER"),
        ("python.samples=many", "TABLE=NUMBER"),
        ("python.samples=-1", "TABLE=NUMBER"),
        ("python.samples=0", "at least 0.05"),
        ("python.samples=0.0499", "at least 0.05"),
        ("python.samples=nan", "TABLE=NUMBER"),
        ("python.samples=1e300", "TABLE=NUMBER"),
        ("process.processes=1", "gpu.processes"),
        ("user.No=1", "comm.ops"),
        ("=1", "comm.ops"),
        ("x" * 10_000, "comm.ops"),
    ],
)
def test_an_entry_that_is_wrong_is_named(tmp_path: Path, entry: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        limits(table_max_age_days=(entry,))
    assert entry[:80] in caught.value.message
    assert "store.table_max_age_days" in caught.value.message
    assert hint in caught.value.hint
    assert len(caught.value.message) < 400
    changes = made(tmp_path, [1])
    with pytest.raises(ConfigError):
        changes.change("store.table_max_age_days", f"comm.ops=1,{entry}", persist=True)
    assert changes.value("store.table_max_age_days") == ()


def test_a_table_is_named_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        limits(table_max_bytes=("comm.ops=2000000", "comm.ops=3000000"))


def opened(folder: Path, changes: Changes) -> Store:
    store = Store.open(
        folder,
        node="n1",
        clock=support.clock(),
        limits=limits_of(AT_ONCE, changes.value),
        files=None,
        tables=support.TABLES,
        background=False,
    )
    changes.listeners.append(lambda: store.set_limits(limits_of(AT_ONCE, changes.value)))
    return store


def fill(store: Store, count: int = 4) -> None:
    for n in range(count):
        ts = support.START_NS - int((count - n) * DAY_S * 1e9)
        store.append({"t.small": [support.rows([n], ts)]}, {})
        store.seal(now=True)


def ids(store: Store) -> list[int]:
    return sorted(store.rows("t.small", ["id"]).column("id").to_pylist())


def test_a_change_holds_at_the_next_turn_and_ends(tmp_path: Path) -> None:
    # GIVEN rows of the last four days
    times = [1_000]
    changes = made(tmp_path, times)
    with opened(tmp_path / "state", changes) as store:
        fill(store)
        store.maintain()
        assert ids(store) == [0, 1, 2, 3]
        # WHEN all tables, and then this one, are to be kept for less long for a while
        changes.change("store.max_age_days", "3.5", for_ms=5)
        store.maintain()
        assert ids(store) == [1, 2, 3]
        times[0] += 5_000_000
        changes.tick()
        fill(store)
        store.maintain()
        # THEN what was said before holds again
        assert ids(store) == [0, 1, 1, 2, 2, 3, 3]
        with pytest.raises(UsageError):
            changes.change("store.max_age_days", "1", job="4711")
        changes.change("store.max_age_days", "1.5", persist=True)
        store.maintain()
        assert ids(store) == [3, 3]
        changes.reset("store.max_age_days")
        assert changes.value("store.max_age_days") == 7.0
    assert limits_of(Config(), made(tmp_path, times).value).max_age_s == 7 * DAY_S


def test_what_was_changed_for_good_holds_from_the_start(tmp_path: Path) -> None:
    made(tmp_path, [1]).change("store.table_max_age_days", "comm.ops=2,user.mine=3", persist=True)
    found = limits_of(Config(), made(tmp_path, [1]).value)
    assert found.tables == {"comm.ops": TableLimits(None, 2 * DAY_S), "user.mine": TableLimits(None, 3 * DAY_S)}


def requests(store: Store) -> Requests:
    nobody = cast(Any, None)
    return Requests(store, nobody, nobody, {}, str, dict, lambda paused: paused)


def test_what_a_reader_calls_damaged_is_looked_at(tmp_path: Path) -> None:
    changes = made(tmp_path, [1])
    with opened(tmp_path / "state", changes) as store:
        fill(store)
        paths = [s["path"] for s in store.snapshot()["tables"]["t.small"]]
        Path(paths[1]).write_bytes(Path(paths[1]).read_bytes()[:-1] + b"?")
        damaged = requests(store).handlers()["damaged"]
        # What is good, is none of ours, or comes behind too many others stays.
        (tmp_path / "state" / "other").write_text("mine")
        foreign = [str(tmp_path / "state" / "other"), "/etc/passwd", "../../etc/passwd", "x\0y", "", paths[0]]
        for asked in (foreign, [*("?" * (n + 1) for n in range(MAX_DAMAGED)), paths[1]], []):
            assert json.loads(damaged({"paths": asked})[1]) == {"set_aside": []}
        assert (store.status()["segments"], store.take_losses()) == (4, [])
        assert (tmp_path / "state" / "other").read_text() == "mine"


def test_what_is_damaged_is_set_aside_with_its_loss(tmp_path: Path) -> None:
    with opened(tmp_path / "state", made(tmp_path, [1])) as store:
        fill(store)
        path = store.snapshot()["tables"]["t.small"][1]["path"]
        Path(path).write_bytes(b"nothing")
        answer = requests(store).handlers()["damaged"]({"paths": [path, path]})
        assert json.loads(answer[1]) == {"set_aside": [path]}
        losses = store.take_losses()
        assert [(loss.table, loss.count) for loss in losses] == [("t.small", 1)]
        assert "a query could not read it" in losses[0].reason
        assert ids(store) == [0, 2, 3]
        assert not Path(path).exists()


def test_a_snapshot_has_the_segments_that_are_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path / "state", made(tmp_path, [1])) as store:
        fill(store)
        found = store.snapshot()["tables"]
        first = min(s["ts_min"] for s in found["t.small"])
        snapshot = requests(store).handlers()["snapshot"]

        def asked(**request: object) -> dict[str, int]:
            _, payload = snapshot(dict(request))
            return {name: len(files) for name, files in json.loads(payload)["snapshot"]["tables"].items()}

        assert asked() == {name: len(files) for name, files in found.items()}
        assert asked(tables=["t.small"]) == {"t.small": len(found["t.small"])}
        inside = [s for s in found["t.small"] if s["ts_min"] <= first]
        assert asked(tables=["t.small"], needs={"t.small": Need(Range(high=first)).packed()}) == {
            "t.small": len(inside)
        }
        assert asked(tables=["t.small"], needs={"t.small": Need(Range(high=first - 1)).packed()}) == {}
        last = max(s["ts_max"] for s in found["t.small"])
        assert asked(tables=["t.small"], needs={"t.small": Need(Range(low=last + 1)).packed()}) == {}
        # What jobs a segment has is not known where it says none.
        everything = asked(tables=["t.small"], needs={"t.small": Need(jobs=frozenset(["nobody"])).packed()})
        assert everything == {"t.small": sum(s["jobs"] is None for s in found["t.small"])}
