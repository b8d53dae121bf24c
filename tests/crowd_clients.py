"""A crowd of clients of one daemon: some ask, some do not read what they asked for, some are half open."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ("Doors", "Figures", "crowd_at")

_MEMBER = Path(__file__).with_name("crowd_member.py")
_FIRST_USER = 61000


@dataclass(frozen=True, slots=True)
class Doors:
    """Where clients connect: ``tcp`` (HOST:PORT) with ``token``, by TLS where there is a file ``authority``, and the
    socket ``unix`` as users of ``group``."""

    tcp: str
    unix: str
    token: str
    group: int
    authority: str = ""


@dataclass
class Figures:
    """``seconds``: of each answer, sorted. ``limited``: calls that a documented bound refused. ``starved``: clients
    without an answer."""

    clients: int
    seconds: list[float] = field(default_factory=list)
    limited: int = 0
    failed: list[str] = field(default_factory=list)
    starved: int = 0


def crowd_at(
    doors: Doors, seconds: float, *, asking: int, idle: int, meanwhile: Callable[[], None] | None = None
) -> Figures:
    """Returns the figures of a crowd that lasts ``seconds``.

    Ten clients of each of ``asking`` users ask by TCP, each user from another address, and of as many users by the
    socket; ten of each of ``idle`` do not read, or are half open. ``meanwhile`` is called again and again until the
    first member ends.
    """
    figures = Figures(20 * (asking + idle))
    authority = Path(doors.authority).read_text() if doors.authority else ""
    members = []
    for number, kind in enumerate(["ask"] * asking + ["idle"] * idle):
        far = (doors.tcp, seconds, f"127.0.0.{number + 2}", authority, doors.token)
        near = (doors.unix, seconds, "", "", "")
        user = _FIRST_USER + 2 * number
        members += [_member(user, doors.group, kind, *far), _member(user + 1, doors.group, kind, *near)]
    for member in members:
        assert member.stdout is not None
        assert member.stdout.readline() == "ready\n"
    for member in members:
        assert member.stdin is not None
        member.stdin.write("\n")
        member.stdin.flush()
    while meanwhile is not None and members[0].poll() is None:
        meanwhile()
    for member in members:
        found = json.loads(member.communicate(timeout=seconds + 60)[0])
        figures.seconds += found["seconds"]
        figures.limited += found["limited"]
        figures.failed += found["failed"]
        figures.starved += found["starved"]
    figures.seconds.sort()
    return figures


def _member(uid: int, gid: int, *args: object) -> subprocess.Popen[str]:
    rights = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    argv = [*rights, sys.executable, str(_MEMBER), *map(str, args)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
