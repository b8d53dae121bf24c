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

from probing.api.tcp_peer import CLOSED, peer_user

__all__ = ("Peer", "anybody", "callers_alone")

# Of the kernel's include/net/tcp_states.h.
_ESTABLISHED = 1


class Peer(NamedTuple):
    """``name``: the user or address whose connections are counted. ``stranger``: the user may not ask."""

    name: str
    stranger: bool = False


def anybody(connection: socket.socket) -> Peer | None:
    """Returns the peer by its user, on this machine, or by its address; None for a connection that has ended."""
    return _peer(connection, peer_user(connection))


def callers_alone(connection: socket.socket) -> Peer | None:
    """Returns the same as ``anybody``; processes of other users are strangers, except processes of root and, if the
    caller is root, of the user who called sudo.

    A tunnel of ssh belongs to its user. The user of a process in another network namespace is unknown: the process is
    no stranger, and needs the key. A process that has closed its end may have been anybody's, and is a stranger.
    """
    user = peer_user(connection)
    peer = _peer(connection, user)
    if peer is None or user in _callers() or (user is None and _is_established(connection)):
        return peer
    return Peer(peer.name, stranger=True)


def _peer(connection: socket.socket, user: int | None) -> Peer | None:
    try:
        address = str(connection.getpeername()[0])
    except OSError:
        return None
    return Peer(address if user in (None, CLOSED) else f"uid {user}")


def _is_established(connection: socket.socket) -> bool:
    # A socket that was closed is forgotten within seconds; ours knows of its end.
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _callers() -> set[int]:
    users = {0, os.geteuid()}
    if os.geteuid() == 0:
        with suppress(KeyError, ValueError):
            users.add(int(os.environ["SUDO_UID"]))
    return users
