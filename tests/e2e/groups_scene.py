"""Launchers and groups under real daemons: a user with keys of its own, and what its ranks say of themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_in_process import probingctl
from e2e_support import BIN, Daemon
from site_of_nodes import Site
from waiting import until

from probing.launcher import keeper

__all__ = ("SAY", "Launchers", "User", "living", "ranks_of")

KEEPER = keeper.__file__.encode()
# A rank that writes its variables to its log, and waits until it is told to end by a file named after its rank.
SAY = """
import json, os, signal, sys, time
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BACKEND",
         "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "PROBING_GROUP", "NOTE")
print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
order = Path(sys.argv[1]) / os.environ["RANK"]
while not order.exists():
    time.sleep(0.05)
text = order.read_text()
order.unlink()
sys.exit(int(text))
"""


class User:
    """A user of groups, with keys and launchers' state below ``home``. Commands run on the first node of ``site``."""

    def __init__(self, home: Path, site: Site | None = None) -> None:
        self.home, self._site = home, site
        self.home.mkdir(exist_ok=True)
        self.env = {"XDG_CONFIG_HOME": str(home / "config")}
        self.orders = home / "orders"
        self.orders.mkdir(exist_ok=True)
        self.script = home / "say.py"
        self.script.write_text(SAY)

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, str(self.script), str(self.orders))

    def end(self, rank: int, status: int) -> None:
        """Has a rank end with a status."""
        partial = self.orders / f".{rank}"
        partial.write_text(str(status))
        partial.rename(self.orders / str(rank))

    def ctl(self, daemon: Daemon, *words: str, check: int = 0) -> subprocess.CompletedProcess[str]:
        if self._site is not None:
            done = self._site.ctl(daemon, *words, env=self.env)
        else:
            with _environment(self.env):
                done = probingctl("-t", daemon.target, *words)
        assert done.returncode == check, (
            f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{daemon.tail()}"
        )
        return done

    def status(self, daemon: Daemon, name: str) -> dict[str, Any]:
        [group] = json.loads(self.ctl(daemon, "-f", "json", "group", "status", name).stdout)
        return dict(group)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Launchers:
    """The launchers of a user, by node; each has a state directory of its own, as on machines of their own.

    ``before``: words before the command of each node's launcher.
    """

    def __init__(self, user: User, before: Mapping[str, Sequence[str]] = {}) -> None:
        self.user, self.before = user, before
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.options: dict[str, tuple[Daemon, Sequence[str]]] = {}

    def start(self, daemon: Daemon, *words: str) -> None:
        self.options[daemon.name] = daemon, words
        env = {**os.environ, **self.user.env, "XDG_STATE_HOME": str(self.user.home / daemon.name)}
        log = (self.user.home / f"{daemon.name}.launcher.log").open("ab")
        command = (*self.before.get(daemon.name, ()), str(BIN / "probingctl"), "-t", daemon.target, "worker", *words)
        self.processes[daemon.name] = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        log.close()

    def pid(self, node: str) -> int:
        return self.processes[node].pid

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        self.processes[node].send_signal(number)
        self.processes[node].wait()

    def again(self, node: str) -> None:
        daemon, words = self.options[node]
        self.start(daemon, *words)

    def tails(self) -> dict[str, str]:
        """Returns the last lines of each launcher's log, and whether it runs."""
        logs = {node: (self.user.home / f"{node}.launcher.log").read_text()[-700:] for node in self.processes}
        return {node: f"{self.processes[node].poll()}: {text}" for node, text in logs.items()}

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        # Ranks, and the launchers' keepers.
        ours = f"XDG_CONFIG_HOME={self.user.env['XDG_CONFIG_HOME']}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environ, words = path.read_bytes(), (path.parent / "cmdline").read_bytes()
                if ours in environ and (b"PROBING_GROUP=" in environ or KEEPER in words):
                    os.kill(int(path.parent.name), signal.SIGKILL)


def living(group: str = "") -> dict[int, tuple[str, int, str]]:
    """Returns (group, generation, rank) of each process that a launcher started, by pid, as the kernel has it."""
    found: dict[int, tuple[str, int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, ValueError):
            variables = dict(
                text.split("=", 1) for text in path.read_bytes().decode("utf-8", "replace").split("\0") if "=" in text
            )
            if "PROBING_GROUP" in variables and "RANK" in variables:
                name, generation = variables["PROBING_GROUP"].rsplit("/", 1)
                if group in ("", name):
                    found[int(path.parent.name)] = name, int(generation), variables["RANK"]
    return found


def ranks_of(user: User, daemon: Daemon, name: str, state: str, count: int) -> dict[int, dict[str, Any]]:
    """Waits until ``count`` ranks of the group are in ``state``; returns the rows of all ranks by rank."""

    def rows() -> dict[int, dict[str, Any]]:
        return {row["rank"]: row for row in user.status(daemon, name)["workers"]}

    def done() -> dict[int, dict[str, Any]] | None:
        found = rows()
        return found if sum(row["state"] == state for row in found.values()) == count else None

    return until(done, what=rows, poll_s=0.2)
