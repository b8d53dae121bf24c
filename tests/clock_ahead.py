"""Runs a daemon whose wall clock is ahead of the machine's, as on a node without NTP."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ("clock_ahead",)

_SOURCE = Path(__file__).with_name("clock_ahead.c")
# A daemon drops LD_PRELOAD, so that the library comes from a file in /etc, which no other process sees.
_WITH_ETC = 'mount -t overlay overlay -o lowerdir="$0":/etc /etc && exec "$@"'


def clock_ahead(directory: Path, ahead_s: float) -> tuple[str, ...]:
    """Returns words before a command that set its clock ``ahead_s`` seconds ahead. ``directory`` is made, for files."""
    directory.mkdir()
    directory.chmod(0o755)
    library = directory / "clock_ahead.so"
    define = f"-DAHEAD_NS={round(ahead_s * 1e9)}LL"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", define, "-o", library, _SOURCE], check=True)
    etc = directory / "etc"
    etc.mkdir()
    (etc / "ld.so.preload").write_text(f"{library}\n")
    return "unshare", "--mount", "sh", "-c", _WITH_ETC, str(etc)
