"""Three daemons with addresses of their own, each with one rank: one of them names the culprit, for all, once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cgroup_support import cpu_group
from diagnosis_corpus import watching
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import Daemon, family
from network_namespaces import may_make_namespaces
from node_namespaces import HUB, NodeSpace, node_namespaces
from waiting import until

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")

PORT = 7070
CULPRIT = 1
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
        self.file = base / "posts"
        self.file.touch()

    def posts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def hangs(self) -> list[dict[str, Any]]:
        return [post for post in self.posts() if post["severity"] == "error"]

    def states(self, seen_by: int = 0) -> dict[str, str]:
        """Returns the state of each node as one of them sees it."""
        rows = self.daemons[seen_by].query("SELECT member, state FROM cluster.members")
        return {row["member"]: row["state"] for row in rows}

    def kill(self, number: int) -> None:
        """Kills all processes of a daemon at once, as a power cut does."""
        process = self.daemons[number].process
        assert process is not None
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

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
def site(base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Site]:
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
        for at, space in enumerate(spaces):
            daemon = make_daemon(
                f"n{at + 1}", f"--listen={space.address}:{PORT}", "--insecure=true", f"--cluster.seeds={seeds}",
                f"--cgroup=/{groups[at].name}", hook,
            )  # fmt: skip
            daemon.before = space.words
            made.daemons.append(watching(daemon))
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


def test_the_coordinator_names_the_culprit_on_all_nodes(site: Site, job: Ranks) -> None:
    job.go()
    [post] = until(site.hangs, what=lambda: site.daemons[0].tail())
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


def test_the_next_node_names_the_culprit_where_the_coordinator_died(site: Site, job: Ranks) -> None:
    site.kill(0)
    job.go()
    [post] = until(site.hangs, what=lambda: site.daemons[1].tail())
    assert [(c["rank"], c["node"]) for c in post["culprits"]] == [(CULPRIT, "n2")]
    assert post["node"] == "n2"
    assert any("n1" in text for text in post["missing"])
    [row] = until(lambda: findings(site.daemons[2], job), what=site.daemons[2].tail)
    assert row["found_by"] == "n2"
