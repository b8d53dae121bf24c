"""What a launcher refuses: commands, replays, too many restarts; and what it does if it cannot write a file."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from launcher_helpers import NODE, LauncherProcess, Owner, living, workers

from probing.groups.keys import OwnerKey

SLEEP = ("sleep", "1009")


@pytest.mark.parametrize(
    ("command", "fields", "exit_code", "reason"),
    [
        (
            ("/nonexistent/program",),
            {},
            127,
            "the command /nonexistent/program cannot be used: No such file or directory",
        ),
        (("no-such-program",), {}, 127, "the command no-such-program cannot be used: No such file or directory"),
        (("/etc/passwd",), {}, 126, "the command /etc/passwd cannot be used: Permission denied"),
        (SLEEP, {"cwd": "/nonexistent"}, 126, "the directory /nonexistent cannot be used: No such file or directory"),
        (("\x1b[2J",), {}, 127, r"the command \x1b[2J cannot be used: No such file or directory"),
    ],
    ids=["no file", "not in PATH", "no program", "no directory", "terminal"],
)
def test_a_command_that_cannot_run(
    directory: Path, name: str, command: tuple[str, ...], fields: dict, exit_code: int, reason: str
) -> None:
    owner = Owner(directory, name, *command, number=2, **fields)
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        rows = launcher.until_states("ended")
    assert {(row["exit_code"], row["reason"]) for row in rows} == {(exit_code, f"exited with {exit_code}: {reason}")}


def test_commands_of_other_nodes_and_patterns(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1, signed_on="n2")
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        [row] = launcher.until_states("refused")
        assert row["reason"].startswith("the command was typed on n2, and without --allow")
    with LauncherProcess(directory, allow=("sleep 1", "sleep 1013")) as launcher:
        [row] = launcher.until_states("refused")
        assert row["reason"] == "no --allow of this launcher matches the command sleep 1009"
    # It has not been started before.
    with LauncherProcess(directory, allow=("sleep 10*",)) as launcher:
        launcher.until_states("running")
        launcher.stop(owner)


def test_refused_records_are_reported(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=2)
    stranger = Owner(directory / "stranger", name, "touch", str(directory / "touched"), number=2)
    stranger.order("start")
    older = owner.order("start")
    with LauncherProcess(directory) as launcher:
        assert launcher.apply(stranger.run()) == f"group {name} is signed by a key that root does not trust"
        rows = launcher.until_states("refused")
        assert [(row["worker"], row["group"], row["generation"]) for row in rows] == [
            (f"{NODE}-0", name, 1),
            (f"{NODE}-1", name, 1),
        ]
        assert launcher.rows() == rows
        launcher.apply(older)
        launcher.apply(owner.run())
        launcher.until_states("running")
        # The group is known now. So its refused records are no states of its generation, and are reported once.
        for record in (older, older, stranger.group):
            assert launcher.apply(record) != ""
        rows = launcher.rows()
        assert [(row["state"], row["generation"]) for row in rows] == [("refused", 0)] * 4 + [("running", 1)] * 2
        assert rows[0]["reason"] == (
            f"an older record of group {name}: generation 1 is ending in this record, and was running in a newer record"
        )
        launcher.apply(older)
        assert [row["state"] for row in launcher.rows()] == ["running"] * 2
        launcher.stop(owner)
    assert not (directory / "touched").exists()


def test_a_worker_that_left_the_group_is_reported_while_a_start_waits_for_it(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        assert launcher.apply(replace(owner.order("start"), occupied=(f"{NODE}-0", f"{NODE}-1"))) == ""
        assert [(row["worker"], row["clear"]) for row in launcher.rows()] == [(f"{NODE}-0", True), (f"{NODE}-1", True)]
        launcher.apply(owner.run())
        launcher.until_states("running")
        launcher.stop(owner)


def test_replayed_starts_are_refused_by_a_later_launcher(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        replayed = owner.group
        launcher.stop(owner)
    with LauncherProcess(directory) as launcher:
        assert launcher.apply(replayed) == f"an older record of group {name}: generation 1, and generation 2 was seen"
        # A generation that nobody ordered, with the order that was replayed.
        forged = replace(replayed, generation=3)
        assert launcher.apply(forged) == f"an older record of group {name}: order 1, and order 2 was seen"
        assert living(name) == {}
        assert {row["clear"] for row in launcher.rows() if row["state"] != "refused"} == {True}


def test_the_record_of_another_user(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1, uid=os.getuid() + 1)
    with LauncherProcess(directory) as launcher:
        assert launcher.apply(owner.order("start")).startswith(f"group {name} belongs to root (uid {os.getuid() + 1})")


def test_a_forged_record_does_not_change_what_is_known(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    forger = OwnerKey(b"f" * 32)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        text = owner.group.spec_text
        forged = replace(owner.group, generation=1000, key=forger.public, signature=forger.sign("group", text.encode()))
        order = owner.group.order
        assert order is not None
        forged = replace(forged, order=replace(order, signature=forger.sign("order", order.text())))
        assert "does not trust" in launcher.apply(forged)
        launcher.rows()
        [row] = launcher.rows()
        assert (row["state"], row["seen"]) == ("running", 1)
        launcher.stop(owner)


def test_automatic_restarts_are_limited_by_the_launchers_own_count(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1, max_restarts=2)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
    for number in (1, 2):
        with LauncherProcess(directory) as launcher:
            launcher.apply(owner.restart())
            launcher.until(lambda rows: rows[0]["clear"])
            launcher.apply(owner.run())
            [row] = launcher.until_states("running")
            assert row["restarts"] == number
    with LauncherProcess(directory) as launcher:
        # A node that does not count, or a Unix clock that was set.
        owner.group = replace(owner.group, generation=4, phase="running", attempts=())
        launcher.apply(owner.group)
        [row] = launcher.until_states("refused")
        assert row["reason"] == "2 restarts within an hour, and the specification allows 2"
        assert living(name) == {}
        launcher.apply(owner.order("restart"))
        launcher.apply(owner.run())
        launcher.until_states("running")
        launcher.stop(owner)


def test_nothing_starts_while_the_state_file_cannot_be_written(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        pid = launcher.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        [row] = launcher.until_states("refused")
        path = directory / "state" / "launcher.json"
        assert row["reason"] == f"the state file {path} cannot be written: File too large"
        assert not row["clear"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        launcher.until_states("running")
        # Ranks are ended without a state file, too.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        launcher.apply(owner.order("stop"))
        launcher.until(lambda rows: rows[0]["signal"] == signal.SIGTERM and not rows[0]["clear"])
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        launcher.until(lambda rows: rows[0]["clear"])


def test_a_log_that_cannot_be_written(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=2)
    (directory / "state" / "logs").mkdir(parents=True, mode=0o700)
    (directory / "state").chmod(0o700)
    (directory / "state" / "logs" / name).touch()
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        rows = launcher.until_states("refused")
        path = directory / "state" / "logs" / name / "rank0.log"
        assert {row["reason"] for row in rows} == {f"the log {path} cannot be written: File exists"}
        (directory / "state" / "logs" / name).unlink()
        launcher.until_states("running")
        launcher.stop(owner)


def test_processes_that_cannot_be_listed_have_not_ended(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        pid = launcher.process.pid
        fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (fds, before[1]))
        launcher.apply(owner.order("stop"))
        launcher.until(lambda rows: rows[0]["seen"] == 2)
        assert not launcher.rows()[0]["clear"]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        launcher.until(lambda rows: rows[0]["clear"])
    assert living(name) == {}


def test_groups_that_were_deleted_first_are_forgotten(directory: Path, name: str) -> None:
    with LauncherProcess(directory) as launcher:
        gone = Owner(directory, f"{name}-gone", *SLEEP, number=1)
        launcher.start(gone)
        launcher.apply(gone.order("delete"))
        launcher.until(lambda rows: rows == [])
        assert launcher.ask("clear", name=f"{name}-gone", generation=2)
    path = directory / "state" / "launcher.json"
    state = json.loads(path.read_text())
    assert state["groups"][0]["record"] == ""
    state["groups"] += [{"name": f"other-{n}", "key": "aa", "id": ""} for n in range(1023)]
    path.write_text(json.dumps(state))
    owner = Owner(directory, name, *SLEEP, number=1)
    late = Owner(directory, f"{name}-late", *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        launcher.until(lambda _: launcher.ask("clear", name=f"{name}-gone", generation=2))
        launcher.start(owner)
        assert launcher.apply(late.order("start")) == "this launcher has 1,024 groups: delete some"
        launcher.apply(owner.order("stop"))
        launcher.until(lambda rows: [row["clear"] for row in rows] == [False, True])


def test_nodes_on_one_machine_leave_each_other_alone(directory: Path, name: str) -> None:
    owner = Owner(directory / "n2", name, *SLEEP, workers=(*workers(2), *workers(2, "n2")))
    (directory / "n1").mkdir()
    (directory / "n1" / "keys").symlink_to(directory / "n2" / "keys")
    with (
        LauncherProcess(directory / "n1", allow=("sleep *",)) as first,
        LauncherProcess(directory / "n2", node="n2", allow=("sleep *",)) as second,
    ):
        for launcher in (first, second):
            launcher.apply(owner.group)
        owner.order("start")
        owner.run()
        for launcher in (first, second):
            launcher.apply(owner.group)
            launcher.until_states("running")
        first.stop(owner)
        assert sorted(rank for _, rank in living(name).values()) == [2, 3]
        second.until_states("running")
        second.apply(owner.group)
        second.until(lambda rows: all(row["clear"] for row in rows))
