"""Daemons of several nodes, each with an address of its own, mTLS and a control group whose processes it sees."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from authority import Authority
from cgroup_support import cpu_group
from client_elsewhere import ClientElsewhere
from clock_ahead import clock_ahead
from diagnosis_corpus import watching
from diagnosis_jobs import Ranks
from e2e_support import Daemon
from long import LONG
from node_namespaces import HUB, NodeSpace, node_namespaces
from process_tree import family
from waiting import until, whole_lines

__all__ = ("MOVED", "STALL_S", "Site", "findings", "in_group", "site_of")

PORT = 7070
MOVED = "10.78.0.77"
STALL_S = 10.0 if LONG else 2.0
_WEBHOOK = Path(__file__).parents[1] / "webhook_server.py"


class Site:
    """Nodes. ``posts``: the findings that the webhook got; ``daemons`` and ``ranks`` by index."""

    def __init__(self, base: Path, spaces: list[NodeSpace], groups: list[Path]) -> None:
        self.base = base
        self.spaces = spaces
        self.groups = groups
        self.daemons: list[Daemon] = []
        self.shown: tuple[str, ...] = ()
        self.file = base / "posts"
        self.file.touch()
        self._client: ClientElsewhere | None = None

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
        rows = self.daemons[seen_by].rows("SELECT member, state FROM cluster.members")
        return {row["member"]: row["state"] for row in rows}

    def ask(self, sql: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the rows of a query of all nodes, from the first one, and its report."""
        report = self.base / "report.json"
        done = self.ctl(self.daemons[0], "--report", str(report), "-f", "json", "query", "--all-nodes", sql)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), json.loads(report.read_text())

    def ctl(self, daemon: Daemon, *words: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """Runs ``probingctl`` on the first node, with a certificate that all nodes know; it asks ``daemon``."""
        if self._client is None:
            self._client = ClientElsewhere(self.spaces[0].words)
        return self._client.probingctl("-t", daemon.target, *self.shown, *words, env=env)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def kill(self, number: int) -> None:
        """Kills all processes of a daemon at once, as a power cut does."""
        process = self.daemons[number].process
        assert process is not None
        self.signal(number, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

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

    def start(self, job: Ranks, nodes: Sequence[int] = (0, 1, 2)) -> None:
        """Starts a rank on each of these nodes."""
        job.job = f"{self.spaces[nodes[0]].address}:{job.port}"
        for rank, node in enumerate(nodes):
            self.run_rank(job, rank, node, len(nodes), nodes[0], job.command)

    def run_rank(self, job: Ranks, rank: int, node: int, size: int, master: int, command: Sequence[str]) -> None:
        """Starts a process on a node that says that it is a rank of the job."""
        env = {"MASTER_ADDR": self.spaces[master].address, "MASTER_PORT": str(job.port), "GLOO_SOCKET_IFNAME": "eth0"}
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
        self.run(job, node, command, {**env, **own})

    def run(self, job: Ranks, node: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts a process of the job, or beside it, on a node."""
        job.run([*self.spaces[node].words, *in_group(self.groups[node]), *command], env)

    def await_steps(self, job: Ranks, nodes: Sequence[int] = (0, 1, 2)) -> None:
        sql = f"SELECT count(DISTINCT rank) AS n FROM comm.ops WHERE job = '{job.job}' AND op = 'all_reduce'"
        for daemon in (self.daemons[node] for node in nodes):
            until(lambda daemon=daemon: daemon.rows(sql)[0]["n"] == 1, what=job.output)  # type: ignore[misc]


def in_group(group: Path) -> tuple[str, ...]:
    """Returns words before a command: a shell that joins the control group before it becomes the command."""
    return ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))


def findings(daemon: Daemon, job: Ranks) -> list[dict[str, Any]]:
    """Returns the newest row of each open finding that holds the job up, on one node."""
    newest = "row_number() OVER (PARTITION BY finding_id ORDER BY ts DESC) = 1"
    return daemon.rows(
        "SELECT verdict, ranks, finding_id, found_by, confidence, stacks FROM diagnosis.findings "
        f"WHERE job = '{job.job}' AND severity = 'error' QUALIFY {newest} AND state = 'open'"
    )


@contextlib.contextmanager
def site_of(
    base: Path,
    make_daemon: Callable[..., Daemon],
    names: Sequence[str] = ("n1", "n2", "n3"),
    clocks: Sequence[float] = (0.0, 0.0, 0.0),
    more: Sequence[Sequence[str]] = ((), (), ()),
    cpus: float = 1.0,
) -> Iterator[Site]:
    """A site whose daemons have these names.

    ``clocks``: how far each is ahead, s. ``more``: options of each. ``cpus``: CPUs that a node's ranks may use.
    """
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(node_namespaces(len(names)))
        name = f"site-{os.getpid()}"
        groups = [stack.enter_context(cpu_group(f"{name}-{at}", cpus)) for at in range(len(names))]
        made = Site(base, spaces, groups)
        stack.callback(made.close)
        words = ("nsenter", f"--net=/run/netns/{spaces[0].hub}", sys.executable, str(_WEBHOOK), HUB, str(made.file))
        server = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        hook = f"--diagnose.webhook=http://{HUB}:{server.stdout.readline().strip()}/"
        seeds = ",".join(f"{space.address}:{PORT}" for space in spaces)
        nodes = Authority(base / "tls", "nodes")
        for at, space in enumerate(spaces):
            # Any of the addresses: one of the nodes moves.
            cert, key = nodes.node(names[at], ",".join([*(one.address for one in spaces), MOVED]))
            daemon = make_daemon(
                names[at],
                f"--tls.cert={cert}",
                f"--tls.key={key}",
                f"--tls.client_ca={nodes.file}",
                f"--tls.peer_ca={nodes.file}",
                f"--cluster.seeds={seeds}",
                f"--cgroup=/{groups[at].name}",
                hook,
                *more[at],
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
        until(
            lambda: all(list(made.states(at).values()) == ["healthy"] * len(names) for at in range(len(names))),
            what=made.states,
        )
        yield made
