"""Opens channels to the daemons of other nodes, with this node's certificate and its token for peers, and keeps used
channels open.

Every connection to another node is opened here. This module decides to which addresses this node connects, whether TLS
has to prove the name of a node, and whether a node gets the token itself or a token bound to its name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import grpc.aio

from probing.api.errors import PeerError
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.api.wire import bound, shown
from probing.daemon.service.allowed import Allowed
from probing.daemon.service.tls import Tls
from probing.daemon.service.tokens import Tokens

__all__ = (
    "Known",
    "Outgoing",
    "PeerStubs",
    "is_loopback",
    "lacks_name",
)

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # With these delays a node that comes back is reached within a few heartbeats. min_reconnect_backoff_ms also limits
    # each attempt to connect: in a longer attempt the kernel would send SYN at ever longer intervals.
    ("grpc.min_reconnect_backoff_ms", 4000),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # With the global pool a second channel would wait for the connection of the first channel.
    ("grpc.use_local_subchannel_pool", 1),
)
# The name that TLS checks in place of the address's host.
_CHECKED = "grpc.ssl_target_name_override"
_DNS = re.compile(r"(?=.{1,253}\Z)[\w-]{1,63}(\.[\w-]{1,63})*", re.ASCII)
Metadata = tuple[tuple[str, str], ...]


class Known(NamedTuple):
    """What the membership knows about the node at an address. ``certified``: certificates prove the name of the
    ``node``. ``keyed``: the node has a key, so it accepts tokens that are bound to its name."""

    node: str = ""
    certified: bool = False
    keyed: bool = False


class Outgoing:
    """The channels to other nodes. A node that speaks TLS on its own port uses TLS to all other nodes. Belongs to one
    event loop.

    ``known`` returns the ``Known`` of an address. ``allowed``: the addresses to which this node connects; None: all.
    """

    def __init__(
        self,
        tokens: Tokens | None = None,
        tls: Tls | None = None,
        allowed: Allowed | None = None,
        known: Callable[[str], Known] = lambda _: Known(),
    ) -> None:
        self._tokens = tokens
        self._tls = tls
        self.allowed = allowed
        self._known = known

    async def channel(self, address: str, *, node: str = "", anonymous: bool = False) -> grpc.aio.Channel:
        """Returns a channel to ``address`` (unix:PATH or HOST:PORT). Raises PeerError if the address is not allowed.

        ``node``: the name that the peer's certificate has to prove. If ``node`` is empty, the certificate has to prove
        the name that certificates have proven for this address before, or else the host of the address. ``anonymous``:
        this node shows no certificate, as for calls on behalf of another caller.
        """
        if address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        target = await self.allowed.target(address) if self.allowed else f"dns:///{address}"
        if not self._secure(address):
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        authorities, key, certificate = self._files()
        pair = (None, None) if anonymous else (key, certificate)
        credentials = grpc.ssl_channel_credentials(authorities, *pair)
        checked = self._checked(address, node)
        if not checked and not target.startswith("dns:"):
            # The target holds resolved IP addresses, so gRPC is told to verify the certificate against the host name.
            checked = address.rpartition(":")[0]
        options = (*_OPTIONS, (_CHECKED, checked)) if checked else _OPTIONS
        return grpc.aio.secure_channel(target, credentials, options=options)

    def key(self, address: str, node: str = "") -> tuple[str, str, int]:
        """Returns the key of a kept channel, which changes with the certificates of this node."""
        if self._tls is None or not self._secure(address):
            return address, "", 0
        return address, self._checked(address, node), self._tls.loads

    def nameless(self, node: str) -> bool:
        """Returns whether this node, called ``node``, speaks TLS with a certificate that does not prove its name."""
        return bool(self._tls and self._tls.wanted) and node.lower() not in (self._tls.names() if self._tls else ())

    def may_check(self, node: str) -> bool:
        """Returns whether TLS can prove the name ``node``: nodes speak TLS, and ``node`` is a DNS name."""
        return bool(self._tls and self._tls.wanted and _DNS.fullmatch(node) and _ip(node) is None)

    def metadata(self, address: str, node: str = "") -> Metadata:
        """Returns the metadata that shows this node's token in a call on the channel to ``address`` and ``node``.

        A node with a key gets a token bound to its name. A node without a key, which has an older version or has not
        answered yet, gets the token itself in three cases: the administrator named it; TLS proves its name; or it is
        inside ``cluster.allow``, and nodes have no authority whose certificates could prove it. A token is sent only by
        TLS or to loopback.
        """
        token = self._tokens.text if self._tokens else ""
        known = self._known(address)
        proven = bool(node) or known.keyed or known.certified or self.allowed is None or address in self.allowed.named
        if not token or not (proven or not (self._tls and self._tls.has_peers)):
            return ()
        return self.passed_on(address, shown(token))

    def passed_on(self, address: str, authorization: str) -> Metadata:
        """Returns the metadata of a call that shows ``authorization``. It is empty for an unencrypted call outside
        loopback.

        A node with a key does not get the token itself, but a token bound to its name, which other nodes do not accept.
        """
        if not authorization or not (self._secure(address) or is_loopback(address)):
            return ()
        known = self._known(address)
        if known.keyed and authorization.startswith(shown("")):
            authorization = bound(authorization.removeprefix(shown("")), known.node)
        return (("authorization", authorization),)

    def vouches(self, address: str) -> bool:
        """Returns whether another caller's token may be shown at ``address``: this node's administrator named it, or a
        key or certificates prove the name of its node."""
        known = self._known(address)
        return known.keyed or known.certified or self.allowed is None or address in self.allowed.named

    def _checked(self, address: str, node: str) -> str:
        known = self._known(address)
        return node or (known.node if known.certified and self.may_check(known.node) else "")

    def _secure(self, address: str) -> bool:
        return self._tls is not None and self._tls.wanted and not address.startswith("unix:")

    def _files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        assert self._tls is not None
        return self._tls.files()


def lacks_name(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether a call failed because the certificate at the other end lacks the checked name."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "ostname" in str(error.details() or "")


def is_loopback(address: str) -> bool:
    """Returns whether ``address`` (HOST:PORT) is a loopback address."""
    host = address.rpartition(":")[0]
    return host == "localhost" or bool((ip := _ip(host)) and ip.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


# If more channels than this are open, channels without calls are closed, the least recently used first. Channels to
# watched nodes are hardly ever among these, because each heartbeat uses them.
MAX_CHANNELS = 64
IDLE_S = 10.0
# The timeout of the look-up of a host's name, s. It comes in addition to the timeout of the call.
OPEN_S = 2.0


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to a peer. ``users``: the number of its calls in flight; ``used``: when the last call ended,
    ``answered``: when the last answer came, by the clock of the event loop.
    """

    channel: grpc.aio.Channel
    stub: Any
    users: int = 0
    used: float = 0.0
    answered: float = 0.0


class PeerStubs:
    """Stubs by address (unix:PATH or HOST:PORT). Belongs to one event loop."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._broken: list[_Peer] = []
        # Peers by ``Outgoing.key``, which changes with the certificate of this node; the most recently used last.
        self._peers: OrderedDict[tuple[str, str, int], _Peer] = OrderedDict()

    @asynccontextmanager
    async def use(self, address: str, node: str = "") -> AsyncIterator[Any]:
        """Yields the stub of the daemon at ``address``. ``node``: see ``Outgoing.channel``.

        Raises ConfigError if a certificate of this node is gone, and PeerError for an address that is not allowed, or
        whose name is not resolved in time.
        """
        key = self._outgoing.key(address, node)
        if key not in self._peers:
            try:
                channel = await asyncio.wait_for(self._outgoing.channel(address, node=node), OPEN_S)
            except asyncio.TimeoutError:
                raise PeerError(
                    f"the host name of {address} is not resolved within {OPEN_S:g} s", hint="check DNS on this node"
                ) from None
            # Another call may have opened a channel meanwhile.
            self._peers.setdefault(key, _Peer(channel, NodeStub(channel)))
        peer = self._peers[key]
        self._peers.move_to_end(key)
        peer.users += 1
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            yield peer.stub
            peer.answered = clock()
        except grpc.aio.AioRpcError as e:
            # The next call opens a new connection: the name of the peer may have another address by now. Also, the
            # kernel notices a cut link only after minutes. Its retransmissions back off meanwhile, so the old
            # connection may stay silent for long after the link is healed.
            silent = e.code() is grpc.StatusCode.DEADLINE_EXCEEDED and peer.answered < begun
            if (silent or e.code() is grpc.StatusCode.UNAVAILABLE) and self._peers.get(key) is peer:
                del self._peers[key]
                self._broken.append(peer)
            raise
        finally:
            peer.users -= 1
            peer.used = clock()

    @property
    def outgoing(self) -> Outgoing:
        return self._outgoing

    def metadata(self, address: str, node: str = "") -> Metadata | None:
        """Returns the metadata that a call to ``address`` needs. ``node``: see ``use``."""
        return self._outgoing.metadata(address, node) or None

    async def close_idle(self) -> None:
        """Closes connections that were idle for IDLE_S. While more than MAX_CHANNELS are open, also closes connections
        without calls, the least recently used first.
        """
        self._broken, broken = [], self._broken
        for peer in broken:
            if peer.users:
                self._broken.append(peer)
            else:
                await peer.channel.close()
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for key, peer in list(self._peers.items()):
            if not peer.users and (peer.used < oldest or len(self._peers) > MAX_CHANNELS):
                del self._peers[key]
                await peer.channel.close()

    async def close(self) -> None:
        for peer in (*self._peers.values(), *self._broken):
            await peer.channel.close()
        self._peers.clear()
        self._broken.clear()
