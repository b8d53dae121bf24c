"""Compares the connections of a network namespace with the previous reading, and sums the figures of watched processes
by path (pair of addresses).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probing.daemon.net.tcp.rows import Columns
from probing.daemon.net.tcp.sock_diag import SYN_SENT, address_text

__all__ = (
    "Found",
    "Reading",
    "by_process",
    "found_of",
    "paths",
    "rises",
)

# Counters of tcp_info whose growth in the interval becomes a column.
_RISES = (
    "bytes_sent",
    "bytes_received",
    "segs_out",
    "segs_in",
    "retrans",
    "bytes_retrans",
    "ecn_marked",
    "busy",
    "rwnd_limited",
    "sndbuf_limited",
)
_US = 1_000
_MS = 1_000_000
_Array = npt.NDArray[Any]
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of connections. ``order`` sorts the connections by group; ``starts`` has the position in ``order`` where
    each group begins.
    """

    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]

    @property
    def first(self) -> npt.NDArray[np.intp]:
        """Returns the index of the first connection of each group."""
        return self.order[self.starts]

    def add(self, values: _Array) -> _Integers:
        return np.add.reduceat(values.astype(np.int64)[self.order], self.starts)

    def most(self, values: _Array) -> _Integers:
        return np.maximum.reduceat(values.astype(np.int64)[self.order], self.starts)

    def least(self, values: _Array) -> _Integers:
        return np.minimum.reduceat(values.astype(np.int64)[self.order], self.starts)


def _group(keys: _Integers) -> _Groups:
    """Groups connections with equal keys; ``keys`` must not be empty."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]]))
    return _Groups(order, starts)


def rises(now: _Array, before: _Array) -> dict[str, _Integers]:
    """Returns the growth of each counter of _RISES since ``before``, an earlier reading of the same namespace.

    The counters of a new connection grew from 0. A 32-bit counter may have wrapped once.
    """
    by_cookie = np.argsort(before["cookie"], kind="stable")
    cookies = before["cookie"][by_cookie]
    place = np.minimum(np.searchsorted(cookies, now["cookie"]), max(len(cookies) - 1, 0))
    known = cookies[place] == now["cookie"] if len(cookies) else np.zeros(len(now), bool)
    earlier = before[by_cookie[place]] if len(cookies) else now
    found = {}
    for name in _RISES:
        # The unsigned difference is right if a 32-bit counter wrapped. For a 64-bit counter that decreased it is
        # negative as int64, and becomes 0.
        rise = now[name] - np.where(known, earlier[name], 0).astype(now[name].dtype)
        found[name] = np.maximum(rise.astype(np.int64), 0)
    return found


def _summed(sockets: _Array, rise: dict[str, _Integers], groups: _Groups) -> dict[str, _Integers]:
    """Returns the figures of each group by name. rtt and silent are in ns; -1 means unknown."""
    connecting = sockets["state"] == SYN_SENT
    timed = (sockets["rtt"] > 0) & ~connecting
    count = groups.add(timed)
    huge = np.int64(1) << 62
    seen = timed & (sockets["min_rtt"] > 0) & (sockets["min_rtt"] < 0xFFFFFFFF)
    least = groups.least(np.where(seen, sockets["min_rtt"].astype(np.int64), huge))
    total = groups.add(np.where(timed, sockets["rtt"], 0))
    heard = np.where(connecting, huge, sockets["last_data_recv"].astype(np.int64))
    silent = groups.least(heard)
    return {
        **{name: groups.add(values) for name, values in rise.items()},
        "sockets": groups.add(np.ones(len(sockets))),
        "connecting": groups.add(connecting),
        "rtt": np.where(count > 0, total * _US // np.maximum(count, 1), -1),
        "rtt_max": np.where(count > 0, groups.most(np.where(timed, sockets["rtt"], 0)) * _US, -1),
        "rtt_min": np.where(least < huge, least * _US, -1),
        "timeouts": groups.add(sockets["retransmits"] > 0),
        "longest_timeouts": groups.most(sockets["retransmits"]),
        "lost": groups.add(sockets["lost"]),
        "unacked": groups.add(sockets["unacked"]),
        "unread_bytes": groups.add(sockets["unread"]),
        "unsent_bytes": groups.add(sockets["unsent"]),
        "cwnd_min": groups.least(sockets["cwnd"]),
        "delivery_rate": groups.most(np.minimum(sockets["delivery_rate"], np.uint64(1) << np.uint64(60))),
        "silent": np.where(silent < huge, silent * _MS, -1),
    }


class Reading(NamedTuple):
    """All connections of a namespace at ``mono_ns`` (CLOCK_MONOTONIC)."""

    sockets: _Array
    mono_ns: int


class Found(NamedTuple):
    """Connections of watched processes. ``process``: index of the owner; ``peer_process``: index of the process at the
    other end, -1 if it is not a watched process of the namespace; ``local``, ``peer``: indices in ``addresses``;
    ``peer_local``: whether the peer's address is in the namespace, too."""

    sockets: _Array
    process: _Integers
    peer_process: _Integers
    local: _Integers
    peer: _Integers
    peer_local: npt.NDArray[np.bool_]
    rise: dict[str, _Integers]
    addresses: list[str]
    interval_ns: int


def found_of(now: Reading, before: Reading, owners: _Integers) -> Found | None:
    """Returns the connections in ``now`` whose owner is a watched process (not -1 in ``owners``), with the growth of
    their counters since ``before``; None if there are none."""
    own = np.flatnonzero(owners >= 0)
    interval = now.mono_ns - before.mono_ns
    if not len(own) or interval <= 0:
        return None
    sockets = now.sockets[own]
    ends = np.concatenate([_key(sockets, "local"), _key(sockets, "peer")])
    distinct, which = np.unique(ends, return_inverse=True)
    which = which.reshape(2, -1)
    addresses = [address_text(raw[0], raw[1:]) for raw in (key.tobytes() for key in distinct)]
    here = np.isin(distinct, _key(now.sockets, "local")) | np.array([_loopback(text) for text in addresses])
    peer_local = here[which[1]]
    return Found(
        sockets,
        owners[own],
        _at_the_other_end(sockets, owners[own], peer_local),
        which[0],
        which[1],
        peer_local,
        rises(sockets, before.sockets),
        addresses,
        interval,
    )


def by_process(found: Found, peer_rank: _Integers) -> tuple[Columns, Columns]:
    """Returns the columns that identify each row (``at`` of ``rows.tcp_batch``), and the columns of its figures. There
    is a row for each process, pair of addresses and peer rank.

    ``peer_rank``: the rank at the other end of each connection, -1 if unknown.
    """
    count, ranks = len(found.addresses), int(peer_rank.max()) + 2
    pair = (found.process * count + found.local) * count + found.peer
    groups = _group(pair * ranks + peer_rank + 1)
    first = groups.first
    at: Columns = {
        "process": found.process[first],
        "local": found.local[first],
        "peer": found.peer[first],
        "peer_local": found.peer_local[first],
        "peer_rank": peer_rank[first],
        "interval": np.full(len(first), found.interval_ns, np.int64),
    }
    return at, _summed(found.sockets, found.rise, groups)


def paths(found: Found, run_of: Sequence[int]) -> tuple[Columns, Columns] | None:
    """Returns the columns ``at`` of ``rows.path_batch``, and the columns of the figures. There is a row for each run
    and pair of addresses whose connections leave the namespace. Returns None if no connection leaves it.

    ``run_of``: the index of the run of each process.
    """
    away = np.flatnonzero(~found.peer_local)
    if not len(away):
        return None
    count = len(found.addresses)
    run = np.array(run_of, np.int64)[found.process[away]]
    local, peer = found.local[away], found.peer[away]
    keys = (run * count + local) * count + peer
    groups = _group(keys)
    first = groups.first
    pairs = np.unique(np.stack([keys, found.process[away]]), axis=1)
    at: Columns = {
        "run": run[first],
        "local": local[first],
        "peer": peer[first],
        "processes": np.unique(pairs[0], return_counts=True)[1].astype(np.int32),
        "interval": np.full(len(first), found.interval_ns, np.int64),
    }
    rise = {name: values[away] for name, values in found.rise.items()}
    return at, _summed(found.sockets[away], rise, groups)


def _at_the_other_end(sockets: _Array, process: _Integers, peer_local: npt.NDArray[np.bool_]) -> _Integers:
    """Returns, for each of ``sockets``, the process at the other end of the connection; -1 if the socket at that end is
    not in ``sockets``.
    """
    found = np.full(len(sockets), -1, np.int64)
    here = np.flatnonzero(peer_local)
    if len(here):
        ends = [_ends(sockets[here], *pair) for pair in (("local", "peer"), ("peer", "local"))]
        distinct, which = np.unique(np.concatenate(ends), return_inverse=True)
        own, other = which.reshape(2, -1)
        owner = np.full(len(distinct), -1, np.int64)
        owner[own] = process[here]
        found[here] = owner[other]
    return found


def _ends(sockets: _Array, first: str, second: str) -> _Array:
    """Returns address and port of end ``first``, then of end ``second``, as 36 bytes. IPv4 is mapped into IPv6, so that
    the two sockets of a connection agree.
    """
    parts = []
    for end in (first, second):
        raw = np.ascontiguousarray(sockets[end]).view(np.uint8).reshape(-1, 16)
        mapped = np.concatenate([np.zeros((len(raw), 10), np.uint8), np.full((len(raw), 2), 0xFF, np.uint8)], axis=1)
        four = np.concatenate([mapped, raw[:, :4]], axis=1)
        parts.append(np.where((sockets["family"] == socket.AF_INET)[:, None], four, raw))
        parts.append(np.ascontiguousarray(sockets[f"{end}_port"]).view(np.uint8).reshape(-1, 2))
    return np.concatenate(parts, axis=1).view("V36")[:, 0]


def _key(sockets: _Array, end: str) -> _Array:
    """Returns family and address as 17 bytes."""
    keys = np.zeros(len(sockets), np.dtype([("family", "u1"), ("address", "V16")]))
    keys["family"], keys["address"] = sockets["family"], sockets[end]
    return keys.view("V17")


def _loopback(text: str) -> bool:
    return ipaddress.ip_address(text).is_loopback
