"""Three daemons with addresses of their own, each with one rank: one of them names the culprit, for all, once.

``make coordination`` has the time-outs that people use, more clocks apart, and prints how long each verdict takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from cgroup_support import cpu_group
from clock_ahead import clock_ahead
from diagnosis_corpus import watching
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import BIN, Daemon
from long import LONG, long
from network_namespaces import may_make_namespaces
from node_namespaces import HUB, NodeSpace, node_namespaces
from process_tree import family
from waiting import until, whole_lines

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")

PORT = 7070
MOVED = "10.78.0.77"
CULPRIT = 1
STALL_S = 10.0 if LONG else 2.0
IN_STEP = (0.0, 0.0, 0.0)
# How far the clock of each node is ahead of the machine's, s.
CLOCKS = [IN_STEP, (0.0, 0.05, -0.05), (5.0, 0.0, -5.0), (0.0, 5.0, 5.0)]
_WEBHOOK = Path(__file__).parents[1] / "webhook_server.py"
# The shell joins the control group before it becomes the rank.
_IN_GROUP = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')


class Site:
    """Nodes n1, n2 and n3. ``posts``: the findings that the webhook got; ``daemons`` and ``ranks`` by index."""

    def __init__(self, base: Path, spaces: list[NodeSpace], groups: list[Path]) -> None:
        self.base = base
        self.spaces = spaces
        self.groups = groups
        self.daemons: list[Daemon] = []
        self.shown: tuple[str, ...] = ()
        self.file = base / "posts"
        self.file.touch()

    def listen(self) -> None:
        """Configures each daemon to listen on the address that its node has now."""
        for daemon, space in zip(self.daemons, self.spaces, strict=True):
            own = tuple(word for word in daemon.extra if not word.startswith("--listen="))
            daemon.extra = (*own, f"--listen={space.address}:{PORT}")

    def posts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in whole_lines(self.file)]

    def hangs(self) -> list[dict[str, Any]]:
        return [post for post in self.posts() if post["severity"] == "error"]

    def states(self, seen_by: int = 0) -> dict[str, str]:
        """Returns the state of each node as one of them sees it."""
        rows = self.daemons[seen_by].query("SELECT member, state FROM cluster.members")
        return {row["member"]: row["state"] for row in rows}

    def ask(self, sql: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the rows of a query of all nodes, from the first one, and its report."""
        report = self.base / "report.json"
        words = (str(BIN / "probingctl"), "-t", self.daemons[0].target, *self.shown, "--report", str(report))
        done = subprocess.run(
            [*self.spaces[0].words, *words, "-f", "json", "query", "--all-nodes", sql], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), json.loads(report.read_text())

    def kill(self, number: int) -> None:
        """Kills all processes of a daemon at once, as a power cut does."""
        process = self.daemons[number].process
        assert process is not None
        self.signal(number, signal.SIGKILL)
        process.wait()

    def signal(self, number: int, what: signal.Signals) -> None:
        """Sends a signal to all processes of a daemon."""
        process = self.daemons[number].process
        assert process is not None
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def await_state(self, number: int, state: str, seen_by: int = 0) -> None:
        name = self.daemons[number].name
        until(lambda: self.states(seen_by).get(name) == state, what=lambda: self.states(seen_by))

    def start(self, job: Ranks) -> None:
        env = {"MASTER_ADDR": self.spaces[0].address, "MASTER_PORT": str(job.port), "GLOO_SOCKET_IFNAME": "eth0"}
        job.job = f"{self.spaces[0].address}:{job.port}"
        for rank, (space, group) in enumerate(zip(self.spaces, self.groups, strict=True)):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(self.spaces))}
            job.run([*space.words, *_IN_GROUP, str(group), *job.command], {**env, **own})

    def await_steps(self, job: Ranks) -> None:
        sql = f"SELECT count(DISTINCT rank) AS n FROM comm.ops WHERE job = '{job.job}' AND op = 'all_reduce'"
        for daemon in self.daemons:
            until(lambda daemon=daemon: daemon.query(sql)[0]["n"] == 1, what=job.output)  # type: ignore[misc]


@pytest.fixture
def site(request: pytest.FixtureRequest, base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Site]:
    clocks: tuple[float, ...] = getattr(request, "param", IN_STEP)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(node_namespaces(3))
        name = f"site-{os.getpid()}"
        groups = [stack.enter_context(cpu_group(f"{name}-{at}", 1.0)) for at in range(3)]
        made = Site(base, spaces, groups)
        words = ("nsenter", f"--net=/run/netns/{spaces[0].hub}", sys.executable, str(_WEBHOOK), HUB, str(made.file))
        server = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        hook = f"--diagnose.webhook=http://{HUB}:{server.stdout.readline().strip()}/"
        seeds = ",".join(f"{space.address}:{PORT}" for space in spaces)
        nodes = Authority(base / "tls", "nodes")
        for at, space in enumerate(spaces):
            # Any of the addresses: one of the nodes moves.
            cert, key = nodes.node(f"n{at + 1}", ",".join([*(one.address for one in spaces), MOVED]))
            daemon = make_daemon(
                f"n{at + 1}",
                f"--tls.cert={cert}",
                f"--tls.key={key}",
                f"--tls.client_ca={nodes.file}",
                f"--tls.peer_ca={nodes.file}",
                f"--cluster.seeds={seeds}",
                f"--cgroup=/{groups[at].name}",
                hook,
            )
            daemon.before = space.words
            if clocks[at]:
                daemon.before += clock_ahead(base / f"clock{at}", clocks[at])
            made.daemons.append(watching(daemon, STALL_S))
        cert, key = nodes.client("ops")
        made.shown = ("--tls-ca", nodes.file, "--tls-cert", cert, "--tls-key", key)
        for file in (base / "tls", *(base / "tls").iterdir()):
            shutil.chown(file, group="probing-service")
        made.listen()
        for daemon in made.daemons:
            daemon.spawn()
        for daemon in made.daemons:
            daemon.wait_ready()
        until(lambda: all(list(made.states(at).values()) == ["healthy"] * 3 for at in range(3)), what=made.states)
        yield made


@pytest.fixture
def job(site: Site) -> Iterator[Ranks]:
    with folder_of_job() as folder:
        ranks = Ranks("n1", folder, "hangs.py", "stopped", 3)
        try:
            site.start(ranks)
            site.await_steps(ranks)
            yield ranks
        finally:
            ranks.kill()
            ranks.wait()


def findings(daemon: Daemon, job: Ranks) -> list[dict[str, Any]]:
    """Returns the newest row of each open finding that holds the job up, on one node."""
    newest = "row_number() OVER (PARTITION BY finding_id ORDER BY ts DESC) = 1"
    return daemon.query(
        "SELECT verdict, ranks, finding_id, found_by, confidence, stacks FROM diagnosis.findings "
        f"WHERE job = '{job.job}' AND severity = 'error' QUALIFY {newest} AND state = 'open'"
    )


def named(site: Site, job: Ranks, asked: int = 0) -> dict[str, Any]:
    """Makes the job hang, and returns the one finding that the webhook gets."""
    job.go()
    began = time.monotonic()
    [post] = until(site.hangs, what=site.daemons[asked].tail)
    print(f"named {time.monotonic() - began:.1f} s after the fault, with stall_s = {STALL_S:g}")
    return post


@pytest.mark.parametrize("site", CLOCKS[2:3] if not LONG else CLOCKS, indirect=True, ids=str)
def test_the_coordinator_names_the_culprit_on_all_nodes(request: pytest.FixtureRequest, site: Site, job: Ranks) -> None:
    ahead = request.node.callspec.params["site"]
    _, report = site.ask("SELECT count(*) FROM probing.sources")
    assert len(report["answered"]) == 3
    for answered in report["answered"]:
        apart_ns = ahead[int(answered["node"][1:]) - 1] * 1e9
        assert abs(answered["clock_offset_ns"] - apart_ns) <= answered["clock_error_ns"] + 1e6
    post = named(site, job)
    assert [(c["rank"], c["node"]) for c in post["culprits"]] == [(CULPRIT, "n2")]
    assert post["node"] == "n1"
    rows = [until(lambda d=d: findings(d, job), what=d.tail) for d in site.daemons]  # type: ignore[misc]
    assert [[row["found_by"] for row in own] for own in rows] == [["n1"]] * 3
    assert {row["finding_id"] for own in rows for row in own} == {post["finding_id"]}
    # The stacks are those of the culprit's node and of a victim.
    roles = {(stack["node"], stack["role"]) for stack in json.loads(rows[2][0]["stacks"])}
    assert ("n2", "culprit") in roles
    assert "victim" in {role for _, role in roles}

    # WHEN the coordinator is killed, the next node goes on, and the hook is not started again
    site.kill(0)
    until(lambda: site.states(1)["n1"] == "failed", what=lambda: site.states(1))
    sql = f"SELECT count(*) AS n FROM diagnosis.findings WHERE job = '{job.job}' AND found_by = 'n2'"
    until(lambda: site.daemons[1].query(sql)[0]["n"], what=site.daemons[1].tail)
    assert len(site.hangs()) == 1
    # The verdict lacks a witness.
    [row] = findings(site.daemons[2], job)
    assert row["ranks"] == str(CULPRIT)


@long
def test_the_next_node_names_the_culprit_where_the_coordinator_died(site: Site, job: Ranks) -> None:
    site.kill(0)
    post = named(site, job, 1)
    assert [(c["rank"], c["node"]) for c in post["culprits"]] == [(CULPRIT, "n2")]
    assert post["node"] == "n2"
    assert any("n1" in text for text in post["missing"])
    [row] = until(lambda: findings(site.daemons[2], job), what=site.daemons[2].tail)
    assert row["found_by"] == "n2"


@long
def test_states_follow_links_and_daemons(site: Site) -> None:
    def answering() -> tuple[list[str], list[str]]:
        """Returns the nodes that answer the first one, and those that it names as failed."""
        rows, report = site.ask("SELECT node, count(*) AS n FROM probing.sources GROUP BY node ORDER BY node")
        return [row["node"] for row in rows], [failed["node"] for failed in report["failed"]]

    assert answering() == (["n1", "n2", "n3"], [])
    # A link that is cut.
    site.spaces[2].cut()
    site.await_state(2, "suspect")
    site.await_state(2, "failed")
    assert answering() == (["n1", "n2"], ["n3"])
    # Beyond the cut, the others are gone.
    assert site.states(2)["n1"] == "failed"
    site.spaces[2].join()
    site.await_state(2, "healthy")
    assert answering() == (["n1", "n2", "n3"], [])
    # A daemon that is paused.
    site.signal(1, signal.SIGSTOP)
    site.await_state(1, "failed", seen_by=2)
    site.await_state(1, "failed")
    assert answering() == (["n1", "n3"], ["n2"])
    site.signal(1, signal.SIGCONT)
    site.await_state(1, "healthy")
    # A daemon that is stopped, and comes back with another address.
    site.daemons[2].stop()
    site.await_state(2, "failed")
    site.spaces[2].move(int(MOVED.rpartition(".")[2]))
    site.listen()
    site.daemons[2].start()
    site.await_state(2, "healthy")
    site.await_state(2, "healthy", seen_by=1)
    assert answering() == (["n1", "n2", "n3"], [])
