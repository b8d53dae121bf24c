"""The rights of each process, and the ``setpriv`` command that grants exactly these rights.

The numbers come from include/uapi/linux/capability.h. setpriv gets numbers, since old builds lack the newest names
(libcap-ng before 0.8.1 lacks CAP_BPF).
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ConfigError, PrivilegeError
from probing.daemon.config import Config

__all__ = (
    "CAPABILITIES",
    "COLLECTOR",
    "INJECTOR",
    "READER",
    "Account",
    "Rights",
    "RightsTable",
    "changes_users",
    "collector_capabilities",
    "device_groups",
    "effective",
    "permitted",
    "rights_table",
)

CAPABILITIES = {
    "CHOWN": 0,
    "DAC_READ_SEARCH": 2,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYSLOG": 34,
    "PERFMON": 38,
    "BPF": 39,
}
COLLECTOR = ("BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH")
READER = ("SYS_PTRACE", "DAC_READ_SEARCH")
INJECTOR = ("SYS_PTRACE",)


class Account(NamedTuple):
    """A user, its main group and its supplementary groups, as numbers."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    def may_create_in(self, directory: Path) -> bool:
        """Returns whether the user can create files in ``directory``, by the mode bits of the whole path."""
        if self.uid == 0:
            return directory.is_dir()
        return self.may_reach(directory) and self._bits(directory) & 3 == 3

    def may_reach(self, path: Path) -> bool:
        """Returns whether the user may pass through every directory above ``path``."""
        return self.uid == 0 or all(self._bits(parent) & 1 for parent in path.parents)

    def _bits(self, path: Path) -> int:
        try:
            found = path.stat()
        except OSError:
            return 0
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid == self.uid:
            return mode >> 6 & 7
        return mode >> 3 & 7 if found.st_gid in (self.gid, *self.groups) else mode & 7


class Rights(NamedTuple):
    """The user and capabilities of a process. ``account``: None for the supervisor's user, if the supervisor cannot
    change users.
    """

    account: Account | None
    capabilities: tuple[str, ...]

    def command(self, *, drop_bounding: bool = True) -> list[str]:
        """Returns the arguments to put before a command, so that it has only these rights and ends when its parent
        ends.
        """
        words = [_setpriv(), "--no-new-privs", "--pdeathsig=SIGTERM"]
        if self.account:
            words += [f"--reuid={self.account.uid}", f"--regid={self.account.gid}"]
            extra = ",".join(map(str, self.account.groups))
            words.append(f"--groups={extra}" if extra else "--clear-groups")
        chosen = ",".join(["-all", *(f"+cap_{CAPABILITIES[name]}" for name in self.capabilities)])
        words += [f"--inh-caps={chosen}", f"--ambient-caps={chosen}"]
        if drop_bounding:
            words.append(f"--bounding-set={chosen}")
        return words


@dataclass(frozen=True)
class RightsTable:
    """The rights of each kind of process for one configuration."""

    switches: bool
    collector: Rights
    reader: Rights
    injector: Rights
    parser: Rights
    nvml: Rights
    service: Rights
    worker: Rights
    group: int

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Capabilities that the collector needs and this process lacks."""
        have = permitted()
        return tuple(name for name in self.collector.capabilities if name not in have)

    @cached_property
    def drops_bounding(self) -> bool:
        return "SETPCAP" in permitted()

    def command(self, rights: Rights) -> list[str]:
        return rights.command(drop_bounding=self.drops_bounding)


def permitted(pid: str = "self") -> frozenset[str]:
    """Returns the permitted capabilities of process ``pid`` that are in CAPABILITIES."""
    return _capabilities(pid, "CapPrm")


def effective(pid: str = "self") -> frozenset[str]:
    return _capabilities(pid, "CapEff")


def changes_users() -> bool:
    """Returns whether this process may start its children as other users."""
    return permitted() >= {"SETUID", "SETGID", "SETPCAP", "CHOWN"}


def collector_capabilities(config: Config, *, sys_admin: bool = False) -> tuple[str, ...]:
    """Returns the capabilities that the collector needs, and SYSLOG if this process has it."""
    needed = (*COLLECTOR, "SYS_ADMIN") if sys_admin or config.probes.force_fallback else COLLECTOR
    return (*needed, "SYSLOG") if "SYSLOG" in permitted() else needed


def rights_table(config: Config, *, sys_admin: bool = False) -> RightsTable:
    """Returns the rights for ``config``, whose users are looked up. ``sys_admin``: the collector also needs
    CAP_SYS_ADMIN, as the kernel lacks uprobe_multi.

    Raises ConfigError for an unknown user or group.
    """
    collects = collector_capabilities(config, sys_admin=sys_admin)
    if not changes_users():
        return RightsTable(
            switches=False,
            collector=Rights(None, collects),
            reader=Rights(None, READER),
            injector=Rights(None, INJECTOR),
            parser=Rights(None, ()),
            nvml=Rights(None, ()),
            service=Rights(None, ()),
            worker=Rights(None, ()),
            group=os.getgid(),
        )
    users = config.users
    group = _group(users.group)
    # Files of the state directory belong to this group, so that SQL workers can read them.
    collector = Account(_account("collector", users.collector, group).uid, group, ())
    worker = _account("worker", users.worker, group)
    service = _account("service", users.service, group)
    return RightsTable(
        switches=True,
        collector=Rights(collector, collects),
        reader=Rights(collector, READER),
        injector=Rights(collector, INJECTOR),
        parser=Rights(Account(worker.uid, worker.gid, ()), ()),
        nvml=Rights(Account(worker.uid, worker.gid, device_groups()), ()),
        service=Rights(service, ()),
        worker=Rights(Account(worker.uid, group, ()), ()),
        group=group,
    )


def device_groups(control: Path = Path("/dev/nvidiactl")) -> tuple[int, ...]:
    """Returns the group to which a site has given the files of NVIDIA's driver; empty if everybody may open them.

    The driver makes them with mode 0666 unless NVreg_DeviceFileMode says otherwise.
    """
    try:
        found = control.stat()
    except OSError:
        return ()
    mode = stat.S_IMODE(found.st_mode)
    # Not root's group: a process without rights must not be in it.
    return (found.st_gid,) if mode & 0o066 == 0o060 and found.st_gid else ()


def _capabilities(pid: str, field: str) -> frozenset[str]:
    text = Path(f"/proc/{pid}/status").read_text()
    mask = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith(f"{field}:"))
    return frozenset(name for name, bit in CAPABILITIES.items() if mask >> bit & 1)


def _setpriv() -> str:
    found = shutil.which("setpriv", path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")
    if not found:
        raise PrivilegeError("setpriv is missing", hint="install the package util-linux")
    return found


def _account(role: str, user: str, group: int) -> Account:
    if user.isdigit():
        return Account(int(user), int(user), (group,))
    try:
        found = pwd.getpwnam(user)
    except KeyError as e:
        hint = f"make it with `useradd --system --user-group {user}`, or set users.{role}"
        raise ConfigError(f"there is no user {user!r} for the {role}", hint=hint) from e
    return Account(found.pw_uid, found.pw_gid, (group,))


def _group(group: str) -> int:
    if group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as e:
        hint = f"make it with `groupadd --system {group}`, or set users.group"
        raise ConfigError(f"there is no group {group!r}", hint=hint) from e
