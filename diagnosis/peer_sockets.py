"""Finds the rank whose socket an error names, and thereby the rank that closed its connections first.

Forms of addresses in errors: gloo's "[127.0.0.1]:49552" (Address::str of gloo/transport/tcp/address.cc), NCCL's
"10.0.0.1<49552>" (ncclSocketToString of src/misc/socket.cc), and c10d's "[localhost]:29500"
(torch/csrc/distributed/c10d/socket.cpp), which names both ends. The gloo of torch 2.13 writes ports in network order,
later versions do not.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Endpoint, Rank

__all__ = ("PEER_GONE", "Named", "first_to_close", "named_sockets")

PEER_GONE = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset)|[Bb]roken pipe|EPIPE|[Tt]imed out waiting|[Ss]ocket [Tt]imeout"
    r"|remote process exited|ncclRemoteError|ncclSystemError|unhandled system error|NCCL communicator was aborted"
    r"|[Ww]atchdog caught collective|recvValue failed"
)
# Only these errors say that the other end has closed the connection; after a time-out it may just be late.
_CLOSED = re.compile(r"[Cc]onnection (?:was )?(?:closed|reset)|[Bb]roken pipe|EPIPE|recvValue failed")
# A port that is followed by a digit or an ellipsis does not match: where a text was cut, digits of the port may be
# missing.
_PORT = r"([0-9]{1,5})(?![0-9…])"
_ADDRESS = re.compile(
    rf"\[([0-9A-Za-z.:]{{2,64}})\]:{_PORT}|([0-9A-Fa-f.:]{{3,64}})<{_PORT}>|([0-9]{{1,3}}(?:\.[0-9]{{1,3}}){{3}}):{_PORT}"
)
_OF_GLOO = re.compile(r"(?:by peer|[a-z] error) \[")
_MOST_ADDRESSES = 8
# Texts of facts are cut to these lengths without an ellipsis.
_CUT = frozenset((200, 300))
_LOOPBACK = "loopback"
# Address, name of the node (empty unless the address is a loopback address), and port.
_Place = tuple[str, str, int]
_Addresses = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Named:
    """An error of ``rank`` says that a connection is closed, and names ``endpoint``, a socket of the rank ``owner``.

    ``port``: the port as the error writes it, perhaps with swapped bytes.
    """

    rank: int
    owner: int
    endpoint: Endpoint
    port: int

    def as_text(self) -> str:
        closed = ", which is closed" if self.endpoint.closed else ""
        swapped = f" (its port as {self.port}, with swapped bytes)" if self.port != self.endpoint.port else ""
        return (
            f"the error of rank {self.rank} names {self.endpoint.text}{swapped}, a socket of rank {self.owner}{closed}"
        )


def first_to_close(case: Case, fell: Collection[int]) -> tuple[Rank | None, tuple[Named, ...]]:
    """Returns the rank that closed its connections before all others, and the errors that name its sockets.

    ``fell``: ranks that ended because a peer was gone. The rank is None unless errors name sockets of exactly one rank
    that lost no peer itself.
    """
    named = named_sockets(case)
    failed = {*fell, *(rank.rank for rank in case.facts.ranks if any(PEER_GONE.search(t) for t in _errors(rank)))}
    firsts = {one.owner for one in named} - failed
    if len(firsts) != 1:
        return None, ()
    (first,) = firsts
    return case.ranks[first], tuple(one for one in named if one.owner == first)


def named_sockets(case: Case) -> list[Named]:
    """Returns the sockets that the errors of ranks name, without addresses that several ranks had."""
    addresses = {rank.rank: _addresses(rank) for rank in case.facts.ranks}
    ports = {port for found in addresses.values() for _, having in found for port in having}
    sockets = _sockets(case.facts.ranks, ports)
    return [one for rank in case.facts.ranks for one in _named_by(rank, addresses[rank.rank], sockets)]


def _named_by(rank: Rank, addresses: _Addresses, sockets: Mapping[_Place, Mapping[int, Endpoint]]) -> Iterator[Named]:
    """Yields the sockets that the errors of ``rank`` name, one for each owner."""
    owners = set[int]()
    for address, ports in addresses:
        having: dict[int, Endpoint] = {}
        for port in ports:
            # Two owners are enough to see that the address has several.
            for owner, end in islice(sockets.get(_place(address, rank, port), {}).items(), 2):
                if owner not in having or having[owner].closed:
                    having[owner] = end
        if len(having) == 1:
            ((owner, endpoint),) = having.items()
            if owner != rank.rank and owner not in owners:
                owners.add(owner)
                yield Named(rank.rank, owner, endpoint, ports[0])


def _sockets(ranks: Iterable[Rank], ports: Collection[int]) -> Mapping[_Place, Mapping[int, Endpoint]]:
    """Returns the owners of each address with one of ``ports``, and the socket of each owner. An open socket takes
    precedence over a closed socket.
    """
    found: dict[_Place, dict[int, Endpoint]] = defaultdict(dict)
    for rank in ranks:
        for end in rank.endpoints:
            if end.port in ports:
                own = found[_place(_plain(end.address), rank, end.port)]
                if rank.rank not in own or (own[rank.rank].closed and not end.closed):
                    own[rank.rank] = end
    return found


def _place(address: str, rank: Rank, port: int) -> _Place:
    return address, rank.node if address == _LOOPBACK else "", port


def _addresses(rank: Rank) -> _Addresses:
    """Returns the addresses in the errors of ``rank``, each with its possible ports."""
    found: dict[tuple[str, tuple[int, ...]], None] = {}
    for text in _errors(rank):
        for match in _ADDRESS.finditer(text) if _CLOSED.search(text) else ():
            address, port = [group for group in match.groups() if group is not None]
            if not (match.end() == len(text) and len(text) in _CUT):
                swapped = (int(port) & 0xFF) << 8 | int(port) >> 8
                found[_plain(address), (int(port), swapped) if _OF_GLOO.search(text) else (int(port),)] = None
    return list(found)[:_MOST_ADDRESSES]


def _errors(rank: Rank) -> list[str]:
    texts = [*rank.logs, *(o.error for o in (*rank.done, *rank.open)), *(w.async_error for w in rank.witnesses)]
    return [text for text in texts if text]


def _plain(address: str) -> str:
    """Returns an address as Python writes it, an IPv4-mapped IPv6 address as IPv4; "loopback" for all loopback
    addresses.
    """
    if address == "localhost":
        return _LOOPBACK
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    found = getattr(found, "ipv4_mapped", None) or found
    return _LOOPBACK if found.is_loopback else str(found)
