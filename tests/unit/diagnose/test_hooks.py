"""Hooks: findings that find no place in the queue are counted and named."""

from __future__ import annotations

from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.hooks import MAX_WAITING, Hooks


def test_a_queue_that_is_full_is_a_problem() -> None:
    hooks = Hooks("/nonexistent", "n1", DiagnoseConfig(hook="true"))
    for number in range(MAX_WAITING):
        hooks.post({"finding_id": f"f{number}", "job": "j", "run": "r"})
    assert (hooks.lost, list(hooks.problems)) == (0, [])
    hooks.post({"finding_id": "last", "job": "j", "run": "r"})
    assert (hooks.lost, list(hooks.problems)) == (1, ["findings without a hook: 64 findings wait already"])


def test_without_a_configured_hook_nothing_waits() -> None:
    hooks = Hooks("/nonexistent", "n1", DiagnoseConfig())
    hooks.post({})
    assert (hooks.idle, hooks.detail) == (True, "")
