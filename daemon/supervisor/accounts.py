"""Makes the daemon's users and group where no package has made them, as packaging/sysusers.d/probingd.conf does."""

from __future__ import annotations

import grp
import pwd
import shutil
import subprocess
from collections.abc import Callable

from probing.api.errors import ConfigError
from probing.daemon.config import UsersConfig

__all__ = ("make_missing_users", "missing_users")

_SHELL = "/usr/sbin/nologin"
_ROLES = ("collector", "service", "worker")


def missing_users(users: UsersConfig) -> list[str]:
    """Returns which of the default users are missing, and of their group; a name that was chosen must exist."""
    usual = UsersConfig()
    missing = [f"group {users.group}"] if users.group == usual.group and not _exists(grp.getgrnam, users.group) else []
    names = ((getattr(users, role), getattr(usual, role)) for role in _ROLES)
    return [*missing, *(name for name, default in names if name == default and not _exists(pwd.getpwnam, name))]


def make_missing_users(users: UsersConfig) -> list[str]:
    """Makes what ``missing_users`` returns, and returns it. Raises ConfigError where the host cannot make them."""
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
    hint = "make the users as packaging/sysusers.d/probingd.conf does, or set users.* to numbers, which need none"
    found = shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if found is None:
        raise ConfigError(f"the daemon's user {arguments[-1]} is missing, and so is {tool}", hint=hint)
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    # 9: another start has made it meanwhile.
    if done.returncode not in (0, 9):
        raise ConfigError(f"{tool} cannot make {arguments[-1]}: {done.stderr.strip()[:200]}", hint=hint)
