"""A launcher without word from the other nodes ends the ranks of a fenced group in time; logs are rotated."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from launcher_helpers import LauncherProcess, Owner, living
from waiting import until

IGNORES_SIGTERM = (
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(1009)",
)


def fenced(directory: Path, name: str, *command: str, fence_s: float, **fields: object) -> Owner:
    return Owner(directory, name, *command, number=2, on_hang="restart_without_node", fence_s=fence_s, **fields)


def start(launcher: LauncherProcess, owner: Owner, seconds: float) -> list[dict]:
    """Starts the group under a lease of ``seconds``."""
    launcher.apply(owner.order("start"))
    launcher.apply(owner.run())
    rows = launcher.until_states("waiting")
    assert {row["reason"] for row in rows} == {"there is no word from a majority of the group's nodes yet"}
    launcher.ask("renew", name=owner.group.spec.name, generation=1, seconds=seconds)
    return launcher.until_states("running")


def test_ranks_are_dead_before_the_lease_is_over(directory: Path, name: str) -> None:
    owner = fenced(directory, name, *IGNORES_SIGTERM, fence_s=3.0, grace_s=30.0)
    with LauncherProcess(directory) as launcher:
        begun = time.monotonic()
        # A lease is never longer than the fence, whatever a node says.
        for row in start(launcher, owner, 1000.0):
            until(lambda path=row["log"]: "ready" in Path(path).read_text())
        until(lambda: living(name) == {})
        assert time.monotonic() >= begun + 3.0 - 3.0 / 20
        rows = launcher.until_states("fenced")
        reason = "fenced: no word from a majority of the group's nodes for 3 s; ended by SIGKILL"
        assert {row["reason"] for row in rows} == {reason}
        # It does not start again, though a lease comes.
        launcher.ask("renew", name=name, generation=1, seconds=3.0)
        assert {row["state"] for row in launcher.rows()} == {"fenced"}
        launcher.apply(owner.order("restart"))
        launcher.apply(owner.run())
        launcher.until_states("waiting")
        launcher.ask("renew", name=name, generation=2, seconds=3.0)
        launcher.until_states("running")
        launcher.stop(owner)


def test_a_lease_that_is_renewed_lets_ranks_run(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009", fence_s=1.3, grace_s=0.1)
    with LauncherProcess(directory) as launcher:
        start(launcher, owner, 3.0)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            launcher.ask("renew", name=name, generation=1, seconds=3.0)
            time.sleep(0.05)
        assert {row["state"] for row in launcher.rows()} == {"running"}
        launcher.until_states("fenced")
        launcher.stop(owner)


def test_a_new_launcher_knows_the_lease(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009", fence_s=2.0, grace_s=0.1)
    with LauncherProcess(directory) as launcher:
        start(launcher, owner, 2.0)
        launcher.kill()
    time.sleep(2.0)
    assert len(living(name)) == 2
    with LauncherProcess(directory) as launcher:
        launcher.until_states("fenced")
        assert living(name) == {}


def test_a_group_without_fence_runs_without_word(directory: Path, name: str) -> None:
    owner = Owner(directory, name, "sleep", "1009", number=1, fence_s=0.1)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        time.sleep(0.3)
        assert launcher.rows() == [row]
        launcher.stop(owner)


@pytest.mark.parametrize("adopted", [False, True])
def test_logs_are_rotated(directory: Path, name: str, adopted: bool) -> None:
    code = "import itertools, time\nfor n in itertools.count():\n  print(f'{n:09d}', flush=True); time.sleep(0.0005)"
    owner = Owner(directory, name, sys.executable, "-S", "-c", code, number=1, log_bytes=4096)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        if adopted:
            launcher.kill()
    with LauncherProcess(directory) as launcher:
        log = Path(row["log"])
        older = log.with_name(f"{log.name}.1")
        until(older.exists)
        kept = older.read_bytes()
        assert len(kept) >= 4096
        numbers = [int(line) for line in kept.split(b"\n")[1:-1]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        # The rank goes on at the begin of the file, which has no hole.
        until(lambda: log.read_bytes()[:1].isdigit())
        assert b"\0" not in log.read_bytes()
        launcher.stop(owner)
