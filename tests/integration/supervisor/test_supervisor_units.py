"""The systemd units: valid, hardened, with the same rights and commands as the supervisor gives."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from probing.api.errors import InternalError, StoreFull
from probing.client.commands.web import Options
from probing.daemon.config import Config
from probing.daemon.supervisor.children import COLLECTOR_MEMORY, FEW_THREADS, PROGRAMS
from probing.daemon.supervisor.node_key import main
from probing.daemon.supervisor.ready import error_paths
from probing.daemon.supervisor.rights import COLLECTOR, INJECTOR, READER
from probing.daemon.supervisor.unit import ERROR_FILE, LASTING, status_of

ROOT = Path(__file__).resolve().parents[3]
UNITS = ROOT / "packaging" / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("probingd*.service"))
# No part of the daemon: a client, which asks with the tokens of its visitors.
PAGE = "probing-web.service"
PYTHON = "/opt/probingd/bin/python"
KINDS = ("collector", "service")
# Hides from a reader what it is there to read.
BLINDING = ("PrivateTmp", "ProtectProc", "PrivatePIDs", "PrivateUsers")


def settings(name: str) -> dict[str, str]:
    lines = (UNITS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with the interpreter of this checkout, so that their commands exist."""
    copied(UNITS, tmp_path)
    return tmp_path


def copied(units: Path, folder: Path) -> list[Path]:
    """Copies units with the interpreter of this checkout into a folder; returns the copies."""
    copies = [folder / path.name for path in sorted(units.glob("*.*"))]
    for copy in copies:
        copy.write_text((units / copy.name).read_text().replace(PYTHON, sys.executable))
    return copies


def complaints(units: Iterable[Path], *options: str) -> list[str]:
    """Returns what systemd has against ``units`` and against the order in which it would start them."""
    assert shutil.which("systemd-analyze"), "systemd-analyze is needed: `make deps` installs it"
    words = ["systemd-analyze", "verify", "--man=no", *options, *map(str, units)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "probing" in line]
    return [*lines, f"exit status {done.returncode}"] if done.returncode else lines


def test_systemd_takes_all_units(installed: Path) -> None:
    assert complaints(sorted(installed.iterdir())) == []


def test_systemd_takes_the_unit_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert complaints(copied(UNITS / "user", tmp_path), "--user") == []


def test_a_boot_starts_all_units(installed: Path) -> None:
    """Units that a boot cannot order are left out of it, a different one each time."""
    boot = installed / "boot.target"
    boot.write_text("[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=probingd.service\n")
    assert complaints([boot]) == []


@pytest.mark.parametrize("name", [*SERVICES, PAGE])
def test_exposure_is_small(name: str, installed: Path) -> None:
    """At most 4.0 of 10 for the collector, which needs its rights, and 2.5 for all others."""
    threshold = 40 if name == "probingd-collector.service" else 25
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold}", str(installed / name)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("name", SERVICES)
def test_each_process_is_under_the_limits_of_the_slice(name: str) -> None:
    assert settings(name)["Slice"] == "probingd.slice"
    assert {"MemoryMax", "CPUQuota", "TasksMax"} <= set(settings("probingd.slice"))


def test_what_collects_has_the_cpu_first() -> None:
    """Each process has a control group of its own, and niceness counts within a group only."""
    weight = {name.split("-")[-1].split(".")[0]: int(settings(name).get("CPUWeight", "100")) for name in SERVICES}
    collecting = min(weight[kind] for kind in ("collector", "reader@"))
    serving = [weight[kind] for kind in ("service", "parser@", "nvml@")]
    others = max(weight[kind] for kind in ("sql@", "maintenance@", "hook@", "interpreter@"))
    assert collecting > max(serving)
    assert min(serving) > others
    # A full pool of workers has no more than the collector.
    assert weight["collector"] >= 8 * others


@pytest.mark.parametrize(
    ("name", "kind", "user", "capabilities"),
    [
        ("probingd-collector.service", "collector", "probing", (*COLLECTOR, "SYSLOG")),
        ("probingd-reader@.service", "reader", "probing", READER),
        ("probingd-injector@.service", "injector", "probing", INJECTOR),
        ("probingd-parser@.service", "parser", "probing-worker", ()),
        ("probingd-nvml@.service", "nvml", "probing-worker", ()),
        ("probingd-maintenance@.service", "maintenance", "probing-worker", ()),
        ("probingd-sql@.service", "sql", "probing-worker", ()),
        ("probingd-hook@.service", "hook", "probing-worker", ()),
        ("probingd-interpreter@.service", "interpreter", "probing-worker", ()),
        ("probingd-service.service", "service", "probing-service", ()),
        ("probingd.service", "ready", "probing-service", ()),
    ],
)
def test_rights_and_commands_are_those_of_the_supervisor(
    name: str, kind: str, user: str, capabilities: tuple[str, ...]
) -> None:
    unit = settings(name)
    wanted = {f"CAP_{capability}" for capability in capabilities}
    assert set(unit["CapabilityBoundingSet"].split()) == wanted
    assert set(unit.get("AmbientCapabilities", "").split()) == wanted
    assert unit["User"] == user
    assert unit["NoNewPrivileges"] == "yes"
    python, *words = unit["ExecStart"].split()
    assert python == PYTHON
    # Under the supervisor the processes say themselves that they answer.
    assert words[:3] == list({**PROGRAMS, "ready": ("-I", "-m", "probing.daemon.supervisor.ready")}[kind])
    Config.from_args([word for word in words[3:] if not word.startswith("--config=")])
    if "SYS_PTRACE" in capabilities:
        assert not set(BLINDING) & set(unit)


def test_the_page_has_a_user_of_its_own_without_rights_and_is_off() -> None:
    unit = settings(PAGE)
    assert unit["DynamicUser"] == "yes"
    assert unit["CapabilityBoundingSet"] == ""
    # The group of the Unix socket, on which a visitor's token would not count.
    assert "SupplementaryGroups" not in unit
    assert not unit["Environment"].startswith("PROBING_TARGET=unix:")
    assert not any(PAGE in (UNITS / name).read_text() for name in ("probingd.service", "probingd.target"))
    words = unit["ExecStart"].split()
    assert words[:4] == [PYTHON, "-I", "/opt/probingd/bin/probingctl", "web"]
    given = {word.lstrip("-") for word in words if word.startswith("--")} - {"all-nodes"}
    assert given <= {field.name for field in fields(Options)}


def test_the_service_is_handed_the_key_of_its_own_configuration() -> None:
    unit = settings("probingd-service.service")
    before, start = (unit[key].lstrip("-+").split() for key in ("ExecStartPre", "ExecStart"))
    assert before[:3] == [PYTHON, "-I", "-m"]
    assert before[3] == main.__module__
    assert before[4:] == start[4:]
    assert unit["ExecStartPre"].startswith("-+")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("probingd-collector.service", {**FEW_THREADS, **COLLECTOR_MEMORY}),
        ("probingd-service.service", FEW_THREADS),
    ],
)
def test_the_units_give_the_environment_of_the_supervisor(name: str, wanted: dict[str, str]) -> None:
    given = dict(pair.split("=", 1) for pair in settings(name)["Environment"].split())
    del given[ERROR_FILE]
    assert given == wanted


def lines(name: str, key: str) -> list[str]:
    words = (line.partition("=") for line in (UNITS / name).read_text().splitlines())
    return [value for found, _, value in words if found == key]


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_restart_mends_is_not_restarted(kind: str) -> None:
    unit = settings(f"probingd-{kind}.service")
    words = ["systemd-analyze", "exit-status", *unit["RestartPreventExitStatus"].split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    numbers = {int(line.split()[1]) for line in done.stdout.splitlines()[1:]}
    assert set(LASTING) <= numbers
    # A bug, and what passes by itself, is started again.
    assert not {0, 1, status_of(StoreFull("")), status_of(InternalError(""))} & numbers


def test_the_error_of_a_unit_lies_where_ready_looks() -> None:
    files = [dict([settings(f"probingd-{kind}.service")["Environment"].split()[0].split("=", 1)]) for kind in KINDS]
    assert [found[ERROR_FILE] for found in files] == list(map(str, error_paths(Config.from_args([]))))


def test_a_reload_checks_before_it_restarts() -> None:
    check, restart, ready = lines("probingd.service", "ExecReload")
    assert check.split()[1:6] == ["-I", "-m", "probing.daemon.cli", "check", "--only-config"]
    # Its failure is what ``ready`` reports.
    assert restart == "-+systemctl restart probingd-collector.service probingd-service.service"
    assert [ready] == lines("probingd.service", "ExecStart")
    assert settings("probingd.service")["NotifyAccess"] == "exec"


def test_the_sockets_belong_to_those_who_connect() -> None:
    inner = Config.from_args([]).runtime_dir
    for name, user in (
        ("reader", "probing"),
        ("parser", "probing"),
        ("maintenance", "probing"),
        ("sql", "probing-service"),
        ("hook", "probing-service"),
        ("interpreter", "probing-service"),
        ("nvml", "probing"),
        ("injector", "probing"),
    ):
        unit = settings(f"probingd-{name}.socket")
        assert unit["ListenStream"] == f"{inner}/{name}.sock"
        assert (unit["SocketUser"], unit["SocketMode"], unit["Accept"]) == (user, "0600", "yes")


def test_the_injector_is_not_started_with_the_others() -> None:
    for name in ("probingd.service", "probingd.target", "probingd-collector.service", "probingd-service.service"):
        assert "injector" not in (UNITS / name).read_text()
    assert lines("probingd-injector.socket", "WantedBy") == ["probingd.target"]


def test_systemd_keeps_the_ports_of_the_service() -> None:
    """Over a restart of the unit, and of all of them: a stop for good alone closes what is stored."""
    unit = settings("probingd-service.service")
    # listen and http, and those of before while their address changes.
    assert int(unit["FileDescriptorStoreMax"]) >= 4
    assert unit["NotifyAccess"] == "main"
    assert "FileDescriptorStorePreserve" not in unit


def test_only_a_stop_reaches_the_pins() -> None:
    unit = settings("probingd-pins.service")
    assert unit["StopPropagatedFrom"] == "probingd.target"
    assert "PartOf" not in unit
    assert re.search(r"probing\.daemon\.cli cleanup\b", unit["ExecStop"])


def test_users_and_directories_are_made() -> None:
    users = (ROOT / "packaging" / "sysusers.d" / "probingd.conf").read_text()
    for user in ("probing", "probing-service", "probing-worker"):
        assert re.search(rf"^u\s+{user}\s", users, re.M)
    config = Config.from_args([])
    made = (ROOT / "packaging" / "tmpfiles.d" / "probingd.conf").read_text()
    for path in (config.runtime_dir, config.state_dir, config.pin_dir, config.socket):
        assert re.search(rf"^\S+\s+{re.escape(path)}\s", made, re.M)
