"""Keeps the private key of the node in the state directory, and hands it to the service at each start.

The service may not enter the state directory, which is the collector's, so the supervisor copies the key into the
service's directory. Under systemd ``python -m probing.daemon.supervisor.node_key``, with the service's command line,
copies it before the service starts.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ("HANDED", "KEPT", "hand_key", "main", "take_key")

# The name of the file, in the state directory and in the directory of the service's socket.
KEPT = HANDED = "node.key"
_BYTES = 32
log = logging.getLogger("probingd.supervisor")


def hand_key(state_dir: Path, directory: Path, owner: tuple[int, int] | None) -> None:
    """Writes the key of the node into ``directory`` for ``owner`` (uid and gid); a missing key is made.

    If the key cannot be kept, a line is logged, and the service uses a key of its own until it ends.
    """
    try:
        key = _read(state_dir / KEPT) or _made(state_dir / KEPT)
        target = directory / HANDED
        target.unlink(missing_ok=True)
        _write(target, key, owner)
    except OSError as e:
        log.warning("the key of this node cannot be kept in %s: %s", state_dir, e.strerror)


def take_key(directory: Path) -> bytes:
    """Returns the key in ``directory``, which is made if it is missing; if it cannot be written, it is not kept."""
    with suppress(OSError):
        return _read(directory / HANDED) or _made(directory / HANDED)
    return secrets.token_bytes(_BYTES)


def main() -> None:
    """Hands the key to the service's user; the command line has the configuration."""
    from probing.daemon.config import Config

    config = Config.from_args(sys.argv[1:])
    user = config.users.service
    entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    hand_key(Path(config.state_dir), Path(config.socket).parent, (entry.pw_uid, entry.pw_gid))


def _made(path: Path) -> bytes:
    key = secrets.token_bytes(_BYTES)
    path.unlink(missing_ok=True)
    _write(path, key, None)
    return key


def _read(path: Path) -> bytes:
    """Returns the key in the file; empty if the file is missing, or has another length after a crash."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        key = file.read(_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    return key if len(key) == _BYTES else b""


def _write(path: Path, key: bytes, owner: tuple[int, int] | None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        if owner:
            os.fchown(fd, *owner)
        file.write(key)
        file.flush()
        os.fsync(fd)


if __name__ == "__main__":
    main()
