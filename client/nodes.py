"""The nodes of a cluster: finds their addresses, connects to them, and asks all of them a question at once.

Nodes are chosen by facts that the target knows: their labels (``--where rack=r7``), and whether they have failed.
"""

from __future__ import annotations

import copy
import glob
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from probing.api.errors import NotFound, PeerError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import utc
from probing.client.settings import DEFAULT_TARGET
from probing.client.wire.channels import checked
from probing.client.wire.credentials import Credentials, Tls
from probing.client.wire.loop import Work, in_loop, wait
from probing.client.wire.node import Node, Wire
from probing.federation.execution.answer import Failed, Gathered
from probing.federation.execution.asking import ONCE, Policy, ask_many
from probing.federation.execution.clocks import Clocks

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = (
    "Nodes",
    "choose",
    "time_for",
)

_CERTIFICATE = "certificate"
_UNPROVEN = "nothing proves its name to the target, so it is not shown your token"
# This process can read at least this many answers of nodes in a second, even while it works on other answers.
_READS_A_SECOND = 50
# A label that all nodes have.
NAME = "node"


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The addresses to ask, and the nodes that are not asked because the target knows that they have failed."""

    addresses: tuple[str, ...]
    failed: tuple[Failed, ...] = ()

    def gathered(self) -> Gathered[None]:
        """Returns the failed nodes as the outcome of a question that no node answered."""
        return Gathered(tuple(f.address for f in self.failed), failed=list(self.failed))


def choose(
    target: str,
    own: str,
    peers: Sequence[pb.Peer],
    where: Sequence[tuple[str, str]] = (),
    *,
    token: bool = False,
    tcp_alone: bool = False,
) -> _Chosen:
    """Returns which of ``peers`` are asked: the nodes that meet all conditions and have not failed. The node ``own`` is
    asked at ``target``.

    ``token`` says whether a token is sent; if so, nodes for which the target does not vouch are not asked. With
    ``tcp_alone`` Unix sockets are not asked. Raises NotFound if no node meets the conditions.
    """
    met = [peer for peer in peers if peer.address and _meets(peer, where)]
    # An older daemon may not list itself.
    if not any(peer.node == own for peer in peers) and not where:
        met.insert(0, pb.Peer(node=own, address=target))
    if not met:
        texts = ",".join(f"{key}={pattern}" for key, pattern in where)
        raise NotFound(f"no known node has {texts}", hint="`probingctl nodes` shows the labels of nodes")
    asked = {target if peer.node == own else peer.address: peer for peer in met if peer.state != "failed"}
    failed = {peer.address: peer for peer in met if peer.state == "failed" and peer.address not in asked}
    errors = {address: _error(peer) for address, peer in failed.items()}
    for address in [address for address in asked if tcp_alone and address.startswith("unix:")]:
        failed[address] = asked.pop(address)
        errors[address] = PeerError("only its Unix socket is known", hint="set `listen` in its configuration")
    if token and _vouches(own, peers):
        for address, peer in list(asked.items()):
            # A node that accepts bound tokens gets a token bound to its name, which is useless at other nodes. The
            # token itself is shown only to nodes whose identity is proven.
            if address != target and not (peer.bound or peer.proof == _CERTIFICATE or peer.named):
                failed[address] = asked.pop(address)
                errors[address] = PeerError(_UNPROVEN, hint=f"upgrade its daemon, or name the node: --nodes {address}")
    first = sorted(asked, key=lambda address: address != target)
    return _Chosen(tuple(first), tuple(Failed(a, peer.node, errors[a]) for a, peer in failed.items()))


def _vouches(own: str, peers: Sequence[pb.Peer]) -> bool:
    """Returns whether the target (the node ``own``) runs a daemon new enough to report how each peer proved its
    identity.
    """
    return any(peer.node == own and peer.bound for peer in peers)


def _meets(peer: pb.Peer, where: Sequence[tuple[str, str]]) -> bool:
    # A seed that has not answered has neither name nor labels.
    labels = {**peer.labels, NAME: peer.node}
    return all(key in labels and fnmatchcase(labels[key], pattern) for key, pattern in where)


def _error(peer: pb.Peer) -> PeerError:
    since = f" since {utc(peer.since_ns)}" if peer.since_ns else ""
    return PeerError(f"failed{since}, as the target knows", hint="ask it with --nodes if it is back")


T = TypeVar("T")
_CLOSE_S = 0.5
_R = TypeVar(
    "_R",
    pb.StacksReply,
    pb.VarsReply,
    pb.ConfigReply,
    pb.EvalReply,
    pb.AnnotateReply,
    pb.FactsReply,
    pb.GroupReply,
    pb.GroupLogReply,
)


def time_for(nodes: int, seconds: float) -> float:
    """Returns ``seconds``, or a longer time limit if many nodes are asked. Otherwise answers that this process has not
    read yet would be late, and their nodes would count as silent.
    """
    return max(seconds, nodes / _READS_A_SECOND)


class Nodes:
    """Asks ``target``; or ``nodes``, if any are given; or, with ``all_nodes`` or ``where``, the peers that ``target``
    knows. ``where`` (pairs of a label and a pattern) leaves out peers whose labels do not match. ``timeout``: the time
    limit of a question, s.

    With ``strict`` PartialAnswer is raised if a node fails or lacks rows; else ``outcomes`` records which nodes failed.
    ``clocks`` has the offsets of the nodes' clocks from the clock of this machine. ``policy`` says how many nodes are
    asked at once, and when a node is asked again. ``tcp_alone``: no Unix socket is asked, because its node would answer
    with the rights of this process. ``max_bytes`` (Arrow) bounds an answer in memory, but not a streamed answer.

    ``watch`` is called with the address of a node and the progress of its query. ``done`` is called with the number of
    nodes that are done with a question and the number of nodes that were asked. ``tls``: the files with which TCP is
    encrypted; None: TCP is unencrypted. Thread-safe.
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
        tcp_alone: bool = False,
    ) -> None:
        self.target = target
        self._tcp_alone = tcp_alone
        self.timeout = timeout
        self.strict = strict
        self.max_bytes = max_bytes
        self.outcomes: list[Gathered[Any]] = []
        self.clocks = Clocks()
        self.policy = Policy()
        self.watch: Callable[[str, pb.QueryProgress], None] | None = None
        self.done: Callable[[int, int], None] = lambda *_: None
        # Nodes that are not asked because the target knows that they have failed.
        self.absent: tuple[Failed, ...] = ()
        self._named = self._nodes = tuple(nodes)
        self._all_nodes = all_nodes or bool(where)
        self._where = tuple(where)
        # The name of the node that answered at each address; the newest answer comes last.
        self._names: dict[str, str] = {}
        self._wire = Wire(Credentials(token), tls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the questions in flight and closes all connections; waits at most a short time."""
        with suppress(TimeoutError):
            Work(self._wire.close()).result(_CLOSE_S)

    @property
    def many(self) -> bool:
        """Whether questions go to other nodes than the target."""
        return bool(self._nodes) or self._all_nodes

    @property
    def named(self) -> bool:
        """Whether the addresses of the nodes were given, so that the target is not asked for its peers."""
        return bool(self._named)

    def afresh(self, *, all_nodes: bool | None = None, node: str = "") -> Self:
        """Returns a copy with the same connections and empty ``outcomes``, which asks the target again for its peers.

        ``all_nodes``: whether all nodes are asked; None keeps the choice of ``self``. ``node``: if set, only the peer
        of this name is asked.
        """
        other = copy.copy(self)
        other.outcomes, other.absent, other._nodes = [], (), self._named
        if all_nodes is not None:
            other._all_nodes = all_nodes
            other._nodes = self._named if all_nodes else ()
        if node and other.many and not self._named:
            other._where, other._nodes, other._all_nodes = ((NAME, glob.escape(node)),), (), True
        return other

    def at(self, addresses: Sequence[str]) -> Self:
        """Returns a copy with the same connections and empty ``outcomes``, which asks the nodes at ``addresses``.

        Raises UsageError for a Unix socket if ``tcp_alone`` is set.
        """
        if self._tcp_alone and (socket := next((one for one in addresses if one.startswith("unix:")), "")):
            raise UsageError(f"{socket} asks for no token", hint="set `listen` in the configuration of its node")
        other = copy.copy(self)
        other.outcomes, other.absent, other._where, other._all_nodes = [], (), (), True
        other._named = other._nodes = tuple(addresses)
        return other

    def of_nodes(self, names: Collection[str]) -> Self:
        """Returns a copy, as ``at`` does, that asks the nodes with these ``names``. Returns ``self`` if one of them has
        not answered yet, or if only the target is asked.
        """
        addresses = {name: address for address, name in self._names.copy().items() if name in names}
        return self.at(tuple(addresses.values())) if self.many and len(addresses) == len(set(names)) else self

    def node(self, address: str) -> Node:
        """Returns an object whose methods call the node at ``address``.

        Raises UsageError for an invalid address, and for a token that would be sent unencrypted.
        """
        return Node(checked(address, self._wire.channels.clear_token), self._wire)

    def addresses(self) -> tuple[str, ...]:
        """Returns the addresses that are asked. Raises PeerError if the target does not answer when it is asked for its
        peers.
        """
        if not self.many:
            return (self.target,)
        if not self._nodes:
            self._nodes = self._peers()
        return self._nodes

    def meet(self, addresses: Sequence[str]) -> None:
        """Adds ``addresses`` to the nodes that are asked, unless only the target is asked."""
        if self.many:
            self._nodes = tuple(dict.fromkeys((*self.addresses(), *addresses)))

    def asked(self, sql: str) -> tuple[str, ...]:
        """Returns the addresses that answer ``sql``: all nodes if ``sql`` has ``global.`` tables or many nodes are
        asked. Returns an empty tuple if only the target answers.
        """
        from probing.federation.sql.names import wants_all_nodes

        if self.many:
            return self.addresses()
        return self._peers() if wants_all_nodes(sql) else ()

    def _peers(self) -> tuple[str, ...]:
        """Returns the addresses of the nodes that the target knows and that have not failed. Records the failed nodes
        in ``absent`` and ``outcomes``.
        """
        target, credentials = self.node(self.target), self._wire.credentials
        own = wait(target.status(self.timeout)).node
        peers = wait(target.peers(self.timeout)).peers
        with_token = bool(credentials.token)
        if with_token and not _vouches(own, peers) and any(peer.node not in ("", own) for peer in peers):
            sys.stderr.write(f"warning: the version of {own} vouches for no node: your token is shown to all nodes\n")
        chosen = choose(self.target, own, peers, self._where, token=with_token, tcp_alone=self._tcp_alone)
        credentials.bind(peer for peer in peers if peer.address != self.target)
        self.absent = chosen.failed
        if chosen.failed:
            gathered = chosen.gathered()
            self.outcomes.append(gathered)
            if self.strict or not chosen.addresses:
                gathered.refuse()
        return chosen.addresses

    def cancel(self) -> None:
        """Ends the calls in flight, here and at the nodes."""
        in_loop(self._wire.cancel)

    def ask(
        self, addresses: Sequence[str], ask: Callable[[Node, float], Awaitable[tuple[str, T]]], seconds: float
    ) -> Gathered[T]:
        """Asks all ``addresses`` at once by calling ``ask(node, seconds)``, which returns a node's name and answer."""

        async def once(address: str, left: float, _attempt: int) -> tuple[str, T]:
            return await ask(self.node(address), left)

        return self.keep_names(wait(ask_many(addresses, once, seconds, ONCE)))

    def keep_names(self, gathered: Gathered[T]) -> Gathered[T]:
        """Keeps the names of the nodes that answered, for ``of_nodes``; returns ``gathered``."""
        for answered in gathered.answered:
            # ``some`` puts the address in place of an unknown name, and an address must not be kept as a name.
            if answered.node != answered.address:
                self._names.pop(answered.address, None)
                self._names[answered.address] = answered.node
        return gathered

    def each(self, ask: Callable[[Node, float], Awaitable[tuple[str, T]]]) -> Gathered[T]:
        """Asks every node as ``ask`` does, and records the outcome. Raises the nodes' error if no node answers."""
        gathered = self.ask(self.addresses(), ask, self.timeout)
        self.outcomes.append(gathered)
        gathered.require(strict=self.strict)
        return gathered

    def some(self, ask: Callable[[Node, float], Awaitable[_R]]) -> list[_R]:
        """Returns the replies of the nodes that do not raise NotFound. Raises NotFound if all nodes raise it."""
        missing: list[NotFound] = []

        async def attempt(node: Node, seconds: float) -> tuple[str, _R | None]:
            try:
                reply = await ask(node, seconds)
            except NotFound as e:
                # The error is not raised yet, because another node may have what was asked for.
                missing.append(e)
                return self._names.get(node.address, node.address), None
            return reply.node, reply

        replies = [a.value for a in self.each(attempt).answered if a.value is not None]
        if not replies and missing:
            raise missing[0]
        return replies

    def enough(self, seconds: float) -> float:
        """Returns the result of ``time_for`` for all nodes that are asked. Raises the errors of ``addresses``."""
        return time_for(len(self.addresses()), seconds)

    def watching(self, address: str) -> Callable[[pb.QueryProgress], None] | None:
        watch = self.watch
        return None if watch is None else lambda progress: watch(address, progress)
