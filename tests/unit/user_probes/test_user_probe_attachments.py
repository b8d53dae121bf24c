"""Where a probe of a user is attached, and when it is tried again, without a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import Now

from probing.api.errors import (
    ConfigError,
    InternalError,
    PrivilegeError,
    ProbingError,
    TargetTimeout,
    UnsupportedTarget,
)
from probing.daemon.source import Identity
from probing.daemon.user_probes import running
from probing.daemon.user_probes.running import Running
from probing.daemon.user_probes.spec import Attach, Spec
from probing.daemon.user_probes.targets import Targets


class Place:
    """A file of the host, which is found once it is ``there``."""

    def __init__(self) -> None:
        self.problem: Exception | None = ConfigError("/lib/libx.so cannot be opened: No such file or directory")
        self.asked = 0

    def host_offset(self, _: Attach) -> tuple[int, int]:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        return os.open(os.devnull, os.O_RDONLY), 64


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Running:
    opened: Callable[..., int] = lambda *_, **__: os.open(os.devnull, os.O_RDONLY)  # noqa: E731
    nothing = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(running, "Ring", SimpleNamespace(open=lambda *_: nothing))
    monkeypatch.setattr(running, "Map", lambda *_: nothing)
    monkeypatch.setattr(running, "_attach_function", opened)
    attach = (Attach("uprobe", "on_call", "/lib/libx.so", "call"),)
    spec = Spec("calls", "", "all", 100, attach, (), "")
    loaded: Any = SimpleNamespace(
        programs=[opened()], maps={"probing_events": 0, "probing_counts": 0, "probing_listed": 0}
    )
    return Running(spec, spec.table, loaded)


def test_a_probe_of_all_processes_is_tried_again(probe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    now, place = Now(100.0), Place()
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=now))
    targets: Any = place

    def look() -> str:
        probe.follow([], list, targets)
        return probe.attached

    assert look() == "nowhere"
    assert list(probe.reasons.values()) == ["/lib/libx.so cannot be opened: No such file or directory"]
    # Not at once: the pauses grow.
    look()
    assert place.asked == 1
    place.problem, now.now = TargetTimeout("a file could not be parsed in time"), 102.0
    assert look() == "nowhere"
    place.problem, now.now = None, 105.0
    assert (look(), probe.reasons) == ("in all processes", {})
    look()
    assert place.asked == 3
    # After a pause of all probes it is attached anew.
    probe.detach()
    assert probe.attached == "nowhere"
    assert look() == "in all processes"
    probe.close()


class Listed:
    """The map of the pids whose tracepoints count."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def update(self, pid: int, _: int) -> None:
        self.pids.add(pid)

    def delete(self, pid: int) -> bool:
        held = pid in self.pids
        self.pids.discard(pid)
        return held

    def close(self) -> None:
        self.pids.clear()


def test_a_tracepoint_counts_for_no_process_that_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, nothing = Listed(), SimpleNamespace(close=lambda: None)
    opened: Callable[..., int] = lambda *_, **__: os.open(os.devnull, os.O_RDONLY)  # noqa: E731
    monkeypatch.setattr(running, "Ring", SimpleNamespace(open=lambda *_: nothing))
    monkeypatch.setattr(running, "Map", lambda name, *_: listed if name == "probing_listed" else nothing)
    monkeypatch.setattr(running, "_attach_tracepoint", opened)
    attach = (Attach("tracepoint", "on_call", tracepoint="sched:sched_switch"),)
    spec = Spec("calls", "", "trainers", 100, attach, (), "")
    loaded: Any = SimpleNamespace(
        programs=[opened()], maps={"probing_events": 0, "probing_counts": 0, "probing_listed": 0}
    )
    probe, targets = Running(spec, spec.table, loaded), cast(Any, None)
    first, second = Identity(11, 7, "j", "r", "trainer", 0), Identity(12, 7, "j", "r", "trainer", 1)
    probe.follow([first, second], lambda _: [], targets)
    assert listed.pids == {11, 12}
    # One calls exec, and trains no more.
    probe.forget([first.key])
    probe.follow([second], lambda _: [], targets)
    assert listed.pids == {12}
    # The other ends while all probes are paused.
    probe.detach()
    probe.follow([], lambda _: [], targets)
    assert listed.pids == set()
    probe.close()


@pytest.fixture
def probe_of_trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    nothing = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(running, "Ring", SimpleNamespace(open=lambda *_: nothing))
    monkeypatch.setattr(running, "Map", lambda name, *_: Listed() if name == "probing_listed" else nothing)
    attach = (Attach("uprobe", "on_call", "libx.so", "call"),)
    spec = Spec("calls", "", "trainers", 100, attach, (), "")
    maps = {"probing_events": 0, "probing_counts": 0, "probing_listed": 0}
    probe = Running(spec, spec.table, cast(Any, SimpleNamespace(programs=[], maps=maps)))
    yield probe
    probe.close()


def trainer(pid: int) -> Identity:
    return Identity(pid, 7, "j", "r", "trainer", 0)


@pytest.mark.parametrize("error", [InternalError("no reader can be started"), PrivilegeError("it may not be read")])
def test_a_process_that_cannot_be_read_costs_others_nothing(probe_of_trainers: Running, error: ProbingError) -> None:
    asked: list[int] = []

    def files(who: Identity) -> list[Any]:
        asked.append(who.pid)
        if who.pid == 11:
            raise error
        return []

    targets = cast(Any, SimpleNamespace(matching=lambda *_: []))
    probe_of_trainers.follow([trainer(11), trainer(12)], files, targets)
    assert asked == [11, 12]


def test_a_process_that_has_ended_is_no_reason_any_more(probe_of_trainers: Running) -> None:
    @contextmanager
    def opened(*_: Any) -> Iterator[int]:
        raise UnsupportedTarget("no function call in libx.so")
        yield 0

    def files(who: Identity) -> list[Any]:
        if who.pid == 12:
            raise TargetTimeout("process 12 could not be read")
        return []

    targets = cast(Any, SimpleNamespace(matching=lambda *_: [None], opened=opened))
    # GIVEN a process without the function, and one that cannot be read
    probe_of_trainers.follow([trainer(11), trainer(12)], files, targets)
    assert probe_of_trainers.reasons == {
        "call in libx.so": "no function call in libx.so",
        "processes": "process 12 could not be read",
    }
    # WHEN they end, one after the other
    probe_of_trainers.follow([trainer(12)], files, targets)
    # THEN the state of the probe is of the processes that live
    assert probe_of_trainers.reasons == {"processes": "process 12 could not be read"}
    probe_of_trainers.follow([], files, targets)
    assert probe_of_trainers.reasons == {}


def test_blocked_processes_of_a_user_delay_others_little() -> None:
    blocked_s: list[float] = []

    def call(op: str, *, timeout: float, patience: float | None = None, **_: Any) -> Any:
        blocked_s.append(timeout if patience is None else min(timeout, patience))
        raise TargetTimeout(f"the read is blocked ({op})")

    targets = Targets(cast(Any, SimpleNamespace(call=call)), cast(Any, None))
    mapping = cast(Any, SimpleNamespace(start=4096))
    for who in map(trainer, range(11, 21)):
        with pytest.raises(TargetTimeout):
            targets.files(who)
        with pytest.raises(TargetTimeout), targets.opened(who, mapping):
            pass
    assert sum(blocked_s) <= 10.0
