"""Users of one node with tokens of the scope ``launch``: nobody gets another's workers, groups or processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_support import BIN, Daemon
from groups_scene import Launchers, User, living
from ports import free_port
from waiting import until

OTHER = 65_533
LAUNCH, READ = "launch-0123456789abcdef", "reader-0123456789abcdef"
TOKENS = f"""
[[token]]
name = "trainers"
scope = "launch"
value = "{LAUNCH}"
[[token]]
name = "oncall"
scope = "read"
value = "{READ}"
"""


class Scene:
    """A daemon that listens on loopback. ``user`` is root; ``other`` has the uid OTHER, and asks over TCP."""

    def __init__(self, daemon: Daemon, port: int, base: Path) -> None:
        self.daemon, self.address, self.base = daemon, f"127.0.0.1:{port}", base
        self.user, self.other = User(base / "root"), User(base / "other")
        for path in (base / "other", *(base / "other").rglob("*")):
            os.chown(path, OTHER, OTHER)

    def words(self, token: str) -> list[str]:
        file = self.base / f"{token}.mine"
        file.write_text(token)
        file.chmod(0o644)
        become = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
        return [*become, str(BIN / "probingctl"), "-t", self.address, "--token-file", str(file)]

    @property
    def env(self) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self.other.home / "state"), "HOME": str(self.other.home)}
        return {**os.environ, **self.other.env, **state}

    def asks(self, *words: str, token: str = LAUNCH) -> subprocess.CompletedProcess[str]:
        """Runs ``probingctl`` as the other user."""
        return subprocess.run([*self.words(token), *words], env=self.env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def scene(make_daemon: Callable[..., Daemon], base: Path, open_tmp_path: Path) -> Scene:
    tokens, port = base / "tokens", free_port()
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    shutil.chown(tokens, "probing-service")
    listen = ("--listen", f"127.0.0.1:{port}", "--token-file", str(tokens), "--groups.enabled=true")
    return Scene(make_daemon("n1", *listen).start(), port, open_tmp_path)


@pytest.fixture
def launchers(scene: Scene) -> Iterator[Launchers]:
    """Root's launcher, with the workers n1-0 and n1-1."""
    made = Launchers(scene.user)
    made.start(scene.daemon, "--slots", "2")
    until(lambda: len(scene.daemon.rows("FROM cluster.workers")) == 2, what=scene.daemon.tail)
    yield made
    made.close()


def test_a_user_without_the_scope_gets_nothing(scene: Scene, launchers: Launchers) -> None:
    for words in (
        ("worker", "--name", "n1-7"),
        ("group", "create", "mine", "--workers", "n1-7", "--master", "n1", "--", "id"),
    ):
        done = scene.asks(*words, token=READ)
        assert done.returncode != 0
        assert "the scope launch is needed" in done.stderr, done.stderr
    assert "launcher asked by tcp" in scene.daemon.log.read_text()


def test_each_user_has_workers_and_groups_of_the_own(scene: Scene, launchers: Launchers) -> None:
    daemon, user = scene.daemon, scene.user
    done = scene.asks("worker", "--name", "n1-0")
    assert "worker n1-0 belongs to root" in done.stderr, done.stderr
    done = scene.asks("worker", "--name", "n2-0")
    assert "n2-0 is no worker of node n1" in done.stderr, done.stderr

    worker = subprocess.Popen([*scene.words(LAUNCH), "worker", "--name", "n1-7"], env=scene.env, start_new_session=True)
    try:
        until(lambda: daemon.rows(f"FROM cluster.workers WHERE worker = 'n1-7' AND uid = {OTHER}"), what=daemon.tail)

        # Root's group wants the other user's worker: it is not obeyed there.
        user.ctl(daemon, "group", "create", "greedy", "--workers", "n1-7", "--master", "n1", "--", *user.command)
        user.ctl(daemon, "group", "start", "greedy", "--force")
        until(lambda: user.status(daemon, "greedy")["phase"] != "stopped")
        assert living("greedy") == {}

        # The other user's own group runs as that user.
        create = ("group", "create", "mine", "--workers", "n1-7", "--master", "n1", "--", *scene.other.command)
        done = scene.asks(*create)
        assert done.returncode == 0, done.stderr
        done = scene.asks("group", "start", "mine", "--force")
        assert done.returncode == 0, done.stderr
        [pid] = until(lambda: living("mine"), what=daemon.tail)
        assert Path(f"/proc/{pid}").stat().st_uid == OTHER

        # Neither orders the other's group, not even root by the socket.
        done = scene.asks("group", "stop", "greedy")
        assert "was signed by root with another key" in done.stderr, done.stderr
        assert "another key" in user.ctl(daemon, "group", "restart", "mine", "--force", check=2).stderr
        done = scene.asks("group", "create", "greedy", "--workers", "n1-7", "--master", "n1", "--", "id")
        assert "there is a group greedy already" in done.stderr, done.stderr
        assert list(living("mine")) == [pid]
        done = scene.asks("group", "stop", "mine")
        assert done.returncode == 0, done.stderr
        until(lambda: not living("mine"), what=living)
    finally:
        worker.kill()
        worker.wait()


def test_without_groups_no_call_reaches_them(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon, user = make_daemon("n1").start(), User(tmp_path / "user")
    done = user.ctl(daemon, "group", "status", check=1)
    assert "groups of workers are not enabled on node n1" in done.stderr
    launchers = Launchers(user)
    launchers.start(daemon, "--slots", "1")
    assert launchers.processes["n1"].wait(60) == 1
    assert "not enabled" in (user.home / "n1.launcher.log").read_text()
    assert daemon.rows("FROM cluster.workers") == []
