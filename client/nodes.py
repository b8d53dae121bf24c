"""The nodes of a cluster: their addresses, connections, and one question to all of them at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from probing.api.errors import NotFound
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.selection import choose, vouches
from probing.client.settings import DEFAULT_TARGET
from probing.client.wire.connection import Connection
from probing.client.wire.credentials import Credentials
from probing.client.wire.tls import Tls
from probing.federation.execution.asking import Policy
from probing.federation.execution.clocks import Clocks
from probing.federation.execution.fanout import Failed, Gathered, fan_out

if TYPE_CHECKING:
    from typing_extensions import Self

    from probing.client.wire.crowd import Crowd

__all__ = ("Nodes",)

T = TypeVar("T")
_R = TypeVar("_R", pb.StacksReply, pb.VarsReply, pb.ConfigReply, pb.FactsReply)


class Nodes:
    """``target``, or ``nodes``, or with ``all_nodes`` the peers that ``target`` knows; of these only those whose labels
    meet ``where``, pairs of a label and a pattern. ``timeout`` in seconds.

    With ``strict`` PartialAnswer is raised where a node fails or lacks rows; else ``outcomes`` records which failed,
    and ``clocks`` how far the nodes' clocks are from ours. ``policy`` says how many nodes are asked at once, and which
    twice. ``max_bytes`` (Arrow) bounds an answer in memory, not one that is streamed. ``watch`` is called with the
    address of a node and the progress of its query, ``done`` with the numbers of nodes that are done with a question
    and of all that are asked it. ``tls``: the files with which TCP is encrypted; None: it is in the clear. Safe to use
    from several threads.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        nodes: Sequence[str] = (),
        all_nodes: bool = False,
        where: Sequence[tuple[str, str]] = (),
        strict: bool = False,
        token: str = "",
        tls: Tls | None = None,
        timeout: float = 30.0,
        max_bytes: int = 256 << 20,
    ) -> None:
        self.target = target
        self.timeout = timeout
        self.strict = strict
        self.max_bytes = max_bytes
        self.outcomes: list[Gathered[Any]] = []
        self.clocks = Clocks()
        self.policy = Policy()
        self.watch: Callable[[str, pb.QueryProgress], None] | None = None
        self.done: Callable[[int, int], None] = lambda *_: None
        # Nodes that are not asked, since the target knows that they have failed.
        self.absent: tuple[Failed, ...] = ()
        self._nodes = tuple(nodes)
        self._all_nodes = all_nodes or bool(where)
        self._where = tuple(where)
        self._credentials = Credentials(token)
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._crowd: Crowd | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            crowd, self._crowd = self._crowd, None
        if crowd is not None:
            crowd.close()

    @property
    def many(self) -> bool:
        """Whether questions go to more nodes than the target."""
        return bool(self._nodes) or self._all_nodes

    def connection(self, address: str) -> Connection:
        with self._lock:
            if address not in self._connections:
                self._connections[address] = Connection(address, credentials=self._credentials, tls=self._tls)
            return self._connections[address]

    def crowd(self) -> Crowd:
        """Returns what asks many nodes at once."""
        # Loads pyarrow.
        from probing.client.wire.crowd import Crowd

        with self._lock:
            if self._crowd is None:
                self._crowd = Crowd(
                    self._credentials,
                    self._tls,
                    self.clocks,
                    max_bytes=self.max_bytes,
                    strict=self.strict,
                    policy=self.policy,
                )
            return self._crowd

    def addresses(self) -> tuple[str, ...]:
        """Returns the addresses that are asked. Raises PeerError where the target does not answer for its peers."""
        if not self.many:
            return (self.target,)
        if not self._nodes:
            self._nodes = self._peers()
        return self._nodes

    def asked(self, sql: str) -> tuple[str, ...]:
        """Returns the addresses that ``sql`` is merged from, all where it has ``global.`` tables; none: the target."""
        from probing.federation.sql.names import wants_all_nodes

        if self.many:
            return self.addresses()
        return self._peers() if wants_all_nodes(sql) else ()

    def _peers(self) -> tuple[str, ...]:
        """Returns the addresses of the nodes that the target knows and that have not failed; those are outcomes."""
        target = self.connection(self.target)
        own = target.status(self.timeout).node
        peers = target.peers(self.timeout).peers
        with_token = bool(self._credentials.token)
        if with_token and not vouches(own, peers) and any(peer.node not in ("", own) for peer in peers):
            sys.stderr.write(f"warning: {own} is of a version that vouches for no node: all are shown your token\n")
        chosen = choose(self.target, own, peers, self._where, token=with_token)
        self._credentials.bind(peer for peer in peers if peer.address != self.target)
        self.absent = chosen.failed
        if chosen.failed:
            gathered = chosen.gathered()
            self.outcomes.append(gathered)
            if self.strict or not chosen.addresses:
                gathered.refuse()
        return chosen.addresses

    def cancel(self) -> None:
        """Ends the queries in flight, here and at the nodes."""
        with self._lock:
            connections, crowd = list(self._connections.values()), self._crowd
        if crowd is not None:
            crowd.cancel()
        for connection in connections:
            connection.cancel()

    def each(self, ask: Callable[[Connection, float], tuple[str, T]]) -> Gathered[T]:
        """Calls ``ask(connection, seconds)``, which returns a node's name and answer, for every node at once."""
        gathered = fan_out(self.addresses(), lambda a, seconds: ask(self.connection(a), seconds), self.timeout)
        self.outcomes.append(gathered)
        gathered.require(strict=self.strict)
        return gathered

    def some(self, ask: Callable[[Connection, float], _R]) -> list[_R]:
        """Returns the replies of the nodes that do not raise NotFound. Raises it where all do."""
        missing: list[NotFound] = []

        def attempt(connection: Connection, seconds: float) -> tuple[str, _R | None]:
            try:
                reply = ask(connection, seconds)
            except NotFound as e:
                # Another node may have it.
                missing.append(e)
                return connection.address, None
            return reply.node, reply

        replies = [a.value for a in self.each(attempt).answered if a.value is not None]
        if not replies and missing:
            raise missing[0]
        return replies

    def watching(self, address: str) -> Callable[[pb.QueryProgress], None] | None:
        watch = self.watch
        return None if watch is None else lambda progress: watch(address, progress)
