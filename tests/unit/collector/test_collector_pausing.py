"""Who paused the probes, and since when."""

from __future__ import annotations

from pathlib import Path

from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.collector.pausing import Pausing


class _Session:
    paused = False

    def pause(self, paused: bool) -> None:
        self.paused = paused


class _Clock(SystemClock):
    def pair(self) -> ClockPair:
        at = 1_795_317_127_000_000_000
        return ClockPair(1, 1, at)


def test_a_pause_says_who_asked_and_since_when(tmp_path: Path) -> None:
    session, file = _Session(), tmp_path / "pause"
    pausing = Pausing(session, file, _Clock())
    assert (pausing.follow(), pausing.reason) == (False, "")
    pausing.asked = True
    assert (pausing.follow(), session.paused) == (True, True)
    assert pausing.reason == "paused since 2026-11-22 03:12:07Z by `probingctl pause`"
    assert not pausing.follow()
    pausing.asked = False
    assert (pausing.follow(), session.paused, pausing.reason) == (True, False, "")
    file.touch()
    assert pausing.follow()
    assert pausing.reason == f"paused since 2026-11-22 03:12:07Z by the file {file}"
    file.unlink()
    assert (pausing.follow(), session.paused) == (True, False)


def test_a_restart_keeps_what_was_asked_for(tmp_path: Path) -> None:
    session, file = _Session(), tmp_path / "pause"
    session.paused = True
    pausing = Pausing(session, file, _Clock())
    assert (pausing.follow(), pausing.reason) == (False, "paused by `probingctl pause`")
    # One by the file ends with the file, also across a restart.
    file.touch()
    pausing = Pausing(session, file, _Clock())
    assert (pausing.follow(), pausing.reason) == (False, f"paused by the file {file}")
    file.unlink()
    assert (pausing.follow(), pausing.reason) == (True, "")
