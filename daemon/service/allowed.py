"""Decides to which addresses this node connects: to addresses that its administrator named, and to addresses in allowed
networks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from probing.api.errors import PeerError
from probing.daemon.service.names import OF_NODES

__all__ = ("Allowed", "around", "own_networks", "parsed_networks")

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# The time after which a name is looked up again, s.
AGAIN_S = 30.0
MAX_NAMES = 4096
# How long ``outside`` returns an address after a call has needed it, s.
SAID_S = 60.0
# Blocks of addresses that count as one site: loopback, private, shared (RFC 6598), link-local.
_SITES = tuple(
    map(
        ipaddress.ip_network,
        (
            "127.0.0.0/8",
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/10",
            "169.254.0.0/16",
            "::1/128",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)
_HINT = "add its network to cluster.allow of this node"


class Allowed:
    """The allowed addresses. ``networks``: the value of ``cluster.allow``. ``own``: the address of this node. If
    ``networks`` is empty, these are allowed: the networks of this machine's interfaces, and the network around each
    seed and around ``own`` (see ``around``). Belongs to one event loop."""

    def __init__(self, networks: Sequence[str] = (), own: str = "") -> None:
        self._chosen = bool(networks)
        self._networks: tuple[Network, ...] = tuple(parsed_networks(networks))
        self._own = own
        # Addresses that the administrator named, as HOST:PORT: they are allowed in any network.
        self.named: frozenset[str] = frozenset()
        self._ips: dict[str, tuple[float, tuple[Ip, ...]]] = {}
        self._looking: dict[str, asyncio.Task[tuple[Ip, ...]]] = {}
        # The time when a call last needed each address outside the networks.
        self._refused: dict[str, float] = {}

    async def set_seeds(self, seeds: Iterable[str]) -> None:
        """Allows the addresses of the seeds."""
        self.named = frozenset(seeds)
        if self._chosen:
            return
        hosts = {address.rpartition(":")[0].strip("[]") for address in (*self.named, self._own) if _is_tcp(address)}
        found = await asyncio.gather(*(self._resolved(host) for host in sorted(hosts)))
        sites = (around(ip) for ips in found for ip in ips)
        self._networks = tuple(dict.fromkeys((*own_networks(), *sites)))

    async def target(self, address: str) -> str:
        """Returns gRPC's target for ``address`` (HOST:PORT). Raises PeerError for an address that is not allowed.

        A name is resolved once, so that gRPC connects to the addresses that were checked.
        """
        if not _is_tcp(address):
            return address
        host, _, port = address.rpartition(":")
        ips = await self._resolved(host.strip("[]"))
        if not ips:
            raise PeerError(
                f"the host name of {address} cannot be resolved", hint="check the name, and DNS on this node"
            )
        if address not in self.named:
            ips = tuple(ip for ip in ips if any(ip in network for network in self._networks))
        if not ips:
            if len(self._refused) >= MAX_NAMES:
                self._refused.clear()
            self._refused[address] = time.monotonic()
            raise PeerError(f"{address} is outside cluster.allow: this node does not connect to it", hint=_HINT)
        if len(ips) == 1 and _literal(host.strip("[]")):
            return f"dns:///{address}"
        first = ips[0].version
        parts = (f"[{ip}]:{port}" if first == 6 else f"{ip}:{port}" for ip in ips if ip.version == first)
        return f"ipv{first}:{','.join(parts)}"

    def outside(self) -> list[str]:
        """Returns the addresses that calls needed recently and that are not allowed. Thread-safe."""
        since = time.monotonic() - SAID_S
        return sorted(address for address, at in self._refused.copy().items() if at > since)

    async def among(self, addresses: Iterable[str]) -> set[str]:
        """Returns the allowed addresses among ``addresses``."""
        asked = list(addresses)
        found = await asyncio.gather(*map(self.target, asked), return_exceptions=True)
        return {address for address, target in zip(asked, found, strict=True) if isinstance(target, str)}

    async def _resolved(self, host: str) -> tuple[Ip, ...]:
        """Returns the addresses of ``host``; empty if its name cannot be resolved."""
        if (literal := _literal(host)) is not None:
            return (literal,)
        known = self._ips.get(host)
        if known is not None and time.monotonic() - known[0] <= AGAIN_S:
            return known[1]
        # Calls that need the same name share one look-up. It continues even if the call that started it is cancelled.
        if (looking := self._looking.get(host)) is None:
            looking = self._looking[host] = asyncio.create_task(self._look_up(host))
            looking.add_done_callback(lambda _: self._looking.pop(host, None))
        return await asyncio.shield(looking)

    async def _look_up(self, host: str) -> tuple[Ip, ...]:
        try:
            entries = await OF_NODES.entries(host, None)
        except OSError:
            entries = []
        found = tuple(dict.fromkeys(ip for entry in entries if (ip := _literal(str(entry[4][0]))) is not None))
        if len(self._ips) >= MAX_NAMES:
            self._ips.clear()
        self._ips[host] = time.monotonic(), found
        return found


def parsed_networks(texts: Iterable[str]) -> Iterator[Network]:
    """Yields the networks that ``texts`` name, such as 10.0.0.0/8. Raises ValueError."""
    return (ipaddress.ip_network(text, strict=False) for text in texts)


def around(ip: Ip) -> Network:
    """Returns the site of an address: the block of _SITES that contains it, or else the /16 (IPv4) or /48 (IPv6) around
    it, the usual size of an organization's network.
    """
    for site in _SITES:
        if ip in site:
            return site
    return ipaddress.ip_network(f"{ip}/{16 if ip.version == 4 else 48}", strict=False)


def own_networks(proc: Path = Path("/proc/net")) -> Iterator[Network]:
    """Yields the networks of this machine's interfaces except loopback, from proc(5)'s net/route and net/if_inet6.

    These files are read without waiting for a driver. psutil uses netlink, which may wait.
    """
    for line in _lines(proc / "route")[1:]:
        words = line.split()
        if len(words) > 7 and words[2] == "00000000" and words[7] != "00000000":
            base, mask = (int.from_bytes(bytes.fromhex(words[i]), "little") for i in (1, 7))
            yield ipaddress.IPv4Network((base, mask.bit_count()), strict=False)
    for line in _lines(proc / "if_inet6"):
        words = line.split()
        if len(words) == 6 and words[5] != "lo":
            yield ipaddress.IPv6Network((int(words[0], 16), int(words[2], 16)), strict=False)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _is_tcp(address: str) -> bool:
    return not address.startswith(("unix:", "dns:")) and ":" in address


def _literal(host: str) -> Ip | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if found.version == 6 else found
