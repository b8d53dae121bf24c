"""Settings that are changed at run time: which of them holds, when it ends, and what outlives the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import ConfigError, ProbingError, StoreError, UsageError
from probing.daemon.collector.live_settings import MAX_CHANGES, SETTINGS, Changes
from probing.daemon.config import Config, checked_text, options, text_of
from probing.daemon.python_stack.values.names import MAX_NAMES
from probing.daemon.source import Identity

WHO = Identity(7, 70, "4711", "r1", "trainer", 0)
OTHER = Identity(8, 80, "4712", "r1", "trainer", 0)


class Times:
    now = 1_000_000_000

    def __call__(self) -> int:
        return self.now


def made(folder: Path, times: Times | None = None) -> Changes:
    return Changes(Config(), folder / "changes.json", times or Times())


def test_the_most_particular_one_holds(tmp_path: Path) -> None:
    changes = made(tmp_path)
    assert changes.value("sampling.hz", WHO) == 19
    changes.change("sampling.hz", "5")
    changes.change("sampling.hz", "7", job="4711")
    assert (changes.value("sampling.hz", WHO), changes.value("sampling.hz", OTHER), changes.value("sampling.hz")) == (
        7,
        5,
        5,
    )
    changes.change("sampling.hz", "99", process=(7, 70))
    assert changes.value("sampling.hz", WHO) == 99
    # The same number with another start is another process.
    assert changes.value("sampling.hz", Identity(7, 71, "4711", "r1", "trainer", 0)) == 7
    changes.reset("sampling.hz", process=(7, 70))
    assert changes.value("sampling.hz", WHO) == 7
    changes.reset("sampling.hz", job="4711")
    changes.reset("sampling.hz")
    changes.reset("sampling.hz")
    assert changes.value("sampling.hz", WHO) == 19


def test_one_ends_by_itself(tmp_path: Path) -> None:
    times = Times()
    changes = made(tmp_path, times)
    told: list[int] = []
    changes.listeners.append(lambda: told.append(times.now))
    changes.change("sampling.off_cpu", "false", for_ms=5)
    assert changes.value("sampling.off_cpu", WHO) is False
    times.now += 4_999_999
    changes.tick()
    assert changes.value("sampling.off_cpu", WHO) is False
    times.now += 1
    assert changes.value("sampling.off_cpu", WHO) is True
    changes.tick()
    changes.tick()
    assert len(told) == 2
    assert [s["value"] for s in changes.to_list("sampling.off_cpu")] == ["true"]


def test_what_outlives_the_daemon(tmp_path: Path) -> None:
    times = Times()
    first = made(tmp_path, times)
    first.change("variables.watch", "loss,step", job="4711", persist=True)
    first.change("sampling.hz", "7", persist=True, for_ms=1)
    first.change("sampling.hz", "5", job="4711")
    second = made(tmp_path, times)
    assert second.value("variables.watch", WHO) == ("loss", "step")
    assert second.value("sampling.hz", WHO) == 7
    times.now += 1_000_000
    second.tick()
    second.reset("variables.watch", job="4711")
    assert made(tmp_path, times).to_list() == made(tmp_path / "none").to_list()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"key": "sampling.hz"}]', "\0", "[" * 100_000])
def test_a_broken_file_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "changes.json").write_text(text)
    assert made(tmp_path).value("sampling.hz") == 19


def test_what_is_refused(tmp_path: Path) -> None:
    changes = made(tmp_path)
    refused: list[tuple[type[ProbingError], dict[str, object]]] = [
        (UsageError, {"key": "store.part_bytes", "text": "1"}),
        (UsageError, {"key": "no such", "text": "1"}),
        (UsageError, {"key": "variables.interval_s", "text": "1", "job": "4711"}),
        (UsageError, {"key": "sampling.hz", "text": "1", "process": (7, 70), "persist": True}),
        (ConfigError, {"key": "sampling.hz", "text": "many"}),
        (ConfigError, {"key": "sampling.hz", "text": "-1"}),
        (ConfigError, {"key": "sampling.hz", "text": "1000"}),
        (ConfigError, {"key": "variables.interval_s", "text": "nan"}),
    ]
    for error, arguments in refused:
        with pytest.raises(error) as caught:
            changes.change(**arguments)  # type: ignore[arg-type]
        assert caught.value.hint
    assert changes.value("sampling.hz", WHO) == 19
    with pytest.raises(UsageError):
        changes.to_list("store.part_bytes")
    with pytest.raises(StoreError):
        Changes(Config(), tmp_path / "nowhere" / "changes.json", Times()).change("sampling.hz", "1", persist=True)


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("sampling.hzz", "there is no setting 'sampling.hzz'", "did you mean sampling.hz? `probingctl config`"),
        ("store.part_bytez", "there is no setting 'store.part_bytez'", "did you mean store.part_bytes? "),
        ("no such", "there is no setting 'no such'", "`probingctl config` lists all"),
        ("store.part_bytes", "store.part_bytes cannot be changed while the daemon runs", "set it in the configuration"),
    ],
)
def test_a_key_that_is_none_and_one_of_the_file(tmp_path: Path, key: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(tmp_path).change(key, "1")
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("scope", [{}, {"job": "4711"}, {"process": (7, 70)}], ids=["all", "job", "process"])
@pytest.mark.parametrize("count", [MAX_NAMES + 1, 100_000])
def test_more_names_than_a_process_is_read_for_are_refused(tmp_path: Path, scope: Any, count: int) -> None:
    changes = made(tmp_path)
    with pytest.raises(ConfigError) as caught:
        changes.change("variables.watch", ",".join(f"v{number}" for number in range(count)), **scope)
    assert caught.value.message == f"variables.watch has {count} entries, and {MAX_NAMES} are the most"
    assert caught.value.hint == f"leave {count - MAX_NAMES} of them out"
    names = tuple(f"v{number}" for number in range(MAX_NAMES))
    changes.change("variables.watch", ",".join(names), **scope)
    assert changes.value("variables.watch", WHO) == names


def test_no_list_of_the_configuration_is_without_bound(tmp_path: Path) -> None:
    for key, option in options():
        if isinstance(option.default, tuple):
            with pytest.raises(ConfigError, match=r" entries, and \d+ are the most"):
                checked_text(key, ",".join(f"comm.ops={number}" for number in range(100_000)))


def test_there_are_not_too_many(tmp_path: Path) -> None:
    changes = made(tmp_path)
    for number in range(MAX_CHANGES):
        changes.change("sampling.hz", "7", process=(number + 1, 1))
    with pytest.raises(ConfigError):
        changes.change("sampling.hz", "7")
    changes.change("sampling.hz", "8", process=(1, 1))
    changes.forget(2, 1)
    changes.change("sampling.hz", "7")


def test_they_are_shown(tmp_path: Path) -> None:
    changes = made(tmp_path)
    assert [s["key"] for s in changes.to_list()] == list(SETTINGS)
    assert all(s["value"] == s["default"] == text_of(Config(), s["key"]) and s["doc"] for s in changes.to_list())
    changes.change("variables.watch", "loss", job="4711")
    everywhere, of_job = changes.to_list("variables.watch")
    assert (everywhere["value"], of_job["value"], of_job["job"], of_job["pid"]) == ("", "loss", "4711", 0)
