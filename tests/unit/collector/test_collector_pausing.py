"""Who paused the probes, and since when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probing.daemon.clock import FakeClock
from probing.daemon.collector.pausing import Pausing

NOW = 1_795_317_127_000_000_000


class _Session:
    """What the programs' map keeps over a restart, as ``bpf.session.Session`` does."""

    paused = pause_asked = False
    paused_ns = 0

    def pause(self, paused: bool, *, asked: bool) -> None:
        if paused != self.paused:
            self.paused_ns = 5 if paused else 0
        self.paused, self.pause_asked = paused, paused and asked


def restarted(session: _Session, file: Path) -> Pausing:
    found: Any = session
    return Pausing(found, file, FakeClock(5, NOW))


def test_a_pause_says_who_asked_and_since_when(tmp_path: Path) -> None:
    session, file = _Session(), tmp_path / "pause"
    pausing = restarted(session, file)
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
    before = restarted(session, file)
    before.asked = True
    before.follow()
    # The file neither ends nor begins what a client asked for.
    file.touch()
    assert not before.follow()
    pausing = restarted(session, file)
    assert not pausing.follow()
    file.unlink()
    assert (pausing.follow(), pausing.reason) == (
        False,
        "paused since 2026-11-22 03:12:07Z by `probingctl pause`",
    )


def test_a_client_asks_during_a_pause_by_the_file(tmp_path: Path) -> None:
    session, file = _Session(), tmp_path / "pause"
    file.touch()
    before = restarted(session, file)
    before.follow()
    before.asked = True
    assert not before.follow()
    file.unlink()
    pausing = restarted(session, file)
    assert (pausing.follow(), session.paused) == (False, True)


def test_a_pause_by_a_file_that_went_while_no_daemon_ran_is_over(tmp_path: Path) -> None:
    session, file = _Session(), tmp_path / "pause"
    file.touch()
    restarted(session, file).follow()
    file.unlink()
    pausing = restarted(session, file)
    assert (pausing.follow(), session.paused, pausing.reason) == (True, False, "")
