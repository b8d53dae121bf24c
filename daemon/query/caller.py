"""Identifies the caller of a request: a local user or an address. Also waits for descriptors, until a deadline or until
the caller goes away.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from probing.api.errors import QueryError

__all__ = ("GLANCE_S", "NOBODY", "Caller", "Scope", "stop_if", "wait_readable")


class Scope(Enum):
    """A right of a caller. READ: read rows and stacks. PROBE: change what is collected. LAUNCH: start groups as a user.
    ADMIN: change what is kept, and run code in processes. PEER: act as another node."""

    READ = "read"
    PROBE = "probe"
    LAUNCH = "launch"
    ADMIN = "admin"
    PEER = "peer"


@dataclass(frozen=True)
class Caller:
    """The caller of a request. ``listener``: ``unix`` or ``tcp``. ``who``: uid or ``peer_name`` of the other end.
    ``pid`` 0: unknown. ``reserved``: threads and slots are reserved for this caller, because it is root or the daemon
    itself. ``name``: the name in its token or certificate. ``scopes``: its rights, once it is identified. ``jobs``: the
    jobs whose rows it may see; None: all. ``nodes``: names of nodes, in lower case; the connection proves that the
    caller is one of these nodes."""

    listener: str
    who: str
    pid: int = 0
    reserved: bool = False
    name: str = ""
    scopes: frozenset[Scope] = frozenset()
    jobs: frozenset[str] | None = None
    nodes: frozenset[str] = frozenset()

    @property
    def uid(self) -> int | None:
        """The user at the other end, as the kernel proves it; None for a caller from another machine."""
        uid = self.who.rpartition("uid ")[2]
        is_proven = self.listener == "unix" or ", uid " in self.who
        return int(uid) if is_proven and uid.isascii() and uid.isdecimal() else None

    @property
    def share(self) -> str:
        """The share of threads and connections that the caller uses: ``root`` (reserved), ``unix`` or ``tcp``."""
        return "root" if self.reserved else self.listener

    @property
    def user(self) -> str:
        """The identity under which a caller without a name is counted. For a user of this machine it is the uid, since
        such a user can connect from every loopback address; otherwise it is the address."""
        return self.who if self.uid is None else f"uid {self.uid}"

    @property
    def key(self) -> tuple[str, str, str]:
        """The key under which calls are counted: all processes of a user with the same token count as one caller."""
        return self.listener, self.user, self.name

    @property
    def holder(self) -> str:
        """The identity under which a caller is counted at all its addresses: the name of its token or certificate. A
        caller without a name is counted as ``user``."""
        return self.name or self.user

    def __str__(self) -> str:
        if self.listener == "unix":
            return f"unix: uid {self.who}, pid {self.pid}"
        return f"{self.listener}: {self.who}" + (f" ({self.name})" if self.name else "")


NOBODY = Caller("", "")


# While a request waits, it is checked at this interval, s, whether the caller went away.
GLANCE_S = 0.05


def stop_if(cancelled: Callable[[], bool]) -> None:
    """Raises QueryError if the caller went away."""
    if cancelled():
        raise QueryError("the query was cancelled: nobody waits for its answer")


def wait_readable(fd: int, deadline: float, cancelled: Callable[[], bool]) -> bool:
    """Returns whether ``fd`` became readable, or its other end hung up, before ``deadline`` on time.monotonic().

    Raises QueryError if the caller went away.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll(GLANCE_S * 1000):
        stop_if(cancelled)
        if time.monotonic() >= deadline:
            return False
    return True
