"""A setting that would delete rows: refused with their number, confirmed, announced, and taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import store_support as support

from probing.api.errors import ConfigError, ProbingError, UsageError
from probing.daemon.collector.control import Requests
from probing.daemon.collector.live_settings import Changes
from probing.daemon.collector.settings import limits_of
from probing.daemon.config import Config, StoreConfig
from probing.daemon.store import Store

DAY_NS = 86_400_000_000_000
CONFIG = Config(store=StoreConfig(keep_free_bytes=0))
ALL = [0, 1, 2, 3]


class Scene:
    """A collector's store and settings, as they lie behind its control socket. A row a day."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = support.clock()
        self.start()
        for n in ALL:
            self.store.append({"t.small": [support.rows([n], support.START_NS - (3 - n) * DAY_NS)]}, {})
            self.store.seal(now=True)

    def start(self) -> None:
        self.changes = changes = Changes(CONFIG, self.folder / "changes.json", lambda: self.clock.pair().real_ns)
        self.store = store = Store.open(
            self.folder / "state",
            node="n1",
            clock=self.clock,
            limits=limits_of(CONFIG, changes.value),
            tables=support.TABLES,
            background=False,
        )
        changes.listeners.append(lambda: store.set_limits(limits_of(CONFIG, changes.value)))
        changes.deletes = lambda value: store.deletion(limits_of(CONFIG, value))
        changes.waiting = store.waiting
        nobody = cast(Any, None)
        self.config = Requests(store, nobody, changes, {}, str, dict, lambda paused: paused).handlers()["config"]

    def ask(self, **request: object) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.config({"job": "", "pid": 0, **request})[1]))

    def refused(self, **request: object) -> ProbingError:
        with pytest.raises(ProbingError) as caught:
            self.ask(**request)
        return caught.value

    def after(self, seconds: float) -> list[int]:
        self.clock.advance(int(seconds * 1e9))
        self.changes.tick()
        self.store.maintain()
        return sorted(self.store.rows("t.small", ["id"]).column("id").to_pylist())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# Each way to a limit that keeps fewer rows.
WAYS: dict[str, dict[str, object]] = {
    "age": {"key": "store.max_age_days", "value": "0.05"},
    "age for a while": {"key": "store.max_age_days", "value": "0.05", "for_ms": 10_000_000},
    "free space": {"key": "store.keep_free_bytes", "value": str(1 << 60)},
    "age kept over restarts": {"key": "store.max_age_days", "value": "1.5", "persist": True},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_without_confirmation_nothing_changes(scene: Scene, way: dict[str, object]) -> None:
    error = scene.refused(**way)
    assert isinstance(error, UsageError)
    assert f"{way['key']} = {way['value']} would delete " in error.message
    assert " rows (" in error.message
    assert "--yes" in error.hint
    assert "600 s later" in error.hint
    assert scene.ask(key=way["key"])["settings"][0]["value"] != way["value"]
    assert scene.after(10_000) == ALL


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_confirmed_it_is_announced_and_can_be_taken_back(scene: Scene, way: dict[str, object]) -> None:
    key = way["key"]
    (setting,) = scene.ask(**way, yes=True)["settings"]
    assert setting["deletes"]["rows"] >= 2
    assert setting["deletes"]["begins_ns"] == scene.clock.real_ns + 600_000_000_000
    assert scene.after(599) == ALL
    (back,) = scene.ask(key=key, reset=True)["settings"]
    assert "deletes" not in back
    assert scene.after(10_000) == ALL


def test_it_goes_after_the_grace_also_over_a_restart(scene: Scene) -> None:
    scene.ask(**WAYS["age kept over restarts"], yes=True)
    assert scene.after(590) == ALL
    scene.store.close()
    scene.start()
    assert scene.ask(key="store.max_age_days")["settings"][0]["deletes"]["rows"] == 2
    assert scene.after(61) == [2, 3]
    assert "deletes" not in scene.ask(key="store.max_age_days")["settings"][0]


def test_what_a_restart_forgets_deletes_nothing(scene: Scene) -> None:
    scene.ask(**WAYS["age"], yes=True)
    assert scene.after(590) == ALL
    scene.store.close()
    scene.start()
    assert scene.after(10_000) == ALL


def test_a_proposal_says_the_same_and_changes_nothing(scene: Scene) -> None:
    answer = scene.ask(key="store.max_age_days", propose_value="1.5")
    assert (answer["effect"]["segments"], answer["effect"]["rows"]) == (2, 2)
    assert answer["effect"]["bytes"] > 0
    assert answer["settings"][0]["value"] == "7.0"
    assert scene.ask(key="store.max_age_days", propose_value="30")["effect"]["rows"] == 0
    assert scene.ask(key="sampling.hz", propose_value="5")["effect"]["rows"] == 0
    for wrong in ({"propose_value": "0"}, {"propose_value": "nan"}, {"key": "store.part_bytes", "propose_value": "1"}):
        assert isinstance(scene.refused(**{"key": "store.max_age_days", **wrong}), (ConfigError, UsageError))
    assert scene.after(10_000) == ALL


def test_a_reset_that_deletes_is_refused_as_well(scene: Scene) -> None:
    scene.ask(key="store.max_age_days", value="30")
    old = support.rows([9], support.START_NS - 20 * DAY_NS)
    scene.store.append({"t.small": [old]}, {})
    scene.store.seal(now=True)
    assert scene.ask(key="store.max_age_days", propose_reset=True)["effect"]["rows"] == 1
    assert "would delete 1 row (" in scene.refused(key="store.max_age_days", reset=True).message
    assert scene.after(0) == [*ALL, 9]
    scene.ask(key="store.max_age_days", reset=True, yes=True)
    assert scene.after(599) == [*ALL, 9]
    assert scene.after(1) == ALL


def test_the_end_of_a_looser_limit_waits_as_well(scene: Scene) -> None:
    scene.ask(key="store.max_age_days", value="30", for_ms=5_000)
    scene.store.append({"t.small": [support.rows([9], support.START_NS - 20 * DAY_NS)]}, {})
    scene.store.seal(now=True)
    assert scene.after(10) == [*ALL, 9]
    assert scene.ask(key="store.max_age_days")["settings"][0]["deletes"]["rows"] == 1
    assert scene.after(590) == [*ALL, 9]
    assert scene.after(10) == ALL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store.max_age_days", "0"),
        ("store.max_age_days", "-1"),
        ("store.max_age_days", "1e-300"),
        ("store.max_bytes", "1"),
        ("store.table_max_age_days", "comm.ops=0"),
        ("store.table_max_bytes", "diagnosis.findings=0"),
        ("store.table_max_bytes", "diagnosis.findings=1048575"),
    ],
)
def test_lower_bounds_hold_also_with_confirmation(scene: Scene, key: str, value: str) -> None:
    error = scene.refused(key=key, value=value, yes=True)
    assert isinstance(error, ConfigError)
    assert "at least" in error.hint
    assert scene.after(10_000) == ALL


def test_what_only_collects_asks_for_nothing(scene: Scene) -> None:
    scene.ask(key="sampling.hz", value="5")
    scene.ask(key="store.max_age_days", value="30")
    assert scene.after(10_000) == ALL
