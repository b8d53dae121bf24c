"""One reading of the connections of a network namespace, and what it says of watched processes and paths."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probing.daemon.net.tcp.figures import group, rises, summed
from probing.daemon.net.tcp.rows import Columns
from probing.daemon.net.tcp.sock_diag import address_text

__all__ = ("Found", "Reading", "by_process", "found_of", "paths")

_Array = npt.NDArray[Any]
_Integers = npt.NDArray[np.int64]


class Reading(NamedTuple):
    """All connections of a namespace at CLOCK_MONOTONIC ``mono_ns``."""

    sockets: _Array
    mono_ns: int


class Found(NamedTuple):
    """Connections of watched processes: ``process`` (index), ``peer_process`` (index of the one at the other end, -1
    where that is no watched one of the namespace), addresses (indices in ``addresses``), what rose."""

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
    """Returns the connections in ``now`` that a watched process owns (``owners`` not -1) and what they did since
    ``before``; None: there are none."""
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
    """Returns places (see ``rows``) and figures of each process, pair of addresses and rank at the other end.

    ``peer_rank``: of each connection, -1 where it is not known.
    """
    count, ranks = len(found.addresses), int(peer_rank.max()) + 2
    pair = (found.process * count + found.local) * count + found.peer
    groups = group(pair * ranks + peer_rank + 1)
    first = groups.first
    at: Columns = {
        "process": found.process[first],
        "local": found.local[first],
        "peer": found.peer[first],
        "peer_local": found.peer_local[first],
        "peer_rank": peer_rank[first],
        "interval": np.full(len(first), found.interval_ns, np.int64),
    }
    return at, summed(found.sockets, found.rise, groups)


def paths(found: Found, run_of: Sequence[int]) -> tuple[Columns, Columns] | None:
    """Returns places and figures of each run and pair of addresses whose connections leave the namespace.

    ``run_of``: the index of the run of each process. None: there are no such connections.
    """
    away = np.flatnonzero(~found.peer_local)
    if not len(away):
        return None
    count = len(found.addresses)
    run = np.array(run_of, np.int64)[found.process[away]]
    local, peer = found.local[away], found.peer[away]
    keys = (run * count + local) * count + peer
    groups = group(keys)
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
    return at, summed(found.sockets[away], rise, groups)


def _at_the_other_end(sockets: _Array, process: _Integers, peer_local: npt.NDArray[np.bool_]) -> _Integers:
    """The process of the socket at the other end of each of ``sockets``; -1 where that is none of them."""
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
    """Addresses and ports of both ends as 36 bytes: IPv4 as inside IPv6, so that both ends of a connection agree."""
    parts = []
    for end in (first, second):
        raw = np.ascontiguousarray(sockets[end]).view(np.uint8).reshape(-1, 16)
        mapped = np.concatenate([np.zeros((len(raw), 10), np.uint8), np.full((len(raw), 2), 0xFF, np.uint8)], axis=1)
        four = np.concatenate([mapped, raw[:, :4]], axis=1)
        parts.append(np.where((sockets["family"] == socket.AF_INET)[:, None], four, raw))
        parts.append(np.ascontiguousarray(sockets[f"{end}_port"]).view(np.uint8).reshape(-1, 2))
    return np.concatenate(parts, axis=1).view("V36")[:, 0]


def _key(sockets: _Array, end: str) -> _Array:
    """Family and address as 17 bytes."""
    keys = np.zeros(len(sockets), np.dtype([("family", "u1"), ("address", "V16")]))
    keys["family"], keys["address"] = sockets["family"], sockets[end]
    return keys.view("V17")


def _loopback(text: str) -> bool:
    return ipaddress.ip_address(text).is_loopback
