"""Whose the ends of TCP sockets are, and were: net.sockets."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from probing.daemon.net.tcp import sockets as socket_source
from probing.daemon.net.tcp.sock_diag import LISTEN, SOCKET
from probing.daemon.net.tcp.sockets import KEPT_NS, Endpoints
from probing.daemon.source import Identity

NETNS, SECOND = 4026531840, 10**9
WHO = [Identity(100, 7, "j", "r", "trainer", 0), Identity(101, 8, "j", "r", "trainer", 1), None]


def sockets(*rows: tuple[int, int, int]) -> np.ndarray:
    """Sockets of 127.0.0.1: cookie, state and port."""
    found = np.zeros(len(rows), SOCKET)
    for one, (cookie, state, port) in zip(found, rows, strict=True):
        one["cookie"], one["state"], one["local_port"], one["peer_port"] = cookie, state, port, 9
        one["family"], one["local"] = socket.AF_INET, np.void(socket.inet_aton("127.0.0.1") + bytes(12))
    return found


def read(kept: Endpoints, owners: list[int], *rows: tuple[int, int, int], at: int = 0) -> None:
    kept.read(NETNS, sockets(*rows), np.array(owners, np.int64), WHO, at)


def shown(kept: Endpoints) -> list[tuple[Any, ...]]:
    rows = kept.rows("n", 99).select(["rank", "state", "local_address", "local_port", "peer_port"]).to_pylist()
    return [tuple(row.values()) for row in rows]


def test_each_socket_of_a_watched_process_with_its_ports() -> None:
    kept = Endpoints()
    assert shown(kept) == []
    # The third is of a process that is gone, the last of one that is not watched.
    read(kept, [0, 1, 2, -1], (1, LISTEN, 4001), (2, 1, 4002), (3, 1, 4003), (4, 1, 4004))
    assert shown(kept) == [(0, "listens", "127.0.0.1", 4001, None), (1, "open", "127.0.0.1", 4002, 9)]


def test_a_closed_socket_keeps_its_owner_for_a_while() -> None:
    kept = Endpoints()
    read(kept, [0, 1], (1, LISTEN, 4001), (2, 1, 4002))
    # The kernel keeps it for some time, without an owner.
    read(kept, [0, -1], (1, LISTEN, 4001), (2, 4, 4002), at=SECOND)
    assert [(row[0], row[1], row[3]) for row in shown(kept)] == [(0, "listens", 4001), (1, "closed", 4002)]
    kept.keep([], 2 * SECOND)
    assert [(row[1], row[3]) for row in shown(kept)] == [("closed", 4001), ("closed", 4002)]
    kept.keep([], KEPT_NS + SECOND // 2)
    assert [row[3] for row in shown(kept)] == [4001]
    kept.keep([], KEPT_NS + 2 * SECOND)
    assert shown(kept) == []


def test_of_very_many_closed_sockets_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_source, "MAX_ROWS", 3)
    kept = Endpoints()
    for turn in range(5):
        read(kept, [0, 0], (2 * turn, 1, 4000 + turn), (2 * turn + 1, 1, 5000 + turn), at=turn)
    assert [row[3] for row in shown(kept)] == [4004, 5004, 4003, 5003, 5002]
    read(kept, [0] * 5, *((cookie, 1, 6000 + cookie) for cookie in range(50, 55)), at=9)
    read(kept, [], at=10)
    assert [(row[1], row[3]) for row in shown(kept)] == [("closed", 6050), ("closed", 6051), ("closed", 6052)]


def test_very_many_sockets_of_an_owner_displace_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_source, "MAX_ROWS", 4)
    who = [WHO[0]._replace(owner=1), WHO[1]._replace(owner=2)]
    kept = Endpoints()
    # GIVEN an owner with very many sockets, which come first, and another with two
    many = [(n, 1, 4_000 + n) for n in range(1, 9)]
    everything = sockets(*many, (20, 1, 5_000), (21, 1, 5_001))
    owners = np.array([0] * 8 + [1] * 2, np.int64)
    kept.read(NETNS, everything, owners, who, 1)
    # THEN those of both are shown
    assert sorted(row[3] for row in shown(kept)) == [4_001, 4_002, 5_000, 5_001]
    # and what the other has closed stays, whatever the first closes later.
    kept.read(NETNS, everything[:8], owners[:8], who, 2)
    for left in range(7, -1, -1):
        kept.read(NETNS, everything[:left], owners[:left], who, 3 + left)
    assert sorted((row[0], row[3]) for row in shown(kept)) == [(0, 4_001), (0, 4_002), (1, 5_000), (1, 5_001)]
