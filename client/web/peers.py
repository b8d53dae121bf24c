"""The other ends of connections: whose they are, and who of them may ask.

A cookie goes to every port of a host. A page of another user's server at another port of loopback is sent ours by the
caller's browser, and could show it here. So a connection must also be of a process of the caller: the kernel says so.
"""

from __future__ import annotations

import os
import pwd
import socket
from contextlib import suppress
from typing import NamedTuple

from probing.api.tcp_peer import peer_user

__all__ = ("Peer", "anybody", "callers_alone", "user_name")


class Peer(NamedTuple):
    """``name``: whose places a connection takes. ``stranger``: it is of a user who may not ask."""

    name: str
    stranger: bool = False


def anybody(connection: socket.socket) -> Peer | None:
    """Returns the peer by its user, on this machine, or by its address; None for a connection that has ended."""
    try:
        address = str(connection.getpeername()[0])
    except OSError:
        return None
    user = peer_user(connection)
    return Peer(address if user is None else f"uid {user}")


def callers_alone(connection: socket.socket) -> Peer | None:
    """As ``anybody``; a process of another user is a stranger. Root's may ask, and for root those of who called sudo.

    A tunnel of ssh is of its user. The user of a process in another network namespace is not known: it needs the key.
    """
    peer, user = anybody(connection), peer_user(connection)
    return peer if peer is None or user is None or user in _callers() else Peer(peer.name, stranger=True)


def _callers() -> set[int]:
    users = {0, os.geteuid()}
    if os.geteuid() == 0:
        with suppress(KeyError, ValueError):
            users.add(int(os.environ["SUDO_UID"]))
    return users


def user_name() -> str:
    """Returns the name of the user of this process, the number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
