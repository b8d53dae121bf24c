"""The command ``probingd``: what it says to people, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from probing.api.errors import AttachError, UsageError
from probing.daemon.bpf.capabilities import Capability, explained
from probing.daemon.cli import main
from probing.daemon.cli.check import LASTING_FEATURES, Finding, check, needed_is_missing, print_table
from probing.daemon.config import Config, options
from probing.daemon.supervisor import rights
from probing.daemon.supervisor.unit import LASTING, status_of


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["probingd", *args])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("args", [[], ["--help"], ["run", "--help"]])
def test_help_names_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run(monkeypatch, *args) == 0
    text = capsys.readouterr().out
    for word in ("run", "stop", "restart", "check", "cleanup", "version"):
        assert args == ["run", "--help"] or f"\n  {word} " in text
    for key, _ in options():
        assert f"--{key.replace('_', '-')} " in text


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("stop", ["--keep-pins", "--socket VALUE"]),
        ("restart", ["--socket VALUE"]),
        ("check", ["--only-config", "-f, --format"]),
        ("cleanup", ["--all", "--instance VALUE", "--probes.bpffs VALUE"]),
        ("import", ["--state-dir VALUE"]),
        ("verify", ["-f, --format", "--state-dir VALUE"]),
        ("version", []),
    ],
)
def test_help_of_a_command_has_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, own: list[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    text = capsys.readouterr().out
    assert [option for option in own if option not in text] == []
    assert ("`probingd run --help` lists them" in text) == (command != "version")
    # No other commands, and no keys that it does not read.
    assert "sampling.hz" not in text
    assert "\n  run " not in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["rum"], "run"),
        (["verfy"], "verify"),
        (["--versoin"], "version"),
        (["run", "--stat-dir=/x"], "state_dir"),
        (["check", "--socke", "/x"], "socket"),
    ],
)
def test_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], meant: str
) -> None:
    assert run(monkeypatch, *args) == 2
    assert capsys.readouterr().err.splitlines()[1] == f"hint: did you mean {meant}?"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["frobnicate"], "error: unknown command 'frobnicate'"),
        (["run", "--stor.max-bytes=1"], "error: unknown configuration key 'stor.max_bytes'"),
        (["version", "x"], "error: version takes no arguments"),
        (["check", "-f", "yaml"], "error: -f must be table or json"),
        (["check", "-f"], "error: -f must be table or json"),
    ],
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], error: str
) -> None:
    assert run(monkeypatch, *args) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == error
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")


def test_check_finds_each_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "permitted", lambda: frozenset({"BPF", "SYS_PTRACE"}))
    monkeypatch.setattr("probing.daemon.cli.check.permitted", lambda: frozenset({"BPF", "SYS_PTRACE"}))
    findings = {finding.name: finding for finding in check(Config.from_args([]))}
    for name, state in (("BPF", "ok"), ("PERFMON", "missing"), ("SYS_PTRACE", "ok"), ("DAC_READ_SEARCH", "missing")):
        assert (findings[f"CAP_{name}"].state, findings[f"CAP_{name}"].needed) == (state, True)
    assert findings["CAP_SYSLOG"].state == "missing"
    assert not findings["CAP_SYSLOG"].needed
    assert findings["users"].state == "limited"
    assert needed_is_missing(list(findings.values()))
    lacks = [finding for finding in findings.values() if finding.state in ("missing", "limited")]
    assert all(finding.cost and finding.remedy for finding in lacks)


def test_check_shows_the_lockdown_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lockdown(text: str) -> list[tuple[str, str]]:
        (tmp_path / "lockdown").write_text(text)
        monkeypatch.setattr("probing.daemon.bpf.capabilities.LOCKDOWN", tmp_path / "lockdown")
        return [(one.state, one.detail) for one in check(Config.from_args([])) if one.name == "lockdown"]

    assert lockdown("none integrity [confidentiality]\n") == [("limited", "confidentiality")]
    assert lockdown("none [integrity] confidentiality\n") == [("ok", "integrity")]
    monkeypatch.setattr("probing.daemon.bpf.capabilities.LOCKDOWN", tmp_path / "none")
    assert "lockdown" not in {one.name for one in check(Config.from_args([]))}


def test_a_refusal_by_a_locked_down_kernel_names_the_lockdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("probing.daemon.bpf.capabilities.LOCKDOWN", tmp_path / "lockdown")
    refused = AttachError("process does not load (Invalid argument): unknown func bpf_probe_read_kernel#113")
    assert explained(refused) is refused
    (tmp_path / "lockdown").write_text("none [integrity] confidentiality\n")
    assert explained(refused) is refused
    (tmp_path / "lockdown").write_text("none integrity [confidentiality]\n")
    found = explained(refused)
    assert status_of(found) in LASTING
    assert found.message.startswith("the kernel is locked down (confidentiality) and refuses our programs: process ")
    assert "lockdown=integrity" in found.hint


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lisen = 1\n", "unknown configuration key 'lisen'"),
        ("hang_s = -1.0\n", "hang_s"),
        ("listen = '0.0.0.0:1'\ntoken_file = 'x'\n", "unencrypted"),
        ("listen = '127.0.0.1:1'\ntoken_file = '/nowhere'\n", "/nowhere"),
        ("[store]\ntable_max_age_days = ['no.table=1']\n", "no stored table"),
        ("[users]\nservice = 'nobody-knows'\n", "no user 'nobody-knows'"),
        ("", ""),
    ],
)
def test_only_the_configuration_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, wanted: str
) -> None:
    file = tmp_path / "probingd.toml"
    file.write_text(text)
    user = [] if "[users]" in text else ["--users.service=0"]
    assert run(monkeypatch, "check", "--only-config", f"--config={file}", *user) == (2 if wanted else 0)
    output = capsys.readouterr()
    assert output.out == ""
    assert wanted in output.err
    assert output.err.startswith("error: ") == bool(wanted)


@pytest.mark.parametrize(
    ("features", "pins_work", "shown"),
    [
        ("uprobe_multi perf_link event_map", True, ("ok", "loses nothing: pinned probes record (uprobe_multi)")),
        ("perf_link event_map", True, ("ok", "loses nothing: pinned probes record (perf_link)")),
        ("event_map", True, ("ok", "loses nothing: pinned probes record (event_map)")),
        ("", True, ("limited", "probes end with the collector")),
        ("uprobe_multi", False, None),
    ],
)
def test_check_says_what_a_restart_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, pins_work: bool, shown: tuple[str, str] | None
) -> None:
    found = [Capability(name, name in features.split(), "much", "more") for name in LASTING_FEATURES]
    monkeypatch.setattr("probing.daemon.bpf.capabilities.capabilities", lambda: found)
    monkeypatch.setattr("probing.daemon.cli.check.library", lambda: "libbpf")
    monkeypatch.setattr("probing.daemon.bpf.pins.possible", lambda _: pins_work)
    findings = {finding.name: finding for finding in check(Config.from_args([f"--probes.bpffs={tmp_path}"]))}
    assert (findings["pins"].state, findings["pins"].needed) == ("ok" if pins_work else "missing", True)
    restart = findings.get("restart")
    assert (restart and (restart.state, restart.detail)) == shown


def test_json_has_every_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(monkeypatch, "check", "-f", "json", "--users.collector=0", "--users.service=0", "--users.worker=0")
    rows = json.loads(capsys.readouterr().out)
    assert code == (3 if any(row["needed"] and row["state"] == "missing" for row in rows) else 0)
    assert {"kernel", "libbpf", "btf", "state directory", "socket", "setpriv"} <= {row["name"] for row in rows}
    assert all(set(row) == {"name", "state", "needed", "detail", "cost", "remedy"} for row in rows)


def test_the_table_says_what_stops_it() -> None:
    out = io.StringIO()
    good = Finding("kernel", "ok", True, "6.12", "")
    bad = Finding("libbpf", "missing", True, "not there", "no program can be loaded", "install it")
    print_table([good, bad], out)
    assert out.getvalue().splitlines() == [
        "ok       kernel  6.12",
        "MISSING  libbpf  not there",
        "                 needed: no program can be loaded",
        "                 remedy: install it",
        "cannot run without: libbpf",
    ]
    assert needed_is_missing([good, bad])
    assert not needed_is_missing([good])


def test_a_usage_error_has_a_hint() -> None:
    assert UsageError("x").hint
