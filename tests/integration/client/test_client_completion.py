"""Completion in bash, and the answers to zsh and fish: packaging/completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "packaging" / "completion"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which there is a probingctl."""
    program = tmp_path / "probingctl"
    program.write_text(f"#!{sys.executable}\nfrom probing.client.main import main\nmain()\n")
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (["probingctl", "sta"], ["status", "stacks"]),
        (["probingctl", "profile", "--w"], ["--wall"]),
        (["probingctl", "cluster", "q"], ["query"]),
        (["probingctl", "--str"], ["--strict"]),
    ],
)
def test_bash_completes_commands_and_options(path: str, words: list[str], candidates: list[str]) -> None:
    script = (
        f"source {SCRIPTS}/probingctl.bash; COMP_WORDS=({' '.join(words)});"
        f" COMP_CWORD={len(words) - 1}; _probingctl_completion probingctl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == sorted(candidates)


@pytest.mark.parametrize(("shell", "script"), [("zsh", "_probingctl"), ("fish", "probingctl.fish")])
def test_other_shells_are_answered(path: str, shell: str, script: str) -> None:
    assert f"_PROBINGCTL_COMPLETE=complete_{shell}" in (SCRIPTS / script).read_text()
    asked = {"_TYPER_COMPLETE_ARGS": "probingctl profile --w", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {**os.environ, "PATH": path, "_PROBINGCTL_COMPLETE": f"complete_{shell}", **asked}
    done = subprocess.run(["probingctl"], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--wall" in done.stdout
    assert "on and off the CPU" in done.stdout
