"""The users that a wheel does not make: the host's tools make them at the first start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAKE = """
import grp, pwd
from probing.daemon.config import UsersConfig
from probing.daemon.supervisor.requirements import make_missing_users, missing_users
users = UsersConfig(worker="chosen")
print(missing_users(users), make_missing_users(users), missing_users(users))
accounts = [pwd.getpwnam(name) for name in ("probing", "probing-service")]
print([(grp.getgrgid(one.pw_gid).gr_name, one.pw_shell, one.pw_uid < 1000) for one in accounts])
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Returns an /etc whose files know no user but root."""
    (tmp_path / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "group").write_text("root:x:0:\n")
    for secret in ("shadow", "gshadow"):
        (tmp_path / secret).touch()
    (tmp_path / "nsswitch.conf").write_text("passwd: files\ngroup: files\n")
    return tmp_path


def made_in(etc: Path, *, tools: bool) -> subprocess.CompletedProcess[str]:
    hide = "" if tools else "mount --bind /dev/null /usr/sbin/useradd; mount --bind /dev/null /usr/sbin/groupadd;"
    command = ["unshare", "--mount", "sh", "-ec", f'{hide} mount --bind {etc} /etc; exec "$@"', "sh"]
    return subprocess.run([*command, sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=60)


def test_the_default_users_are_made_and_no_chosen_one(etc: Path) -> None:
    done = made_in(etc, tools=True)
    missing = "['group probing', 'probing', 'probing-service']"
    shell = "'/usr/sbin/nologin'"
    assert done.stdout.splitlines() == [
        f"{missing} {missing} []",
        f"[('probing', {shell}, True), ('probing-service', {shell}, True)]",
    ], done.stderr


def test_without_the_tools_the_error_has_a_remedy(etc: Path) -> None:
    done = made_in(etc, tools=False)
    assert "ConfigError: the daemon's user probing is missing, and so is groupadd" in done.stderr
