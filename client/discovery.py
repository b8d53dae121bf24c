"""Finds the nodes for ``--nodes``: all addresses of a DNS name, or the nodes of the Slurm job in which this command
runs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator

from probing.api.errors import UsageError

__all__ = ("DEFAULT_PORT", "discovered", "hostnames")

# The port that the examples of docs/config.md use.
DEFAULT_PORT = 7077
MAX_NODES = 65_536
_SCONTROL_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([A-Za-z0-9._-]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def discovered(text: str) -> tuple[str, ...] | None:
    """Returns the addresses for ``dns:NAME[:PORT]`` or ``slurm:[PORT]``; None for any other text."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("dns", "slurm"):
        return None
    if kind == "slurm":
        port = _port(rest)
        return tuple(f"{name}:{port}" for name in _slurm())
    name, _, port_text = rest.partition(":")
    return _resolved(name, _port(port_text))


def hostnames(text: str) -> tuple[str, ...]:
    """Returns the names in a hostlist of Slurm, such as ``a[1-3,7],b05``. Raises UsageError for any other text."""
    found: dict[str, None] = {}
    for part in _parts(text):
        for name in _expanded(text, part):
            found[name] = None
            if len(found) > MAX_NODES:
                raise UsageError(f"the list of nodes {text[:80]!r} has more than {MAX_NODES} nodes")
    return tuple(found)


def _parts(text: str) -> Iterator[str]:
    """Yields the parts of ``text`` that are separated by commas outside of brackets."""
    depth, begun = 0, 0
    for i, char in enumerate(f"{text},"):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            if text[begun:i].strip():
                yield text[begun:i].strip()
            begun = i + 1
    if depth > 0:
        raise _unreadable(text)


def _expanded(text: str, part: str) -> Iterator[str]:
    """Yields the names that ``part`` stands for: all combinations of the numbers in its brackets."""
    pieces = list(_PIECE.finditer(part))
    if "".join(piece[0] for piece in pieces) != part:
        raise _unreadable(text)
    names = [""]
    for piece in pieces:
        ends = [piece[2]] if piece[2] is not None else _numbers(text, piece[1])
        if len(names) * len(ends) > MAX_NODES:
            raise UsageError(f"the list of nodes {text[:80]!r} has more than {MAX_NODES} nodes")
        names = [name + end for name in names for end in ends]
    yield from names


def _numbers(text: str, ranges: str) -> list[str]:
    """Returns the numbers of a text such as ``1-3,07`` as texts that keep their leading zeros."""
    found: list[str] = []
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one.strip())
        if match is None:
            raise _unreadable(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_NODES:
            raise _unreadable(text)
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
        if len(found) > MAX_NODES:
            raise UsageError(f"the list of nodes {text[:80]!r} has more than {MAX_NODES} nodes")
    return found


def _unreadable(text: str) -> UsageError:
    return UsageError(f"{text[:80]!r} is not a list of nodes", hint="for example gn[01-16,20],login1")


def _slurm() -> tuple[str, ...]:
    text = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST") or ""
    if not text:
        raise UsageError("`--nodes slurm:` needs SLURM_JOB_NODELIST", hint="run it in a job, or give --nodes A,B,C")
    return _scontrol(text) or hostnames(text)


def _scontrol(text: str) -> tuple[str, ...]:
    """Returns the host names that ``scontrol`` lists for ``text``; empty if ``scontrol`` is absent, fails or hangs."""
    program = shutil.which("scontrol")
    if program is None or text.startswith("-"):
        return ()
    try:
        done = subprocess.run([program, "show", "hostnames", text], capture_output=True, text=True, timeout=_SCONTROL_S)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ()
    names = tuple(done.stdout.split()[:MAX_NODES])
    return names if done.returncode == 0 and all(map(_NAME.fullmatch, names)) else ()


def _resolved(name: str, port: int) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is not a DNS name", hint="give dns:NAME or dns:NAME:PORT")
    try:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as e:
        hint = "check the name; in Kubernetes it is SERVICE.NAMESPACE of a headless service"
        raise UsageError(f"DNS knows no addresses of {name}: {e.strerror or e}", hint=hint) from None
    hosts = dict.fromkeys(str(info[4][0]) for info in infos)
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in sorted(hosts)[:MAX_NODES])


def _port(text: str) -> int:
    if not text:
        return DEFAULT_PORT
    if not re.fullmatch(r"\d{1,5}", text) or not 0 < int(text) < 65536:
        raise UsageError(f"{text[:20]!r} is not a port", hint="give dns:NAME:PORT or slurm:PORT")
    return int(text)
