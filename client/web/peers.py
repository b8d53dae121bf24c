"""Finds the user at the other end of a connection, and whether that user may ask.

A browser sends a cookie to every port of a host, so a server of another user on another loopback port gets our cookie
from the caller's browser, and could use the cookie here. Therefore a connection must also come from a process of the
caller. The kernel says which user a connection belongs to.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import NamedTuple

from probing.api.tcp_peer import CLOSED, peer_user

__all__ = ("Peer", "anybody", "callers_alone")

# TCP_ESTABLISHED of the kernel's include/net/tcp_states.h.
_ESTABLISHED = 1


class Peer(NamedTuple):
    """``name``: the user or address whose connections are counted. ``stranger``: the user may not ask."""

    name: str
    stranger: bool = False


def anybody(connection: socket.socket) -> Peer | None:
    """Returns the peer, named by its user if it is on this machine, else by its address; None: the connection ended."""
    return _peer(connection, peer_user(connection))


def callers_alone(connection: socket.socket) -> Peer | None:
    """Returns the peer as ``anybody`` does. Only processes of the user who runs this server, of root, and (if the
    server runs as root) of the user who called sudo may ask. Processes of all other users are strangers.

    A tunnel of ssh belongs to its user. A peer in another network namespace has an unknown user: it is not a stranger,
    but needs the key. A peer that has closed its end counts as a stranger.
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
    # The kernel forgets the closed socket of the peer within seconds, but our socket shows that the peer has closed.
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _callers() -> set[int]:
    users = {0, os.geteuid()}
    if os.geteuid() == 0:
        with suppress(KeyError, ValueError):
            users.add(int(os.environ["SUDO_UID"]))
    return users
