"""The settings of a command: which nodes to ask, how long to wait, and the format and file of the answer."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probing.api.errors import UsageError

__all__ = (
    "DEFAULT_TARGET",
    "FORMATS",
    "PROFILE_SUFFIXES",
    "Settings",
    "check_suffix",
    "conditions",
    "format_of",
    "node_list",
    "process_id",
    "profile_format_of",
    "read_token",
)

DEFAULT_TARGET = "unix:/run/probingd/probingd.sock"
FORMATS = ("table", "json", "jsonl", "csv", "parquet", "arrow")
_MAX_FILE = 1 << 20
_TEXTS = ("txt", "text", "log", "out")
_PROFILES = {
    ".svg": "svg",
    ".folded": "folded",
    ".collapsed": "folded",
    ".speedscope.json": "speedscope",
    ".speedscope": "speedscope",
    ".pb.gz": "pprof",
    ".pprof": "pprof",
}
PROFILE_SUFFIXES = tuple(_PROFILES)
"""The suffixes of the formats that only ``profile`` writes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a command. ``timeout`` (s) is the time limit for the answers of all nodes to one question.
    ``token`` may be empty.

    ``where``: labels and patterns that choose nodes. ``tls``: files of authorities, certificate and key, each of which
    may be empty; None: TCP is unencrypted. ``named``: the format comes from -f, not from the name of a file.
    """

    target: str = DEFAULT_TARGET
    nodes: tuple[str, ...] = ()
    all_nodes: bool = False
    where: tuple[tuple[str, str], ...] = ()
    strict: bool = False
    token: str = ""
    tls: tuple[str, str, str] | None = None
    format: str = "table"
    named: bool = False
    output: Path | None = None
    report: Path | None = None
    timeout: float = 30.0


def format_of(output: Path | None) -> str:
    """Returns the format for the suffix of the output file (-o or stdout): CSV for ``x.csv``, a table for unknown
    suffixes.

    A file that is appended to (``>> x.json``) gets JSON lines, so that its earlier content stays readable.
    """
    name, appended = _destination(output)
    kind = name.rpartition(".")[2]
    if kind == "json" and appended:
        return "jsonl"
    return kind if kind in FORMATS else "table"


def check_suffix(output: Path | None, more: Sequence[str] = ()) -> None:
    """Raises UsageError unless the suffix of the file is a format, a usual suffix of text, or in ``more``.

    A file without suffix, such as a pipe or a device, gets a table.
    """
    name = "" if output is None else output.name.lower()
    suffix = name.lstrip(".").rpartition(".")
    if not suffix[1] or suffix[2] in (*FORMATS, *_TEXTS) or name.endswith(tuple(more)):
        return
    known = [f".{kind}" for kind in FORMATS if kind != "table"]
    hint = f"{', '.join([*more, *known])}, .txt for a table, or any name with -f FORMAT"
    raise UsageError(f"-o {name}: unknown suffix .{suffix[2]}", hint=hint)


def profile_format_of(output: Path | None) -> str:
    """Returns the format of ``profile`` for the output file: a flame graph for ``p.svg``; a table if no suffix fits."""
    name, _ = _destination(output)
    return next((kind for ending, kind in _PROFILES.items() if name.endswith(ending)), "table")


def _destination(output: Path | None) -> tuple[str, bool]:
    """Returns the name of the output file in lower case (empty if there is none), and whether the file is
    appended to.
    """
    if output is not None:
        return output.name.lower(), False
    try:
        if not stat.S_ISREG(os.fstat(1).st_mode):
            return "", False
        return Path("/proc/self/fd/1").readlink().name.lower(), bool(fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND)
    except OSError:
        return "", False


def node_list(text: str) -> tuple[str, ...]:
    """Returns the addresses in a text such as ``A,B,C`` or in the file ``text``, which has one address on each line;
    ``#`` begins a comment.

    ``dns:NAME[:PORT]`` and ``slurm:[PORT]`` are replaced by the addresses of the nodes that they name.
    """
    path = Path(text)
    # ``text`` is the path of a file if that file exists, or if ``text`` cannot be an address.
    if "," not in text and not text.startswith("unix:") and (path.is_file() or ":" not in text):
        lines = [line.partition("#")[0].strip() for line in _read(path, "list of nodes").splitlines()]
        found = tuple(part.strip() for line in lines for part in line.split(",") if part.strip())
    else:
        found = tuple(part.strip() for part in text.split(",") if part.strip())
    if any(part.startswith(("dns:", "slurm:")) for part in found):
        from probing.client.discovery import discovered

        found = tuple(dict.fromkeys(one for part in found for one in (discovered(part) or (part,))))
    if not found:
        raise UsageError(
            f"--nodes {text}: no node in it", hint="give addresses as A,B,C, or a file with one address per line"
        )
    return found


def conditions(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the pairs (label, pattern) in ``texts``, such as ``rack=r7`` or ``rack=r*,rail=2``. Raises UsageError for
    any other text.
    """
    found = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        key, equals, pattern = part.partition("=")
        if not equals or not key:
            raise UsageError(f"--where {part[:80]} is not a label", hint="for example --where rack=r7, or node=gn0*")
        found.append((key, pattern))
    return tuple(found)


def process_id(text: str) -> int:
    """Returns ``text`` as a pid. Raises UsageError for any other text."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:12]) < 2**31:
        raise UsageError(f"{text} is not a pid", hint="`probingctl ps` lists the processes; a job is named with --job")
    return int(text)


def read_token(token: str | None, token_file: str | None) -> str:
    """Returns the bearer token from --token-file, --token or PROBING_AUTH_TOKEN, in this order; empty if there
    is none.
    """
    if token_file:
        return _read(Path(token_file), "token").strip()
    if token:
        sys.stderr.write("warning: --token shows in the process list; use --token-file or PROBING_AUTH_TOKEN\n")
        return token
    return os.environ.get("PROBING_AUTH_TOKEN", "")


def _read(path: Path, what: str) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_MAX_FILE)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the {what} {path}: {reason}") from None
