"""Random faults of groups of workers: ``python tests/soak/group_faults.py [--schedules 50] [--seed 1]``

Four daemons and launchers in network namespaces, a group of eight ranks. Each schedule makes five to nine faults and
orders, one after the other with short pauses: a rank, a launcher or a daemon is killed, a launcher is upgraded, a link
is cut and healed, a node stops and starts, or is cut while no launcher runs on it, the owner restarts the group, stops
it, changes its master and starts it.
Every second schedule's group may be started without a node that does not answer.

While they run, an observer that is none of ours reads /proc: no rank may have two processes, and no process may be of
an older generation than another process of its rank. In the end all is healed and the group restarted: each rank runs
once, in the newest generation. After a stop no process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "e2e", "integration", "unit")]

from e2e_support import Daemon, remove  # noqa: E402
from groups_scene import Launchers, User, living  # noqa: E402
from site_of_nodes import Site, in_group, site_of  # noqa: E402
from waiting import until  # noqa: E402

NODES = ("n1", "n2", "n3", "n4")
# A name of its own: the observer reads all processes of this machine.
GROUP = f"faults-{os.getpid()}"
PATIENCE_S = 120.0


class Observer:
    """Reads /proc until ``stop``; ``problems`` has what must never be."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.looks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            ranks: dict[str, list[tuple[int, int]]] = {}
            for pid, (_, generation, rank) in living(GROUP).items():
                ranks.setdefault(rank, []).append((generation, pid))
            # A process that was found may have ended before the next was read.
            for rank, processes in ranks.items():
                if len(processes) > 1 and len([pid for _, pid in processes if is_alive(pid)]) > 1:
                    self.problems.append(f"rank {rank} has processes {sorted(processes)}")
            self.looks += 1
            self._stopped.wait(0.05)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Schedule:
    """The faults of one schedule."""

    def __init__(self, site: Site, crew: Launchers, draw: random.Random) -> None:
        self.site, self.crew, self.draw = site, crew, draw
        self.cut: set[int] = set()
        self.down: set[int] = set()
        # Nodes without a launcher.
        self.bare: set[int] = set()
        self.log: list[str] = []

    def run(self) -> None:
        faults: list[Callable[[], str]] = [
            self.kill_rank,
            self.kill_rank,
            self.kill_launcher,
            self.upgrade_launcher,
            self.kill_daemon,
            self.cut_link,
            self.heal_link,
            self.stop_node,
            self.abandon_node,
            self.restart,
            self.change_master,
        ]
        for _ in range(self.draw.randint(5, 9)):
            self.log.append(self.draw.choice(faults)())
            time.sleep(self.draw.choice((0.0, 0.2, 1.0, 3.0)))

    def kill_rank(self) -> str:
        pids = sorted(living(GROUP))
        if not pids:
            return "no rank to kill"
        pid = self.draw.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"killed rank process {pid}"

    def kill_launcher(self) -> str:
        node = self._launcher()
        self.crew.kill(node)
        time.sleep(self.draw.choice((0.0, 0.5, 2.0)))
        self.crew.again(node)
        return f"killed the launcher of {node}"

    def _launcher(self) -> str:
        """Returns a node whose launcher runs."""
        return self.draw.choice([name for at, name in enumerate(NODES) if at not in self.down | self.bare])

    def upgrade_launcher(self) -> str:
        node = self._launcher()
        self.crew.processes[node].send_signal(signal.SIGHUP)
        return f"upgraded the launcher of {node}"

    def kill_daemon(self) -> str:
        at = self.draw.choice([at for at in range(len(NODES)) if at not in self.down])
        self.site.kill(at)
        self.site.daemons[at].spawn()
        return f"killed the daemon of {NODES[at]}"

    def cut_link(self) -> str:
        at = self.draw.randrange(len(NODES))
        self.site.spaces[at].cut()
        self.cut.add(at)
        return f"cut {NODES[at]}"

    def heal_link(self) -> str:
        for at in self.cut:
            self.site.spaces[at].join()
        healed, self.cut = self.cut, set()
        return f"healed {sorted(NODES[at] for at in healed)}"

    def stop_node(self) -> str:
        """A node that loses its power: daemon, launcher and ranks are gone at once."""
        if self.down or self.bare:
            return self.start_nodes()
        at = self.draw.randrange(len(NODES))
        self.site.kill(at)
        self.crew.kill(NODES[at])
        for pid in living(GROUP):
            with contextlib.suppress(OSError, ProcessLookupError):
                if f"PROBING_WORKER={NODES[at]}-".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self.down.add(at)
        return f"stopped node {NODES[at]}"

    def abandon_node(self) -> str:
        """A node that is cut, and whose launcher is gone: its keeper ends fenced ranks."""
        if self.down or self.bare:
            return self.start_nodes()
        at = self.draw.randrange(len(NODES))
        self.crew.kill(NODES[at])
        self.site.spaces[at].cut()
        self.cut.add(at)
        self.bare.add(at)
        time.sleep(self.draw.choice((0.0, 17.0)))
        return f"cut {NODES[at]}, whose launcher was killed"

    def start_nodes(self) -> str:
        for at in self.down:
            self.site.daemons[at].spawn()
            self.site.daemons[at].wait_ready()
        started = self.down | self.bare
        for at in started:
            self.crew.again(NODES[at])
        self.down, self.bare = set(), set()
        return f"started {sorted(NODES[at] for at in started)}"

    def restart(self) -> str:
        return f"restart: {self._tried('restart', GROUP, '--force')}"

    def change_master(self) -> str:
        master = self.draw.choice(NODES)
        stopped = self._tried("stop", GROUP)
        changed = self._tried("set", GROUP, "--master", master)
        return f"stop: {stopped}, master {master}: {changed}, start: {self._tried('start', GROUP, '--force')}"

    def _tried(self, *words: str) -> str:
        """Gives an order by a node that runs; it may be refused while too few nodes answer."""
        at = self.draw.choice([at for at in range(len(NODES)) if at not in self.down])
        daemon, user = self.site.daemons[at], self.crew.user
        command = [*self.site.spaces[at].words, str(Path(sys.executable).parent / "probingctl"), "-t", daemon.target]
        done = subprocess.run(
            [*command, *self.site.shown, "group", *words],
            env={**os.environ, **user.env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return "done" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1][:80]

    def heal(self) -> None:
        self.log += [self.heal_link(), self.start_nodes()]
        for daemon in self.site.daemons:
            until(lambda d=daemon: d.ctl("status", check=None).returncode == 0, PATIENCE_S, what=daemon.tail)  # type: ignore[misc]
            if self.crew.processes[daemon.name].poll() is not None:
                # It was started while its daemon was not there; systemd would have started it again.
                self.crew.again(daemon.name)
        for at in range(len(NODES)):
            until(lambda at=at: set(self.site.states(at).values()) == {"healthy"}, PATIENCE_S, what=self.site.states)  # type: ignore[misc]


def one(site: Site, crew: Launchers, seed: int) -> list[str]:
    """Runs one schedule; returns its problems."""
    user, first, draw = crew.user, site.daemons[0], random.Random(seed)
    fenced = ("--nnodes", "2:4", "--fence", "8s") if seed % 2 else ()
    policy = ("--restart", "on_failure", "--max-restarts", "50", "--grace", "1s", *fenced)
    words = ("--workers", "n*", "--master", draw.choice(NODES), "--backend", "gloo", *policy, "--", *user.command)
    user.ctl(first, "group", "create", GROUP, *words)
    user.ctl(first, "group", "start", GROUP, "--force")
    until(lambda: len(living(GROUP)) == 8, PATIENCE_S, what=living)
    observer, schedule = Observer(), Schedule(site, crew, draw)
    try:
        schedule.run()
        schedule.heal()
        status = until(lambda: _ordered(user, first, "restart"), PATIENCE_S, what=lambda: user.status(first, GROUP))
        generation = int(status["generation"])

        def whole() -> bool:
            now = sorted(living(GROUP).values())
            newest = {number for _, number, _ in now}
            return len(newest) == 1 and now == [(GROUP, *newest, str(rank)) for rank in range(8)]

        until(whole, PATIENCE_S, what=lambda: (crew.tails(), living(GROUP), user.status(first, GROUP), schedule.log))
        newest = {number for _, number, _ in living(GROUP).values()}
        problems = [] if min(newest) >= generation else [f"generation {newest} runs, and {generation} was begun"]
    finally:
        observer.stop()
    until(lambda: _ordered(user, first, "stop"), PATIENCE_S)
    until(lambda: not living(GROUP), PATIENCE_S, what=living)
    user.ctl(first, "group", "delete", GROUP)
    found = [*observer.problems[:5], *problems]
    print(f"seed {seed}: {found or 'right'}, {observer.looks} looks; {'; '.join(schedule.log)}", flush=True)
    return found


def _ordered(user: User, daemon: Daemon, action: str) -> dict[str, object] | None:
    words = ("--force",) if action == "restart" else ()
    try:
        user.ctl(daemon, "group", action, GROUP, *words)
    except AssertionError as e:
        # Another change came first, or the group is stopped already.
        return {} if "is stopped" in str(e) and action == "stop" else None
    return user.status(daemon, GROUP)


@contextlib.contextmanager
def scene(base: Path) -> Iterator[tuple[Site, Launchers]]:
    made: list[Daemon] = []

    def make(name: str, *extra: str) -> Daemon:
        made.append(Daemon(base, name, *extra))
        return made[-1]

    try:
        with site_of(
            base, make, NODES, (0.0,) * 4, [("--groups.enabled=true", "--diagnose.enabled=false")] * 4
        ) as site:
            user = User(base / "user", site)
            places = zip(site.daemons, site.spaces, site.groups, strict=True)
            crew = Launchers(user, {daemon.name: (*space.words, *in_group(group)) for daemon, space, group in places})
            try:
                for daemon in site.daemons:
                    crew.start(daemon, "--slots", "2", "--allow", "*")
                for daemon in site.daemons:
                    until(lambda d=daemon: len(d.query("FROM cluster.workers")) == 2, what=daemon.tail)  # type: ignore[misc]
                yield site, crew
            finally:
                crew.close()
    finally:
        for daemon in made:
            remove(daemon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="probingd-e2e-") as folder:
        base = Path(folder)
        base.chmod(0o755)
        with scene(base) as (site, crew):
            for seed in range(options.seed, options.seed + options.schedules):
                wrong += bool(one(site, crew, seed))
    print(f"{options.schedules} schedules, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
