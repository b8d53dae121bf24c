"""``diagnose --facts FILE``: it asks no node, and refuses what is no file of facts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosis_cases import facts, history, rank

from probing.client.main import main
from probing.diagnosis.facts import Missing
from probing.diagnosis.facts_file import save


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Facts of two jobs that are well."""
    found = facts(*(rank(n, *history(811, ago=0.2)) for n in range(2)))
    save(tmp_path / "facts.json", [replace(found, job="\x1b[31mb"), replace(found, job="a")])
    return tmp_path / "facts.json"


def test_a_file_needs_no_daemon(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--facts", str(file), "-t", "unix:/nowhere"]) == 0
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines() if line] == ["job \\x1b[31mb", "job a"]
    assert err == ""


def test_json_is_one_object_and_rows_are_flat(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--facts", str(file), "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], [other["job"] for other in found["others"]]) == ("healthy", ["a"])
    assert main(["diagnose", "--facts", str(file), "-f", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_node_that_is_missing_leaves_it_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(rank(0, *history(811, ago=0.2)), missing=(Missing("node", "node b did not answer: gone", node="b"),))
    save(tmp_path / "facts.json", [found])
    assert main(["diagnose", "--facts", str(tmp_path / "facts.json")]) == 4
    assert "  - node b did not answer: gone\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 99,
        b"[]",
        b"{}",
        b'{"format": "probing-facts", "version": 99, "facts": 1}\n{}\n',
        b'{"format": "probing-facts", "version": 1, "facts": 1}\n{"version": 1}\n',
        b"[" * 100_000,
    ],
    ids=["empty", "zeros", "list", "object", "another version", "nothing in it", "deep"],
)
def test_a_bad_file_is_one_error_with_a_hint(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_bytes(content)
    assert main(["diagnose", "--facts", str(tmp_path / "bad")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_a_cut_file_is_an_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes()[:-40])
    assert main(["diagnose", "--facts", str(file)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [["--watch", "--history"], ["--facts", "x", "--save", "y"], ["--facts", "x", "--job", "j"], ["--since", "never"]],
)
def test_options_that_exclude_each_other(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
