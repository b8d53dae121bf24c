"""``probingd check`` shows which features work on this machine, and what is lost without each missing feature."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from probing.api.errors import ConfigError, PrivilegeError, ProbingError
from probing.api.text import size
from probing.daemon.bpf import pins
from probing.daemon.bpf.capabilities import CONFIDENTIALITY, REMEDY, lockdown_mode
from probing.daemon.bpf.library import library
from probing.daemon.cli.options import Format, FormatOption, config_of, write_json
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import landlock_abi
from probing.daemon.confined.seccomp import calls_can_be_refused
from probing.daemon.supervisor.control import owner_of
from probing.daemon.supervisor.requirements import OLDEST_KERNEL, kernel_release, missing_users
from probing.daemon.supervisor.rights import (
    CAPABILITIES,
    changes_users,
    collector_capabilities,
    permitted,
    rights_table,
)
from probing.daemon.supervisor.runtime import pins_of

__all__ = ("Finding", "check", "check_config", "command", "needed_is_missing", "print_table")

AS_ROOT = "start it as root or by its systemd unit"
# Without these features the daemon collects nothing. Without other features it runs, but collects less.
NEEDED_FEATURES = ("btf", "ringbuf")
# Each of these features keeps a pinned probe in place while no collector runs.
LASTING_FEATURES = ("uprobe_multi", "perf_link", "event_map")
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
    """A line of the check. ``state``: ok, missing, limited or unknown. The daemon cannot run if a feature that is
    ``needed`` is missing.

    ``cost``: what is lost without the feature; ``remedy``: how to get the feature.
    """

    name: str
    state: str
    needed: bool
    detail: str
    cost: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


_OnlyConfig = Annotated[
    bool, typer.Option("--only-config", help="Check only the configuration, with the rights that this process has.")
]


def command(context: typer.Context, output: FormatOption = Format.TABLE, only_config: _OnlyConfig = False) -> int:
    """Check this host's features and what is lost without them; exit with 3 if a needed feature is missing."""
    config = config_of(context)
    if only_config:
        check_config(config)
        return 0
    findings = check(config)
    if output is Format.JSON:
        write_json([finding.to_dict() for finding in findings])
    else:
        print_table(findings, sys.stdout)
    return 3 if needed_is_missing(findings) else 0


def check_config(config: Config) -> None:
    """Checks limits, users, ports and their files. Raises the ConfigError that would end the collector or the service
    at the start.
    """
    # Imported late: these modules import large parts of the collector and the service.
    from probing.daemon.collector.settings import check_settings
    from probing.daemon.service.auth import Doors

    check_settings(config)
    Doors.of(config)


def check(config: Config) -> list[Finding]:
    """Returns the findings about this machine. Changes nothing, and raises nothing for a missing feature."""
    features, pinned = list(_library_and_features()), _pins(config)
    return [
        _kernel(),
        *_lockdown(),
        *features,
        _objects(),
        *_rights(config),
        _paranoid(),
        _tool("setpriv", "util-linux", "the daemon's processes cannot be started with their rights"),
        *_walls(),
        _state_dir(config),
        pinned,
        *([_restart(features)] if pinned.state == "ok" else []),
        _socket(config),
    ]


def needed_is_missing(findings: list[Finding]) -> bool:
    return any(finding.needed and finding.state == "missing" for finding in findings)


def print_table(findings: list[Finding], out: TextIO) -> None:
    """Prints a line for each finding, and below it the cost and the remedy of a missing feature."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "MISSING" if finding.state == "missing" else finding.state
        out.write(f"{mark:7}  {finding.name:{width}}  {finding.detail}".rstrip() + "\n")
        if finding.state != "ok":
            for word, text in (("needed" if finding.needed else "costs", finding.cost), ("remedy", finding.remedy)):
                if text:
                    out.write(f"{'':9}{'':{width}}  {word}: {text}\n")
    missing = [finding.name for finding in findings if finding.needed and finding.state == "missing"]
    out.write(f"cannot run without: {', '.join(missing)}\n" if missing else "probingd can run here\n")


def _finding(name: str, good: bool, needed: bool, detail: str, cost: str, remedy: str) -> Finding:
    return Finding(name, "ok" if good else "missing", needed, detail, cost, remedy)


def _kernel() -> Finding:
    oldest = ".".join(map(str, OLDEST_KERNEL))
    good = kernel_release() >= OLDEST_KERNEL
    cost, remedy = "programs cannot be loaded, or lack kernel functions", f"boot Linux {oldest} or newer"
    return _finding("kernel", good, True, os.uname().release, cost, remedy)


def _lockdown() -> Iterator[Finding]:
    """Yields the finding about the kernel's lockdown mode, in which the kernel refuses some calls even to root. Yields
    nothing if the kernel has no lockdown.
    """
    if mode := lockdown_mode():
        cost = "the kernel refuses programs that read its memory, and perf events"
        state = "limited" if mode == CONFIDENTIALITY else "ok"
        yield Finding("lockdown", state, False, mode, cost, REMEDY)


def _library_and_features() -> Iterator[Finding]:
    cost = "no program can be loaded"
    try:
        used = library()
    except PrivilegeError as e:
        yield Finding("libbpf", "missing", True, e.message, cost, e.hint or "")
        return
    yield Finding("libbpf", "ok", True, str(used), cost)
    # Importing this loads libbpf, so it is imported as late as possible.
    from probing.daemon.bpf.capabilities import capabilities

    for feature in capabilities():
        needed = feature.name in NEEDED_FEATURES
        if feature.untried:
            detail = "cannot be tried without CAP_BPF and CAP_PERFMON"
            yield Finding(feature.name, "unknown", needed, detail)
        else:
            yield _finding(feature.name, feature.present, needed, feature.reason, feature.cost, feature.remedy)


def _objects() -> Finding:
    sources = sorted(OBJECTS.glob("*.bpf.c"))
    lacking = [source.name for source in sources if not source.with_suffix(".o").exists()]
    detail = f"not built: {', '.join(lacking)}" if lacking else f"{len(sources)} built"
    cost = "the events of these programs are not collected"
    remedy = "install clang, and run `python -m probing.daemon.bpf.build`"
    return _finding("programs", not lacking, True, detail, cost, remedy)


def _rights(config: Config) -> Iterator[Finding]:
    yield _users(config)
    have, wanted = permitted(), collector_capabilities(config)
    for name in RIGHTS_COST:
        needed = name in wanted and name != "SYSLOG"
        if needed or name != "SYS_ADMIN":
            detail = f"capability {CAPABILITIES[name]}"
            yield _finding(f"CAP_{name}", name in have, needed, detail, RIGHTS_COST[name], AS_ROOT)


def _users(config: Config) -> Finding:
    if not changes_users():
        cost = "all processes run as one user: the service could read all that readers may read"
        return Finding("users", "limited", False, f"cannot change the user from uid {os.getuid()}", cost, AS_ROOT)
    if missing := missing_users(config.users):
        return Finding("users", "ok", False, f"`probingd run` makes {', '.join(missing)}")
    try:
        rights_table(config)
    except ConfigError as e:
        return Finding(
            "users", "missing", True, e.message, "the daemon's processes cannot have users of their own", e.hint or ""
        )
    return Finding("users", "ok", False, "each process gets its own user")


def _paranoid() -> Finding:
    path = Path("/proc/sys/kernel/perf_event_paranoid")
    try:
        level = int(path.read_text())
    except (OSError, ValueError):
        cost, remedy = "new mappings are found by polling", "boot a kernel with CONFIG_PERF_EVENTS"
        return Finding("perf events", "missing", False, f"no {path}", cost, remedy)
    cost = "above level 2, some kernels refuse perf events without CAP_SYS_ADMIN: new mappings are found by polling"
    state, detail = "ok" if level <= 2 else "limited", f"perf_event_paranoid {level}"
    return Finding("perf events", state, False, detail, cost, "sysctl kernel.perf_event_paranoid=2")


def _tool(name: str, package: str, cost: str) -> Finding:
    found = shutil.which(name)
    return _finding(name, bool(found), True, found or "not on PATH", cost, f"install {package}")


def _walls() -> Iterator[Finding]:
    """Yields findings about Landlock and seccomp, which confine SQL workers and parsers further."""
    abi = landlock_abi()
    cost = "only the rights of their user keep workers from files"
    remedy = "boot Linux 5.13 or newer with landlock among the security modules (lsm=)"
    yield _finding("landlock", abi >= 1, False, f"version {abi}", cost, remedy)
    cost = "a worker under an attacker's control can make any system call"
    remedy = "boot a kernel with CONFIG_SECCOMP_FILTER, or allow it in the container"
    yield _finding("seccomp", calls_can_be_refused(), False, "filters of system calls", cost, remedy)


def _state_dir(config: Config) -> Finding:
    path = Path(config.state_dir)
    choose = "choose another state_dir"
    existing = path
    while not existing.exists():
        existing = existing.parent
    try:
        free = shutil.disk_usage(existing).free
    except OSError as e:
        return Finding("state directory", "missing", True, f"{path}: {e.strerror}", "rows cannot be kept", choose)
    detail = f"{path}, {size(free)} free"
    if not os.access(existing, os.W_OK):
        return Finding("state directory", "missing", True, f"{detail}, not writable", "rows cannot be kept", choose)
    if free <= config.store.keep_free_bytes:
        cost = "the oldest rows are dropped, then new rows are refused: store.keep_free_bytes asks for more free space"
        return Finding("state directory", "limited", False, detail, cost, f"free some space, or {choose}")
    return Finding("state directory", "ok", True, detail)


def _pins(config: Config) -> Finding:
    folder = pins_of(config)

    def ask() -> Finding:
        there = pins.existing(folder)
        try:
            pins.require_writable(there)
        except PrivilegeError as e:
            return _finding("pins", False, True, e.message, "nothing can be loaded", e.hint)
        good = pins.possible(there)
        detail = "present" if there == folder else f"none, to be made under {there}"
        detail = detail if good else f"no BPF file system to write to at {there}"
        remedy = pins.MOUNT_HINT if os.geteuid() == 0 else AS_ROOT
        return _finding("pins", good, True, detail, "nothing can be loaded", remedy)

    return _asked("pins", ask)


def _restart(features: list[Finding]) -> Finding:
    """Returns the finding about the data that are lost when the collector is killed or restarted."""
    states = {finding.name: finding.state for finding in features if finding.name in LASTING_FEATURES}
    lasting = [name for name in LASTING_FEATURES if states.get(name) == "ok"]
    if not lasting and "unknown" in states.values():
        return Finding("restart", "unknown", False, "cannot be tried without CAP_BPF and CAP_PERFMON")
    detail = f"loses nothing: pinned probes record ({lasting[0]})" if lasting else "probes end with the collector"
    cost = "calls that are made while no collector runs are lost: probing.losses has a row for each process"
    return Finding("restart", "ok" if lasting else "limited", False, detail, cost, "boot Linux 5.10 or newer")


def _socket(config: Config) -> Finding:
    def ask() -> Finding:
        owner = owner_of(config)
        return Finding("socket", "ok", False, f"{config.socket}, {f'served by pid {owner}' if owner else 'free'}")

    return _asked("socket", ask)


def _asked(name: str, ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except (ProbingError, OSError) as e:
        return Finding(name, "limited", False, str(e), "its state is not known", "run this as root")
