"""The table of commands: each entry loads, and no other module is imported for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from probing.client.app import CLUSTER_COMMANDS, COMMANDS, RANKS_COMMANDS, program
from probing.client.lazy import Entry
from probing.client.main import main

_VISIBLE = [name for name, entry in COMMANDS.items() if not entry.hidden]
_ENTRIES = [([name], entry) for name, entry in COMMANDS.items()]
_ENTRIES += [(["cluster", name], entry) for name, entry in CLUSTER_COMMANDS.items()]
_ENTRIES += [(["ranks", name], entry) for name, entry in RANKS_COMMANDS.items()]
_LISTED = """
import sys
from probing.client.main import main
main(sys.argv[1:])
sys.stdout.write("\\n" + " ".join(name for name in sys.modules if name.startswith("probing.client.commands.")))
"""


@pytest.mark.parametrize(("words", "entry"), _ENTRIES, ids=[" ".join(words) for words, _ in _ENTRIES])
def test_each_command_shows_its_line_its_options_and_examples(
    words: list[str], entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    module = sys.modules[f"probing.client.commands.{entry.module}"]
    assert entry.help in out
    assert all(example in out for example in getattr(module, "EXAMPLES", ()))
    options = [field.name for field in fields(module.Options)] if hasattr(module, "Options") else []
    assert [parameter.name for parameter in _parameters(words)] == options


def _parameters(words: list[str]) -> list[Any]:
    command: Any = program()
    context = None
    for word in words:
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
        _, command, _ = command.resolve_command(context, [word])
    return list(command.params)


def test_the_list_of_commands_has_no_line_that_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "..." not in out.partition("Commands:")[2]
    assert [line.split()[0] for line in out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()] == [
        *_VISIBLE,
        "cluster",
        "ranks",
        "group",
    ]


@pytest.mark.parametrize(
    ("words", "loaded"), [(["--help"], ""), (["ps", "--help"], "ps"), (["cluster", "--help"], ""), (["nonsense"], "")]
)
def test_only_the_command_that_runs_is_imported(words: list[str], loaded: str) -> None:
    done = subprocess.run([sys.executable, "-c", _LISTED, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == (f"probing.client.commands.{loaded}" if loaded else "")


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stack"]) == 2
    assert "'stacks'" in capsys.readouterr().err
