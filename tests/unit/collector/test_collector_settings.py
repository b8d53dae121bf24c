"""Which users' processes the daemon takes for its own."""

from __future__ import annotations

import pytest

from probing.daemon.collector.settings import own_users
from probing.daemon.config import Config


@pytest.mark.parametrize(
    ("collector", "service", "worker", "found"),
    [
        ("23", "7", "5", {23, 7, 5}),
        ("root", "0", "7", {7}),
        ("no-such-user", "no-such-user", "7", {7}),
    ],
)
def test_users_of_the_daemon_but_root(collector: str, service: str, worker: str, found: set[int]) -> None:
    words = [f"--users.collector={collector}", f"--users.service={service}", f"--users.worker={worker}"]
    assert own_users(Config.from_args(words)) == found
