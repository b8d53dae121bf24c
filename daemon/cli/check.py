"""``probingd check``: what works on this machine, and what each lack costs."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import typer

from probing.api.errors import ConfigError, PrivilegeError, ProbingError
from probing.daemon.cli.options import Format, FormatOption, config_of, write_json
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import landlock_abi
from probing.daemon.confined.seccomp import calls_can_be_refused
from probing.daemon.supervisor.lock import owner_of
from probing.daemon.supervisor.requirements import OLDEST_KERNEL, kernel_release, load_libbpf
from probing.daemon.supervisor.rights import CAPABILITIES, RightsTable, permitted, rights_table
from probing.daemon.supervisor.runtime import pins_of

__all__ = ("Finding", "check", "command", "needed_is_missing", "print_table")

# Without these nothing can be collected; every other lack costs something, and the daemon runs.
NEEDED_FEATURES = ("btf", "ringbuf")
RIGHTS_COST = {
    "BPF": "no program can be loaded: no collectives, no process events",
    "PERFMON": "no program can read what it watches: no collectives, no process events",
    "SYS_PTRACE": "no stacks, no mappings of other users' processes",
    "DAC_READ_SEARCH": "no environment of other users' processes: no job, no rank",
    "SYSLOG": "no kernel log: an OOM kill or an XID is not explained",
    "SYS_ADMIN": "no uprobes by perf events: no collectives",
}
OBJECTS = Path(__file__).resolve().parents[1] / "bpf"


@dataclass(frozen=True)
class Finding:
    """One line: ``state`` is ok, missing, limited or unknown; only what is ``needed`` and missing stops the daemon."""

    name: str
    state: str
    needed: bool
    detail: str
    cost: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def command(context: typer.Context, output: FormatOption = Format.TABLE) -> int:
    """List what works here and what each lack costs; 3 when something needed is missing."""
    findings = check(config_of(context))
    if output is Format.JSON:
        write_json([finding.to_dict() for finding in findings])
    else:
        print_table(findings, sys.stdout)
    return 3 if needed_is_missing(findings) else 0


def check(config: Config) -> list[Finding]:
    """Look at everything. Changes nothing, and raises nothing for what is missing."""
    return [
        _kernel(),
        *_library_and_features(),
        _objects(),
        *_rights(config),
        _paranoid(),
        _tool("setpriv", "util-linux", "no process can be given its rights"),
        *_walls(),
        _state_dir(config),
        _pins(config),
        _socket(config),
    ]


def needed_is_missing(findings: list[Finding]) -> bool:
    return any(finding.needed and finding.state == "missing" for finding in findings)


def print_table(findings: list[Finding], out: TextIO) -> None:
    """For people: a line each, and the cost under what is missing."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "MISSING" if finding.state == "missing" else finding.state
        out.write(f"{mark:7}  {finding.name:{width}}  {finding.detail}".rstrip() + "\n")
        if finding.state != "ok" and finding.cost:
            out.write(f"{'':9}{'':{width}}  {'needed' if finding.needed else 'costs'}: {finding.cost}\n")
    missing = [finding.name for finding in findings if finding.needed and finding.state == "missing"]
    out.write(f"cannot run without: {', '.join(missing)}\n" if missing else "probingd can run here\n")


def _finding(name: str, good: bool, needed: bool, detail: str, cost: str) -> Finding:
    return Finding(name, "ok" if good else "missing", needed, detail, cost)


def _kernel() -> Finding:
    oldest = ".".join(map(str, OLDEST_KERNEL))
    good = kernel_release() >= OLDEST_KERNEL
    return _finding("kernel", good, True, os.uname().release, f"Linux {oldest} or newer is needed")


def _library_and_features() -> Iterator[Finding]:
    cost = "no program can be loaded: install libbpf1"
    try:
        load_libbpf()
    except PrivilegeError as e:
        yield Finding("libbpf", "missing", True, e.message, cost)
        return
    yield Finding("libbpf", "ok", True, "libbpf.so.1", cost)
    # Loads libbpf itself, so only now.
    from probing.daemon.bpf.capabilities import capabilities

    for found in capabilities():
        needed = found.name in NEEDED_FEATURES
        if found.reason == os.strerror(errno.EPERM):
            yield Finding(found.name, "unknown", needed, "cannot be tried without CAP_BPF and CAP_PERFMON", "")
        else:
            yield _finding(found.name, found.present, needed, found.reason, found.cost)


def _objects() -> Finding:
    sources = sorted(OBJECTS.glob("*.bpf.c"))
    lacking = [source.name for source in sources if not source.with_suffix(".o").exists()]
    detail = f"not built: {', '.join(lacking)}" if lacking else f"{len(sources)} built"
    return _finding("programs", not lacking, True, detail, "build them: `python -m probing.daemon.bpf.build`")


def _rights(config: Config) -> Iterator[Finding]:
    try:
        rights = rights_table(config)
    except (ConfigError, PrivilegeError) as e:
        yield Finding("users", "missing", True, e.message, e.hint)
        return
    yield _users(rights)
    have = permitted()
    for name in RIGHTS_COST:
        needed = name in rights.collector.capabilities and name != "SYSLOG"
        if needed or name != "SYS_ADMIN":
            detail = f"capability {CAPABILITIES[name]}"
            yield _finding(f"CAP_{name}", name in have, needed, detail, RIGHTS_COST[name])


def _users(rights: RightsTable) -> Finding:
    if rights.switches:
        return Finding("users", "ok", False, "each process gets its own user", "")
    cost = "all processes run as one user: the service could reach what readers may read"
    return Finding("users", "limited", False, f"cannot change the user from uid {os.getuid()}", cost)


def _paranoid() -> Finding:
    path = Path("/proc/sys/kernel/perf_event_paranoid")
    try:
        level = int(path.read_text())
    except (OSError, ValueError):
        return Finding("perf events", "missing", False, f"no {path}", "new mappings are found by polling")
    cost = "above 2 some kernels refuse perf events without CAP_SYS_ADMIN: new mappings are found by polling"
    return Finding("perf events", "ok" if level <= 2 else "limited", False, f"perf_event_paranoid {level}", cost)


def _tool(name: str, package: str, cost: str) -> Finding:
    found = shutil.which(name)
    return _finding(name, bool(found), True, found or f"install {package}", cost)


def _walls() -> Iterator[Finding]:
    """What keeps SQL workers and parsers in besides having no rights."""
    abi = landlock_abi()
    cost = "workers are kept from files by their user alone"
    yield _finding("landlock", abi >= 1, False, f"version {abi}", cost)
    cost = "a worker that is taken over can make any system call"
    yield _finding("seccomp", calls_can_be_refused(), False, "filters of system calls", cost)


def _state_dir(config: Config) -> Finding:
    path = Path(config.state_dir)
    there = path
    while not there.exists():
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError as e:
        return Finding("state directory", "missing", True, f"{path}: {e.strerror}", "choose another")
    detail = f"{path}, {free >> 20} MiB free"
    if not os.access(there, os.W_OK):
        return Finding("state directory", "missing", True, f"{detail}, not writable", "rows cannot be kept")
    if free <= config.store.keep_free_bytes:
        return Finding("state directory", "limited", False, detail, "less is free than store.keep_free_bytes asks")
    return Finding("state directory", "ok", True, detail, "")


def _pins(config: Config) -> Finding:
    pins = pins_of(config)
    there = pins
    while not there.exists():
        there = there.parent
    return _asked("pins", lambda: "present" if pins.exists() else f"none, to be made under {there}")


def _socket(config: Config) -> Finding:
    def ask() -> str:
        owner = owner_of(config)
        return f"{config.socket}, served by pid {owner}" if owner else f"{config.socket}, free"

    return _asked("socket", ask)


def _asked(name: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", False, ask(), "")
    except (ProbingError, OSError) as e:
        return Finding(name, "limited", False, str(e), "ask as root")
