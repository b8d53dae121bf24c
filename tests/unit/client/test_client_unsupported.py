"""Commands of Probing that need code in the job, and formats by the name of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from probing.client.commands.unsupported import nearest
from probing.client.main import main
from probing.client.settings import format_of


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("print(f'Step: {trainer.current_step}')", "vars trainer.current_step"),
        ("loss.item(); print(step, loss)", "vars step loss"),
        ("x", "vars x"),
    ],
)
def test_what_code_names_can_be_read_from_outside(code: str, names: str) -> None:
    assert nearest(code).endswith(names)


@pytest.mark.parametrize(
    "code", ["import torch.distributed as dist; print(dist.get_rank())", "print(1", "", "(" * 5000, "\0"]
)
def test_other_code_gets_a_hint_to_ps(code: str) -> None:
    assert "probingctl ps" in nearest(code)


@pytest.mark.parametrize("words", [["launch", "-r", "python"], ["inject", "-D", "k=v"]])
def test_the_commands_are_known(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "\nhint: " in err


def test_where_the_daemon_listens_is_not_changed_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "probing.server.port=8080"]) == 2
    assert "--listen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.json", "json"), ("a.CSV", "csv"), ("a.parquet", "parquet"), ("a.txt", "table"), ("table", "table")],
)
def test_the_format_is_what_the_file_is_named_after(name: str, kind: str, tmp_path: Path) -> None:
    assert format_of(tmp_path / name) == kind


def test_what_is_appended_to_gets_a_document_a_line(tmp_path: Path) -> None:
    kept = os.dup(1)
    try:
        for flags, kind in ((os.O_APPEND, "jsonl"), (os.O_TRUNC, "json")):
            fd = os.open(tmp_path / "traces.json", os.O_CREAT | os.O_WRONLY | flags)
            os.dup2(fd, 1)
            os.close(fd)
            assert format_of(None) == kind
    finally:
        os.dup2(kept, 1)
        os.close(kept)
