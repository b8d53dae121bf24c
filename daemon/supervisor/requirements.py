"""Checks in a millisecond, before anything starts, whether the host meets the daemon's requirements. Makes the daemon's
users and group where no package has made them, as packaging/sysusers.d/probingd.conf does.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from probing.api.errors import ConfigError, PrivilegeError
from probing.daemon.bpf.library import library
from probing.daemon.config import UsersConfig
from probing.daemon.supervisor.rights import RightsTable

__all__ = (
    "OLDEST_KERNEL",
    "kernel_release",
    "make_missing_users",
    "missing_users",
    "needs_sys_admin",
    "raise_limits",
    "require",
)

_BTF = Path("/sys/kernel/btf/vmlinux")
# The oldest kernel that is tested: the first long-term kernel with BTF, ring buffers and CAP_BPF.
OLDEST_KERNEL = (5, 10)
# The first kernel with uprobe_multi. Some older kernels of distributions have it too, so features are tried.
MULTI_KERNEL = (6, 6)
OPEN_FILES = 65536
# Descriptors for pins, rings and links of all sources, and for a connection for each reader, caller and worker.
FEWEST_FILES = 1024
_HAS_MULTI = "import sys; from probing.daemon.bpf.capabilities import detect; sys.exit(not detect().uprobe_multi)"


def require(rights: RightsTable) -> None:
    """Raises PrivilegeError for the first requirement that this host does not meet."""
    if rights.missing:
        names = ", ".join(f"CAP_{name}" for name in rights.missing)
        hint = "start it as root or by its systemd unit; `probingd check` says what each capability is for"
        raise PrivilegeError(f"missing capabilities: {names}", hint=hint)
    if kernel_release() < OLDEST_KERNEL:
        hint = f"Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer is needed"
        raise PrivilegeError(f"the kernel {os.uname().release} is too old", hint=hint)
    if not _BTF.exists():
        hint = "a kernel built with CONFIG_DEBUG_INFO_BTF is needed; all current distributions have it"
        raise PrivilegeError(f"the kernel has no BTF: no {_BTF}", hint=hint)
    library()
    _require_reach(rights)


def raise_limits() -> None:
    """Raises the limit of open files and of locked memory, which counts BPF maps before Linux 5.11.

    Limits core dumps, which would contain data of jobs, to 1 byte: at 0 a program may still receive them (core(5)).
    Raises PrivilegeError when too few files may be open.
    """
    limits = {
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY,
        resource.RLIMIT_CORE: 1,
    }
    for limit, value in limits.items():
        # Without CAP_SYS_RESOURCE the limit stays as it is.
        with suppress(ValueError, PermissionError):
            resource.setrlimit(limit, (value, value))
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < min(most, OPEN_FILES):
        allowed = min(most, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if allowed < FEWEST_FILES:
        hint = f"allow {FEWEST_FILES} or more: LimitNOFILE= in a unit, `ulimit -n` in a shell"
        raise PrivilegeError(f"only {allowed} files may be open", hint=hint)


def _require_reach(rights: RightsTable) -> None:
    for path in (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__).resolve()):
        for account in (rights.collector.account, rights.service.account, rights.worker.account):
            if account and not account.may_reach(path):
                hint = "install probingd in a directory that all users may enter, for example below /opt"
                raise PrivilegeError(f"uid {account.uid}, one of the daemon's users, cannot reach {path}", hint=hint)


def kernel_release() -> tuple[int, int]:
    """Returns (major, minor) of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def needs_sys_admin() -> bool:
    """Returns whether uprobes need perf events on this kernel, and so CAP_SYS_ADMIN."""
    if kernel_release() >= MULTI_KERNEL:
        return False
    # Tested in another process: the supervisor would keep the imported modules for good.
    return subprocess.run([sys.executable, "-I", "-c", _HAS_MULTI], check=False).returncode != 0


_SHELL = "/usr/sbin/nologin"
_ROLES = ("collector", "service", "worker")


def missing_users(users: UsersConfig) -> list[str]:
    """Returns the names of missing default users, and the missing default group. Configured names are not checked:
    they must exist.
    """
    usual = UsersConfig()
    missing = [f"group {users.group}"] if users.group == usual.group and not _exists(grp.getgrnam, users.group) else []
    names = ((getattr(users, role), getattr(usual, role)) for role in _ROLES)
    return [*missing, *(name for name, default in names if name == default and not _exists(pwd.getpwnam, name))]


def make_missing_users(users: UsersConfig) -> list[str]:
    """Makes the users and the group of ``missing_users``, and returns their names. Raises ConfigError where the host
    cannot make them.
    """
    missing = missing_users(users)
    for name in missing:
        if name.startswith("group "):
            _run("groupadd", "--system", users.group)
        else:
            group = ("--no-user-group", "--gid", users.group) if name == users.collector else ("--user-group",)
            _run("useradd", "--system", "--no-create-home", *group, "--shell", _SHELL, name)
    return missing


def _exists(lookup: Callable[[str], object], name: str) -> bool:
    try:
        lookup(name)
    except KeyError:
        return False
    return True


def _run(tool: str, *arguments: str) -> None:
    hint = "make the users as packaging/sysusers.d/probingd.conf does, or set users.* to numbers, which need no user"
    path = shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise ConfigError(f"the daemon's user {arguments[-1]} is missing, and so is {tool}", hint=hint)
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    # 9: another start has made the user meanwhile.
    if done.returncode not in (0, 9):
        raise ConfigError(f"{tool} cannot make {arguments[-1]}: {done.stderr.strip()[:200]}", hint=hint)
