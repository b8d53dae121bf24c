"""Finds the user at the other end of a connection, and whether that user may ask.

A browser sends a cookie to every port of a host. So a server of another user at another loopback port gets our cookie
from the caller's browser, and could use it here. Therefore a connection must also come from a process of the caller,
for which the kernel is asked.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import NamedTuple

from probing.api.tcp_peer import peer_user

__all__ = ("Peer", "anybody", "callers_alone")


class Peer(NamedTuple):
    """``name``: the user or address whose connections are counted. ``stranger``: the user may not ask."""

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
    """Returns the same as ``anybody``; processes of other users are strangers, except processes of root and, if the
    caller is root, of the user who called sudo.

    A tunnel of ssh belongs to its user. The user of a process in another network namespace is unknown: the process is
    no stranger, and needs the key.
    """
    peer, user = anybody(connection), peer_user(connection)
    return peer if peer is None or user is None or user in _callers() else Peer(peer.name, stranger=True)


def _callers() -> set[int]:
    users = {0, os.geteuid()}
    if os.geteuid() == 0:
        with suppress(KeyError, ValueError):
            users.add(int(os.environ["SUDO_UID"]))
    return users
