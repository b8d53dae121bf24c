"""What only this machine has: `probingd check`, and the daemon's log."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from probing.api.errors import NotFound, ProbingError, UsageError

__all__ = ("boot_id", "check", "journal", "log_file")

MAX_LINES = 4000
MAX_LOG_BYTES = 4 << 20
COMMAND_S = 20.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The options by which `probingd check` looks at the daemon that runs.
_PLACE = re.compile(r"/[\w./-]{1,200}|[\w-]{1,32}")
_PLACES = ("instance", "state_dir", "socket", "probes.bpffs")
_UNITS = "probingd*"
_NO_LOG = "give it with --log FILE, where the daemon does not write to the journal"


def boot_id() -> str:
    """Returns the id of this boot, which the daemon of this machine has too; empty where it cannot be read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def check(config: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what `probingd check` finds for the daemon of the rows ``config`` of probing.config. Raises NotFound
    where there is no probingd, ProbingError where it fails."""
    own = sysconfig.get_path("scripts")
    program = shutil.which("probingd", path=os.pathsep.join((own, os.environ.get("PATH", os.defpath))))
    if program is None:
        raise NotFound("there is no probingd beside probingctl or on PATH", hint="run `probingd check -f json`")
    values = {str(row["key"]): str(row["value"]) for row in config if row["value"] != row["default"]}
    places = [f"--{key}={values[key]}" for key in _PLACES if _PLACE.fullmatch(values.get(key, ""))]
    out = _output([program, "check", "-f", "json", *places], fine=(0, 3))
    try:
        found = json.loads(out)
        return [dict(one) for one in found]
    except (ValueError, TypeError):
        raise ProbingError("probingd check gave no list", hint="run `probingd check` to see what it says") from None


def journal() -> list[str]:
    """Returns the last lines of the daemon's units in the journal, oldest first: time, unit, priority, message. Raises
    ProbingError where there are none to read."""
    if shutil.which("journalctl") is None:
        raise NotFound("there is no journalctl here", hint=_NO_LOG)
    fields = "MESSAGE,PRIORITY,_SYSTEMD_UNIT,UNIT"
    out = _output(
        [
            "journalctl",
            f"--unit={_UNITS}",
            "--no-pager",
            "--output=json",
            f"--output-fields={fields}",
            f"--lines={MAX_LINES}",
            "--quiet",
        ]
    )
    lines = list(_journal_lines(out))
    if not lines:
        raise NotFound("the journal has no line of probingd that this user may read", hint=f"ask as root, or {_NO_LOG}")
    return lines


def log_file(path: Path) -> list[str]:
    """Returns the last lines of the daemon's log ``path``. Raises UsageError where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - MAX_LOG_BYTES, 0))
            return file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()[-MAX_LINES:]
    except OSError as e:
        raise UsageError(f"cannot read the log {path}: {e.strerror}", hint="name a file with --log FILE") from None


def _journal_lines(out: bytes) -> Iterator[str]:
    for line in out[-MAX_LOG_BYTES:].splitlines():
        try:
            entry = json.loads(line)
            message = entry["MESSAGE"]
            # Bytes that are no text are a list of numbers: systemd.journal-fields(7).
            text = bytes(message).decode(errors="replace") if isinstance(message, list) else str(message)
            at = datetime.fromtimestamp(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, timezone.utc)
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        unit = str(entry.get("_SYSTEMD_UNIT") or entry.get("UNIT") or "").partition("@")[0]
        yield f"{at:%Y-%m-%dT%H:%M:%S.%fZ} {unit.removesuffix('.service')} {entry.get('PRIORITY', '')} {text}"


def _output(words: Sequence[str], *, fine: tuple[int, ...] = (0,)) -> bytes:
    name = " ".join((Path(words[0]).name, *words[1:2]))
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProbingError(f"{name} did not end within {COMMAND_S:.0f} s") from None
    except OSError as e:
        raise ProbingError(f"{name} cannot be run: {e.strerror}") from None
    if done.returncode not in fine:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ProbingError(f"{name} ended with {done.returncode}: {said[0][:400] if said else ''}")
    return done.stdout
