"""Groups of workers: created, started, failing, restarted and stopped, by real launchers under real daemons."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_support import EXAMPLE, JOBS, Daemon
from groups_scene import Launchers, User, living, ranks_of
from long import long
from network_namespaces import may_make_namespaces
from site_of_nodes import Site, in_group, site_of
from waiting import until

from probing.api.tables import TABLES

GROUPS = "--groups.enabled=true"


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "user")


@pytest.fixture
def launchers(user: User) -> Iterator[Launchers]:
    made = Launchers(user)
    yield made
    made.close()


def test_a_group_on_one_node(make_daemon: Callable[..., Daemon], user: User, launchers: Launchers) -> None:
    daemon = make_daemon("n1", GROUPS).start()
    launchers.start(daemon, "--slots", "5")
    until(lambda: len(daemon.rows("SELECT worker FROM cluster.workers")) == 5, what=daemon.tail)
    create = (
        "group",
        "create",
        "llama",
        "--workers",
        "n1-*",
        "--master",
        "n1-0",
        "--backend",
        "gloo",
        "--env",
        "NOTE=a\nb",
    )
    user.ctl(daemon, *create, "--restart", "on_failure", "--", *user.command)
    assert user.status(daemon, "llama")["phase"] == "stopped"
    user.ctl(daemon, "group", "start", "llama", "--force")
    rows = ranks_of(user, daemon, "llama", "running", 5)
    said = {}
    for rank, row in rows.items():
        lines = Path(row["log"]).read_text().splitlines()
        said[rank] = json.loads(next(line for line in lines if line.startswith("{")))
        assert living("llama")[row["pid"]] == ("llama", 1, str(rank))
    assert [(one["RANK"], one["LOCAL_RANK"], one["NODE_RANK"]) for _, one in sorted(said.items())] == [
        (str(rank), str(rank), "0") for rank in range(5)
    ]
    assert {(one["WORLD_SIZE"], one["BACKEND"], one["NOTE"], one["TORCHELASTIC_RUN_ID"]) for one in said.values()} == {
        ("5", "gloo", "a\nb", "llama")
    }

    assert '"RANK": "3"' in user.ctl(daemon, "group", "logs", "llama", "--rank", "3").stdout
    ps = "SELECT rank FROM process.processes WHERE job = 'llama' AND role = 'trainer' ORDER BY rank"
    until(lambda: [row["rank"] for row in daemon.rows(ps)] == [0, 1, 2, 3, 4], what=lambda: daemon.rows(ps))

    os.kill(rows[3]["pid"], signal.SIGKILL)
    until(lambda: sorted(living("llama").values()) == [("llama", 2, str(rank)) for rank in range(5)], what=living)
    status = user.status(daemon, "llama")
    assert (status["phase"], status["generation"], status["restarts"]) == ("running", 2, 1)
    assert status["why"] == "rank 3 (n1-3) was killed by SIGKILL"

    for rank in range(5):
        user.end(rank, 0)
    until(lambda: user.status(daemon, "llama")["phase"] == "finished", what=lambda: user.status(daemon, "llama"))
    assert living("llama") == {}

    # A command that does not exist: the reason is where people look.
    user.ctl(
        daemon, "group", "create", "broken", "--workers", "n1-0,n1-1", "--master", "n1-0", "--", "/no/such/program"
    )
    user.ctl(daemon, "group", "start", "broken", "--force")
    until(lambda: user.status(daemon, "broken")["phase"] == "failed", what=lambda: user.status(daemon, "broken"))
    for command in (("diagnose", "--job", "broken"), ("ps", "--group", "broken")):
        done = user.ctl(daemon, *command, check=1)
        why = r"group broken has no processes: it is failed, rank [01] \(n1-[01]\) exited with 127"
        assert re.search(why, done.stderr), done.stderr


def test_a_real_training_in_a_group(make_daemon: Callable[..., Daemon], user: User, launchers: Launchers) -> None:
    daemon = make_daemon("n1", GROUPS).start()
    launchers.start(daemon, "--slots", "2")
    until(lambda: len(daemon.rows("FROM cluster.workers")) == 2, what=daemon.tail)
    create = (
        "group",
        "create",
        "ddp",
        "--workers",
        "n1",
        "--nproc-per-node",
        "2",
        "--master",
        "n1",
        "--backend",
        "gloo",
    )
    user.ctl(daemon, *create, "--env", "OMP_NUM_THREADS=1", "--", sys.executable, str(EXAMPLE), "--steps", "23")
    user.ctl(daemon, "group", "start", "ddp", "--force")
    until(
        lambda: user.status(daemon, "ddp")["phase"] in ("finished", "failed"), what=lambda: user.status(daemon, "ddp")
    )
    status = user.status(daemon, "ddp")
    said = [user.ctl(daemon, "group", "logs", "ddp", "--rank", rank).stdout for rank in ("0", "1")]
    assert (status["phase"], status["why"]) == ("finished", "2 ranks ended with status 0"), said
    ranks = "SELECT DISTINCT rank FROM comm.ops WHERE job = 'ddp' AND op = 'all_reduce' ORDER BY rank"
    until(lambda: [row["rank"] for row in daemon.rows(ranks)] == [0, 1], what=lambda: daemon.rows(ranks))


def test_every_column_is_filled(make_daemon: Callable[..., Daemon], user: User, launchers: Launchers) -> None:
    """Nodes that are left out are asserted where one hangs."""
    daemon = make_daemon("n1", GROUPS).start()
    launchers.start(daemon, "--slots", "2")
    until(lambda: len(daemon.rows("FROM cluster.workers")) == 2, what=daemon.tail)
    # Of one group the rank ends, the other waits for a launcher.
    for name, workers, port, command in (
        ("ends", "n1-0", "29500", ("false",)),
        ("waits", "n1-1,n1-7", "29600", user.command),
    ):
        places = ("--workers", workers, "--master", workers[:4], "--master-port", port)
        user.ctl(daemon, "group", "create", name, *places, "--", *command)
        user.ctl(daemon, "group", "start", name, "--force")
    missing = {
        table: {column.name for column in TABLES[table].columns} for table in ("cluster.groups", "cluster.workers")
    }

    def fill() -> bool:
        for table, columns in missing.items():
            for row in daemon.rows(f"FROM {table}"):
                columns -= {name for name, value in row.items() if value is not None}
        return missing == {"cluster.groups": {"excluded"}, "cluster.workers": set()}

    until(fill, what=lambda: missing)


NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def site(base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Site]:
    with site_of(base, make_daemon, NODES, (0.0,) * 4, [(GROUPS,)] * 4) as made:
        yield made


@pytest.fixture
def crew(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> Iterator[Launchers]:
    """Two workers on each of four nodes, or as many as the test says."""
    slots = getattr(request, "param", 2)
    user = User(tmp_path / "user", site)
    before = {
        daemon.name: (*space.words, *in_group(group))
        for daemon, space, group in zip(site.daemons, site.spaces, site.groups, strict=True)
    }
    made = Launchers(user, before)
    try:
        for daemon in site.daemons:
            made.start(daemon, "--slots", str(slots), "--allow", "*")
        for daemon in site.daemons:
            until(lambda d=daemon: len(d.rows("FROM cluster.workers")) == slots, what=daemon.tail)  # type: ignore[misc]
        yield made
    finally:
        made.close()


def generations(name: str) -> dict[str, int]:
    """Returns the generation of each living rank; fails if a rank has two processes."""
    found: dict[str, int] = {}
    for _, generation, rank in living(name).values():
        assert rank not in found, living(name)
        found[rank] = generation
    return found


@pytest.mark.timeout(300)
@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")
def test_a_group_of_four_nodes(site: Site, crew: Launchers) -> None:
    user, first = crew.user, site.daemons[0]
    workers = ("--workers", "n*", "--master", "n3-1", "--backend", "gloo", "--restart", "on_failure")
    user.ctl(first, "group", "create", "llama", *workers, "--grace", "1s", "--", *user.command)
    user.ctl(first, "group", "start", "llama", "--force")
    rows = ranks_of(user, first, "llama", "running", 8)
    assert [row["worker"] for _, row in sorted(rows.items())] == [
        f"n{node}-{number}" for node in (3, 1, 2, 4) for number in (0, 1)
    ]
    said = [json.loads(until(lambda row=row: _said(row["log"]))) for _, row in sorted(rows.items())]  # type: ignore[misc]
    assert {(one["MASTER_ADDR"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in said} == {
        ("10.78.0.3", "8", "2")
    }
    assert [one["NODE_RANK"] for one in said] == ["0", "0", "1", "1", "2", "2", "3", "3"]

    # A killed launcher: its ranks go on, and its successor finds them.
    before = living("llama")
    crew.kill("n2")
    crew.again("n2")
    launchers_of(site, "n2", crew.pid("n2"))
    ranks_of(user, first, "llama", "running", 8)
    assert living("llama") == before

    # A killed daemon: nobody notices, not even a launcher that begins anew meanwhile.
    site.kill(2)
    crew.processes["n3"].send_signal(signal.SIGHUP)
    until(lambda: (user.home / "n3.launcher.log").read_text().count("serving") == 2)
    site.daemons[2].spawn()
    site.daemons[2].wait_ready()
    launchers_of(site, "n3", crew.pid("n3"))
    ranks_of(user, first, "llama", "running", 8)
    assert living("llama") == before

    # The launcher begins anew in its own process, as for an upgrade.
    pid = crew.pid("n4")
    crew.processes["n4"].send_signal(signal.SIGHUP)
    until(lambda: (user.home / "n4.launcher.log").read_text().count("connected") == 2)
    launchers_of(site, "n4", pid)
    ranks_of(user, first, "llama", "running", 8)
    assert (living("llama"), crew.pid("n4"), crew.processes["n4"].poll()) == (before, pid, None)

    # A rank that fails: all start again, and none of them twice.
    user.end(3, 7)
    until(lambda: generations("llama") == {str(rank): 2 for rank in range(8)}, what=living)
    assert user.status(first, "llama")["why"] == "rank 3 (n1-1) exited with 7"

    # A cut node takes nobody's rank while it may still run; after the heal the order that waited is carried out.
    site.spaces[3].cut()
    site.await_state(3, "failed")
    user.ctl(first, "group", "restart", "llama", "--force")
    until(lambda: "n4" in (user.status(first, "llama")["why"] or ""), what=lambda: user.status(first, "llama"))
    until(lambda: generations("llama") == {"6": 2, "7": 2}, what=living)
    site.spaces[3].join()
    until(lambda: generations("llama") == {str(rank): 3 for rank in range(8)}, what=living)

    user.ctl(first, "group", "stop", "llama")
    until(lambda: not living("llama"), what=living)
    user.ctl(first, "group", "set", "llama", "--master", "n4")
    user.ctl(first, "group", "start", "llama", "--force")
    rows = ranks_of(user, first, "llama", "running", 8)
    assert [rows[rank]["worker"] for rank in range(3)] == ["n4-0", "n4-1", "n1-0"]
    user.ctl(first, "group", "delete", "llama")
    until(lambda: not living("llama"), what=living)
    assert "(no groups)" in user.ctl(first, "group", "status").stdout


def launchers_of(site: Site, node: str, pid: int) -> None:
    """Waits until the launcher of a node is connected."""
    daemon = site.daemons[NODES.index(node)]
    sql = f"FROM cluster.workers WHERE launcher_pid = {pid} AND state = 'healthy' AND rank_state = 'running'"
    until(lambda: len(daemon.rows(sql)) == 2, what=lambda: daemon.rows("FROM cluster.workers"))


def _said(log: str) -> str:
    return next((line for line in Path(log).read_text().splitlines() if line.startswith("{")), "")


@long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")
@pytest.mark.parametrize("crew", [1], indirect=True)
def test_a_hang_is_named_stored_and_restarted_without_its_node(site: Site, crew: Launchers) -> None:
    """The third hang within an hour is only reported."""
    user, first = crew.user, site.daemons[0]
    create = ("group", "create", "llama", "--workers", "n*", "--master", "n1-0", "--backend", "gloo")
    policy = ("--on-hang", "restart_without_node", "--env", "GLOO_SOCKET_IFNAME=eth0", "--grace", "1s")
    user.ctl(first, *create, *policy, "--", sys.executable, "-u", str(JOBS / "grouped.py"), str(user.orders))
    user.ctl(first, "group", "start", "llama", "--force")
    for generation, worker in enumerate(("n2-0", "n3-0", "n4-0"), 1):
        await_steps(first, "llama", generation)
        (user.orders / f"hang-{worker}").touch()
        began = time.monotonic()
        sql = (
            "SELECT ranks, nodes, stacks FROM diagnosis.findings WHERE job = 'llama' AND severity = 'error' "
            f"AND nodes = '{worker[:2]}'"
        )
        until(lambda sql=sql: first.rows(sql), what=first.tail)  # type: ignore[misc]
        print(f"hang {generation} of {worker} was stored after {time.monotonic() - began:.1f} s")
        if generation == 3:
            break
        until(lambda g=generation: set(generations("llama").values()) == {g + 1}, what=living)  # type: ignore[misc]
        print(f"and generation {generation + 1} ran after {time.monotonic() - began:.1f} s")
        status = user.status(first, "llama")
        assert worker[:2] in status["excluded"]
        assert "n1" not in status["excluded"]
        excluded = first.rows("SELECT excluded FROM cluster.groups WHERE group_name = 'llama'")
        assert excluded == [{"excluded": ",".join(status["excluded"])}]
    until(lambda: "is only reported" in "".join(daemon.log.read_text() for daemon in site.daemons), what=first.tail)
    assert set(generations("llama").values()) == {3}
    assert user.status(first, "llama")["generation"] == 3


def await_steps(daemon: Daemon, job: str, generation: int) -> None:
    """Waits until rank 0 of a generation has made collectives, as the daemon of its node has it."""
    [pid] = [pid for pid, (_, number, rank) in _all_of(job, generation).items() if (number, rank) == (generation, "0")]
    sql = f"SELECT count(*) AS n FROM comm.ops WHERE pid = {pid}"
    until(lambda: daemon.rows(sql)[0]["n"] > 23, what=daemon.tail)


def _all_of(job: str, generation: int) -> dict[int, tuple[str, int, str]]:
    def found() -> dict[int, tuple[str, int, str]] | None:
        now = living(job)
        return now if any(number == generation and rank == "0" for _, number, rank in now.values()) else None

    return until(found, what=living)
