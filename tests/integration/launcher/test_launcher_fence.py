"""A launcher without word from the other nodes ends the ranks of a fenced group in time; logs are rotated."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from launcher_helpers import LauncherProcess, Owner, living
from waiting import until

from probing.launcher import keeper

KEEPER = Path(keeper.__file__)
IGNORES_SIGTERM = (
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(1009)",
)


def fenced(directory: Path, name: str, *command: str, **fields: object) -> Owner:
    defaults = {"on_hang": "restart_without_node", "fence_s": 1000.0, "grace_s": 100.0}
    return Owner(directory, name, *command, number=2, **{**defaults, **fields})


def start(launcher: LauncherProcess, owner: Owner, seconds: float) -> list[dict]:
    """Starts the group under a lease of ``seconds``."""
    launcher.apply(owner.order("start"))
    launcher.apply(owner.run())
    rows = launcher.until_states("waiting")
    assert {row["reason"] for row in rows} == {"there is no word from a majority of the group's nodes yet"}
    launcher.ask("renew", name=owner.group.spec.name, generation=1, seconds=seconds)
    return launcher.until_states("running")


def test_ranks_are_dead_before_the_lease_is_over(directory: Path, name: str) -> None:
    owner = fenced(directory, name, *IGNORES_SIGTERM)
    with LauncherProcess(directory) as launcher:
        # A lease is never longer than the fence, whatever a node says.
        for row in start(launcher, owner, 5000.0):
            until(lambda path=row["log"]: "ready" in Path(path).read_text())
        # The grace time, and a second for SIGKILL, before the end.
        launcher.ask("advance", seconds=1000 - 100 - 60)
        assert {row["state"] for row in launcher.rows()} == {"running"}
        launcher.ask("advance", seconds=60)
        launcher.until_states("ending")
        launcher.ask("advance", seconds=40)
        assert {row["state"] for row in launcher.rows()} == {"ending"}
        assert len(living(name)) == 2
        launcher.ask("advance", seconds=59)
        rows = launcher.until_states("fenced")
        assert living(name) == {}
        reason = "fenced: no word from a majority of the group's nodes for 1000 s; ended by SIGKILL"
        assert {row["reason"] for row in rows} == {reason}
        # It does not start again, though a lease comes.
        launcher.ask("renew", name=name, generation=1, seconds=1000.0)
        assert {row["state"] for row in launcher.rows()} == {"fenced"}
        launcher.apply(owner.order("restart"))
        launcher.apply(owner.run())
        launcher.until_states("waiting")
        launcher.ask("renew", name=name, generation=2, seconds=1000.0)
        launcher.until_states("running")
        launcher.apply(owner.order("stop"))
        launcher.ask("advance", seconds=100)
        launcher.until(lambda rows: all(row["clear"] for row in rows))


def test_a_lease_that_is_renewed_lets_ranks_run(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009")
    with LauncherProcess(directory) as launcher:
        start(launcher, owner, 1000.0)
        for _ in range(23):
            launcher.ask("advance", seconds=700.0)
            launcher.ask("renew", name=name, generation=1, seconds=1000.0)
            # Leases of other generations, and shorter ones, change nothing.
            launcher.ask("renew", name=name, generation=1, seconds=-1.0)
            launcher.ask("renew", name=name, generation=2, seconds=1.0)
        assert {row["state"] for row in launcher.rows()} == {"running"}
        launcher.ask("advance", seconds=900.0)
        assert {row["signal"] for row in launcher.until_states("fenced")} == {signal.SIGTERM}
        launcher.stop(owner)


def test_a_new_launcher_knows_the_lease(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009")
    with LauncherProcess(directory) as launcher:
        start(launcher, owner, 1000.0)
        launcher.kill()
    with LauncherProcess(directory, env={"AHEAD": "800"}) as launcher:
        launcher.until_states("running")
        launcher.kill()
    with LauncherProcess(directory, env={"AHEAD": "1000"}) as launcher:
        launcher.until_states("fenced")
        assert living(name) == {}


def test_a_launcher_without_its_state_file_fences_from_its_start(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009")
    with LauncherProcess(directory) as launcher:
        start(launcher, owner, 1000.0)
        launcher.kill()
    (directory / "state" / "launcher.json").unlink()
    with LauncherProcess(directory, env={"AHEAD": "3000"}) as launcher:
        launcher.apply(owner.group)
        launcher.until_states("running")
        launcher.ask("advance", seconds=840)
        assert {row["state"] for row in launcher.rows()} == {"running"}
        launcher.ask("advance", seconds=160)
        launcher.until_states("fenced")


def test_the_lease_cuts_an_ending_short(directory: Path, name: str) -> None:
    ignores = IGNORES_SIGTERM[3].replace("print", "signal.signal(signal.SIGUSR1, signal.SIG_IGN); print")
    owner = fenced(directory, name, *IGNORES_SIGTERM[:3], ignores, grace_s=3600.0, save=("SIGUSR1",), save_s=3600.0)
    with LauncherProcess(directory) as launcher:
        for row in start(launcher, owner, 1000.0):
            until(lambda path=row["log"]: "ready" in Path(path).read_text())
        launcher.apply(owner.restart())
        launcher.until_states("ending")
        launcher.ask("advance", seconds=940)
        assert len(living(name)) == 2
        launcher.ask("advance", seconds=60)
        launcher.until(lambda rows: all(row["clear"] for row in rows))
        assert living(name) == {}


def keepers(directory: Path) -> list[int]:
    """Returns the pids of the keepers of a directory, without the parent that each has for a moment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            ours = words[3:5] == [str(KEEPER).encode(), str(directory / "state").encode()]
            if ours and (path.parent / "cwd").readlink() == Path("/"):
                pids.append(int(path.parent.name))
    return pids


def test_the_keeper_ends_ranks_when_no_launcher_does(directory: Path, name: str) -> None:
    owner = fenced(directory, name, *IGNORES_SIGTERM, fence_s=5.0)
    with LauncherProcess(directory) as launcher:
        for _ in range(2):
            launcher.ask("keeper")
        # A lease that began later than the keeper.
        until(lambda: len(keepers(directory)) == 1, what=lambda: keepers(directory))
        for row in start(launcher, owner, 5.0):
            until(lambda path=row["log"]: "ready" in Path(path).read_text())
        launcher.kill()
    assert len(living(name)) == 2
    until(lambda: not living(name), what=lambda: living(name))
    until(lambda: not keepers(directory), what=lambda: keepers(directory))
    with LauncherProcess(directory) as launcher:
        rows = launcher.until_states("fenced")
        assert {row["reason"].partition(";")[0] for row in rows} == {
            "fenced: no word from a majority of the group's nodes for 5 s"
        }


def test_the_lease_of_an_older_generation_ends_nobody(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009", fence_s=5.0)
    with LauncherProcess(directory) as launcher:
        launcher.ask("keeper")
        start(launcher, owner, 5.0)
        launcher.stop(owner)
        launcher.apply(owner.change(on_hang="report"))
        launcher.start(owner)
        launcher.kill()
    until(lambda: not keepers(directory), what=lambda: keepers(directory))
    assert len(living(name)) == 2
    with LauncherProcess(directory) as launcher:
        launcher.until_states("running")
        launcher.stop(owner)


def test_the_keeper_lives_as_long_as_the_launcher(directory: Path, name: str) -> None:
    owner = Owner(directory, name, "sleep", "1009")
    with LauncherProcess(directory) as launcher:
        launcher.ask("keeper")
        launcher.start(owner)
        until(lambda: keepers(directory))
        # It is no process of the group, though only one group runs here.
        launcher.stop(owner)
        launcher.reexec()
        launcher.ask("keeper")
        # A second keeper ends at once, or the first has ended: no launcher ran while the program was replaced.
        until(lambda: len(keepers(directory)) == 1, what=lambda: keepers(directory))
        launcher.start(owner)
        launcher.kill()
    # Without a lease the ranks run on.
    until(lambda: not keepers(directory), what=lambda: keepers(directory))
    assert len(living(name)) == 5
    with LauncherProcess(directory) as launcher:
        launcher.until_states("running")
        launcher.stop(owner)


def test_the_keeper_holds_nothing_that_was_given_to_the_launcher(directory: Path) -> None:
    reads, writes = os.pipe()
    with LauncherProcess(directory, inherits=(writes,)) as launcher:
        pipe = str(Path(f"/proc/self/fd/{writes}").readlink())
        assert pipe in _files(launcher.process.pid)
        launcher.ask("keeper")
        [keeper] = until(lambda: (found := keepers(directory)) and len(found) == 1 and found)
        until(lambda: pipe not in _files(keeper), what=lambda: _files(keeper))
        # It has its lock, and looks after the launcher.
        until(lambda: any(file.endswith("keeper.lock") for file in _files(keeper)), what=lambda: _files(keeper))
    os.close(reads)
    os.close(writes)
    until(lambda: not keepers(directory), what=lambda: keepers(directory))


def _files(pid: int) -> set[str]:
    """Returns what the descriptors of a process are."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(str(path.readlink()))
    return found


def test_a_lease_that_is_over_is_no_lease(directory: Path, name: str) -> None:
    owner = fenced(directory, name, *IGNORES_SIGTERM)
    with LauncherProcess(directory) as launcher:
        for row in start(launcher, owner, 1000.0):
            until(lambda path=row["log"]: "ready" in Path(path).read_text())
        launcher.apply(owner.restart())
        launcher.until_states("ending")
        # It came too late.
        launcher.ask("renew", name=name, generation=2, seconds=-1.0)
        launcher.ask("advance", seconds=50)
        assert {row["state"] for row in launcher.rows()} == {"ending"}
        assert len(living(name)) == 2
        launcher.ask("advance", seconds=50)
        launcher.until(lambda rows: all(row["clear"] for row in rows))
        launcher.apply(owner.run())
        launcher.until_states("waiting")


def test_a_lease_that_is_nearly_over_starts_nothing(directory: Path, name: str) -> None:
    owner = fenced(directory, name, "sleep", "1009")
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        # The ranks would have to be ended at once, as 100 s of grace are left before its end.
        launcher.ask("renew", name=name, generation=1, seconds=100.0)
        for _ in range(3):
            assert {row["state"] for row in launcher.rows()} == {"waiting"}
        launcher.ask("renew", name=name, generation=1, seconds=1000.0)
        launcher.until_states("running")
        launcher.ask("advance", seconds=1000.0)
        launcher.until_states("fenced")


def test_an_hour_has_to_pass_before_more_restarts(directory: Path, name: str) -> None:
    owner = Owner(directory, name, "sleep", "1009", number=1, max_restarts=1)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        launcher.apply(owner.restart())
        launcher.apply(owner.run())
        launcher.until_states("running")
        launcher.ask("advance", seconds=3480)
        owner.group = replace(owner.group, generation=3, attempts=())
        launcher.apply(owner.group)
        [row] = launcher.until_states("refused")
        launcher.until(lambda rows: rows[0]["clear"])
        assert row["reason"] == "1 restart within an hour, and the specification allows 1"
        launcher.ask("advance", seconds=60)
        launcher.until_states("running")
        launcher.stop(owner)


def test_a_group_without_fence_runs_without_word(directory: Path, name: str) -> None:
    owner = Owner(directory, name, "sleep", "1009", number=1, fence_s=1000.0)
    with LauncherProcess(directory) as launcher:
        rows = launcher.start(owner)
        launcher.ask("advance", seconds=3000.0)
        assert launcher.rows() == rows
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
