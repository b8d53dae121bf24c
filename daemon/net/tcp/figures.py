"""Adds up the figures of connections by process and address, and by path: what was done since the reading before."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probing.daemon.net.tcp.sock_diag import SYN_SENT

__all__ = ("RISES", "Groups", "group", "rises", "summed")

# Columns that count what happened in the interval, and the counter of tcp_info behind each.
RISES = (
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


class Groups(NamedTuple):
    """Connections in groups: ``order`` sorts them by group, ``starts`` are the first of each in that order."""

    order: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]

    @property
    def first(self) -> npt.NDArray[np.intp]:
        """A connection of each group."""
        return self.order[self.starts]

    def add(self, values: _Array) -> _Integers:
        return np.add.reduceat(values.astype(np.int64)[self.order], self.starts)

    def most(self, values: _Array) -> _Integers:
        return np.maximum.reduceat(values.astype(np.int64)[self.order], self.starts)

    def least(self, values: _Array) -> _Integers:
        return np.minimum.reduceat(values.astype(np.int64)[self.order], self.starts)


def group(keys: _Integers) -> Groups:
    """Groups connections of equal keys; there is at least one."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]]))
    return Groups(order, starts)


def rises(now: _Array, before: _Array) -> dict[str, _Integers]:
    """Returns by how much each counter of RISES rose since ``before``, another reading of the same namespace.

    A connection that was not there before has risen from 0. A counter of 32 bits may have wrapped once.
    """
    by_cookie = np.argsort(before["cookie"], kind="stable")
    cookies = before["cookie"][by_cookie]
    place = np.minimum(np.searchsorted(cookies, now["cookie"]), max(len(cookies) - 1, 0))
    known = cookies[place] == now["cookie"] if len(cookies) else np.zeros(len(now), bool)
    earlier = before[by_cookie[place]] if len(cookies) else now
    found = {}
    for name in RISES:
        # Both are unsigned, so the difference is right over a wrap. A counter of 64 bits only wraps when it goes back.
        rise = now[name] - np.where(known, earlier[name], 0).astype(now[name].dtype)
        found[name] = np.maximum(rise.astype(np.int64), 0)
    return found


def summed(sockets: _Array, rise: dict[str, _Integers], groups: Groups) -> dict[str, _Integers]:
    """Returns the figures of each group, by column of net.tcp; those in time are in ns. -1: not known."""
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
