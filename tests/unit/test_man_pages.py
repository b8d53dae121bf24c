"""The man pages: every command and option, every key of the configuration, and roff that mandoc and groff accept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from probing.client.app import GlobalOptions, program
from probing.daemon.cli.app import program as daemon_program
from probing.daemon.config import options

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, ROOT / "packaging" / "docs" / "man.py", path], check=True)
    return path


def shown(directory: Path, page: str) -> str:
    """What a reader of the page sees, on one line."""
    words = ["mandoc", "-T", "ascii", "-O", "width=200", directory / page]
    text = subprocess.run(words, capture_output=True, check=True, text=True).stdout
    return re.sub(r"\s+", " ", re.sub(r".\x08", "", text))


def test_the_installer_knows_the_pages(directory: Path) -> None:
    made = {str(path.relative_to(directory)) for path in directory.rglob("*.*")}
    listed = re.search(r'^man_pages="(.*)"$', (ROOT / "packaging" / "install-host.sh").read_text(), re.M)
    assert listed is not None
    assert made == set(listed[1].split())


def test_each_command_has_its_section(directory: Path) -> None:
    client, daemon = shown(directory, "man1/probingctl.1"), shown(directory, "man8/probingd.8")
    top = program()
    names = [name for name, command in top.commands.items() if not command.hidden]
    assert {"ps", "diagnose", "cluster", "ranks"} <= set(names)
    for name in names:
        assert f" probingctl {name} " in client
    for name in daemon_program().commands:
        assert f" probingd {name} " in daemon


def test_each_option_is_there(directory: Path) -> None:
    client = shown(directory, "man1/probingctl.1")
    names = {option for parameter in program().params for option in parameter.opts if option.startswith("--")}
    assert len(names) >= len(GlobalOptions.__dataclass_fields__) - 1
    assert [name for name in sorted(names) if f"{name} " not in client and f"{name}," not in client] == []
    assert "--off-cpu Only time off the CPU." in client
    keys = shown(directory, "man5/probingd.toml.5")
    assert [key for key, option in options() if f" {key} (default: " not in keys] == []


def test_what_looks_like_roff_stays_text(directory: Path) -> None:
    # A pattern with quotes, braces and brackets, a line that begins with a dot, and characters beyond ASCII.
    assert '["NCCL WARN", "unhandled system error"' in shown(directory, "man5/probingd.toml.5")
    words = ["mandoc", "-T", "utf8", directory / "man1/probingctl.1"]
    client = subprocess.run(words, capture_output=True, check=True, text=True).stdout
    assert "├─ [7] __next__ (/home/user/data.py:12)" in client


def test_pages_are_built_alike(directory: Path, tmp_path: Path) -> None:
    page = (directory / "man8/probingd.8").read_text()
    words = [sys.executable, ROOT / "packaging" / "docs" / "man.py", tmp_path]
    subprocess.run(words, check=True, env={"SOURCE_DATE_EPOCH": "86400"})
    again = (tmp_path / "man8/probingd.8").read_text()
    assert again.splitlines()[0].startswith(".TH PROBINGD 8 1970-01-02 ")
    assert again.splitlines()[1:] == page.splitlines()[1:]


def test_formatters_have_no_complaint(directory: Path) -> None:
    for path in sorted(directory.rglob("*.*")):
        for words in (["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-ww", "-z", "-man", "-T", "utf8"]):
            done = subprocess.run([*words, path], capture_output=True, check=False, text=True)
            assert (done.returncode, done.stdout + done.stderr) == (0, "")
