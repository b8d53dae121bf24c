"""Keeps channels to many nodes open, within the limit of file descriptors. Closes the least recently used first."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import OrderedDict
from functools import cached_property
from itertools import islice
from typing import Any

import grpc
import grpc.aio

from probing.api.errors import ProbingError, UsageError
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.client.wire.credentials import Tls, credentials_of
from probing.client.wire.proven import ProvenRoute

__all__ = ("Channel", "Channels", "checked")

_MOST = 2048
# File descriptors that are left for the rest of the process.
_SPARE = 256
_MAX_MESSAGE = 64 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # By default gRPC waits up to two minutes between connection attempts, too long for a daemon that has been
    # restarted.
    ("grpc.max_reconnect_backoff_ms", 5000),
    # gRPC also uses this option as the timeout of a connection attempt, which is needed because a node without power
    # does not refuse the connection.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # With this option a second channel to the same node gets its own connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class Channel:
    """A channel to the node at ``address``, with the stub of its service. ``clear_token``: the token, if it is sent
    without TLS; else empty.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None, clear_token: str = "") -> None:
        self.address = address
        is_path = address.startswith("unix:")
        self._route = ProvenRoute(address) if clear_token and not is_path else None
        target = self._route.target if self._route else address if is_path else f"dns:///{address}"
        if credentials is None or is_path:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self.users = 0
        # The generated stub has no types.
        self.stub: Any = NodeStub(self._channel)

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def problem(self) -> ProbingError | None:
        """Why the node was not shown the token; None if it was shown the token or does not answer."""
        return self._route.problem if self._route else None

    async def close(self) -> None:
        await self._channel.close()
        # The route is closed last, because another socket may bind the route's target afterwards.
        if self._route:
            self._route.close()


class Channels:
    """The channels of one event loop."""

    def __init__(self, token: str, tls: Tls | None) -> None:
        self.clear_token = token if tls is None else ""
        self._tls = tls
        self._kept: OrderedDict[str, Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A proven route needs three more descriptors.
        self._most = max(32, min(_MOST, (soft - _SPARE) // (5 if self.clear_token else 2)))

    @cached_property
    def _credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._tls is None else credentials_of(self._tls)

    def take(self, address: str, *, apart: bool = False) -> Channel:
        """Returns the channel that is kept for ``address``; if ``apart``, a new channel that is not kept.

        The caller ends the use with ``give_back``. Raises UsageError for a wrong address, for TLS files that cannot be
        used, and for a token that would be sent unencrypted.
        """
        channel = None if apart else self._kept.get(address)
        if channel is None:
            credentials = None if address.startswith("unix:") else self._credentials
            channel = Channel(checked(address, self.clear_token), credentials, self.clear_token)
            if not apart:
                self._kept[address] = channel
        if not apart:
            self._kept.move_to_end(address)
        channel.users += 1
        return channel

    def connected(self, address: str) -> bool:
        channel = self._kept.get(address)
        return channel is not None and channel.connected

    def give_back(self, channel: Channel) -> None:
        """Ends the use of a channel, and closes it if it is not kept. If too many channels are kept, closes the unused
        channels that were used longest ago.
        """
        channel.users -= 1
        if self._kept.get(channel.address) is not channel:
            self._close(channel)
        surplus = len(self._kept) - self._most
        idle = islice((address for address, kept in self._kept.items() if not kept.users), max(surplus, 0))
        for address in list(idle):
            self._close(self._kept.pop(address))

    def _close(self, channel: Channel) -> None:
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        while self._kept:
            await self._kept.popitem()[1].close()


def checked(address: str, token: str) -> str:
    """Returns ``address``. Raises UsageError if it is not an address, or if ``token`` would be sent unencrypted."""
    if address.startswith("unix:"):
        if len(address) == len("unix:"):
            raise UsageError("unix: needs a path", hint="give unix:/run/probingd/probingd.sock or HOST:PORT")
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{address} is not an address of a node", hint="give unix:PATH or HOST:PORT")
    if token and not _is_loopback(host):
        raise UsageError(
            f"the token would travel in the clear to {address}",
            hint="use TLS (--tls-ca FILE), or a tunnel to a loopback port, or leave the token out",
        )
    return address


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
