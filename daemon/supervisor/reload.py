"""Reads the configuration again for a running daemon, and refuses one that it could not run with."""

from __future__ import annotations

import subprocess
import sys

from probing.api.errors import ConfigError
from probing.daemon.config import Config, options, text_of
from probing.daemon.supervisor.rights import RightsTable

__all__ = ("FIXED", "check_reload")

# What the supervisor itself has made or given away: users, sockets, directories, capabilities.
FIXED = (
    "instance",
    "state_dir",
    "socket",
    "runtime_dir",
    "users.collector",
    "users.service",
    "users.worker",
    "users.group",
    "probes.bpffs",
    "probes.force_fallback",
)
_CHECK_S = 20.0


def check_reload(before: Config, after: Config, rights: RightsTable) -> list[str]:
    """Returns the keys that differ. Raises ConfigError when the daemon cannot go on with ``after``.

    The service's user checks it, who has to be able to read the files that it names, in a process of its own, whose
    imports would stay in this one.
    """
    changed = [key for key, _ in options() if text_of(before, key) != text_of(after, key)]
    if fixed := [key for key in changed if key in FIXED]:
        raise ConfigError(f"a reload cannot change {', '.join(fixed)}", hint="stop probingd and start it again")
    words = [*rights.command(rights.service), sys.executable, "-I", "-m", "probing.daemon.cli", "check"]
    # All that differs from the defaults is in the arguments.
    words += ["--only-config", "--config=/dev/null", *after.to_args()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the configuration was not checked in {_CHECK_S:.0f} s", hint="reload again") from None
    if done.returncode:
        error, _, hint = done.stderr.strip().rpartition("\nhint: ")
        raise ConfigError((error or hint).rpartition("error: ")[2], hint=hint if error else "")
    return changed
