"""Groups of workers: created, started, failing, restarted and stopped, by real launchers under real daemons."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_support import Daemon
from groups_scene import Launchers, User, living, ranks_of
from waiting import until

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
    until(lambda: len(daemon.query("SELECT worker FROM cluster.workers")) == 5, what=daemon.tail)
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

    os.kill(rows[3]["pid"], signal.SIGKILL)
    until(lambda: sorted(living("llama").values()) == [("llama", 2, str(rank)) for rank in range(5)], what=living)
    status = user.status(daemon, "llama")
    assert (status["phase"], status["generation"], status["restarts"]) == ("running", 2, 1)
    assert status["why"] == "rank 3 (n1-3) was killed by SIGKILL"

    for rank in range(5):
        user.end(rank, 0)
    until(lambda: user.status(daemon, "llama")["phase"] == "finished", what=lambda: user.status(daemon, "llama"))
    assert living("llama") == {}
