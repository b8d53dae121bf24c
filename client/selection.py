"""Chooses nodes by what the target knows of them: their labels (``--where rack=r7``), and whether they have failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from probing.api.errors import NotFound, PeerError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.federation.execution.answer import Failed, Gathered

__all__ = ("Chosen", "choose", "vouches")

_CERTIFICATE = "certificate"
_UNPROVEN = "nothing proves its name to the target, so it is not shown your token"
# A label that all nodes have.
NAME = "node"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The addresses to ask, and the nodes that are not asked since the target knows that they have failed."""

    addresses: tuple[str, ...]
    failed: tuple[Failed, ...] = ()

    def gathered(self) -> Gathered[None]:
        """Returns the failed nodes as the outcome of a question to them."""
        return Gathered(tuple(f.address for f in self.failed), failed=list(self.failed))


def choose(
    target: str,
    own: str,
    peers: Sequence[pb.Peer],
    where: Sequence[tuple[str, str]] = (),
    *,
    token: bool = False,
) -> Chosen:
    """Returns which of ``peers`` are asked: those that meet all conditions and have not failed; ``own`` at ``target``.

    ``token``: a token is shown, so that nodes for which the target does not vouch are not asked. Raises NotFound where
    none meets the conditions.
    """
    met = [peer for peer in peers if peer.address and _meets(peer, where)]
    # An older daemon may leave itself out.
    if not any(peer.node == own for peer in peers) and not where:
        met.insert(0, pb.Peer(node=own, address=target))
    if not met:
        texts = ",".join(f"{key}={pattern}" for key, pattern in where)
        raise NotFound(f"no node is known with {texts}", hint="`probingctl nodes` shows the labels of nodes")
    asked = {target if peer.node == own else peer.address: peer for peer in met if peer.state != "failed"}
    failed = {peer.address: peer for peer in met if peer.state == "failed" and peer.address not in asked}
    errors = {address: _error(peer) for address, peer in failed.items()}
    if token and vouches(own, peers):
        for address, peer in list(asked.items()):
            # A bound token is worth nothing elsewhere; the token itself is for nodes that somebody stands for.
            if address != target and not (peer.bound or peer.proof == _CERTIFICATE or peer.named):
                failed[address] = asked.pop(address)
                errors[address] = PeerError(_UNPROVEN, hint=f"upgrade its daemon, or name it: --nodes {address}")
    first = sorted(asked, key=lambda address: address != target)
    return Chosen(tuple(first), tuple(Failed(a, peer.node, errors[a]) for a, peer in failed.items()))


def vouches(own: str, peers: Sequence[pb.Peer]) -> bool:
    """Returns whether the target, the node ``own``, is of a version that says what proves its peers."""
    return any(peer.node == own and peer.bound for peer in peers)


def _meets(peer: pb.Peer, where: Sequence[tuple[str, str]]) -> bool:
    # A seed that has not answered has no name and no labels.
    labels = {**peer.labels, NAME: peer.node}
    return all(key in labels and fnmatchcase(labels[key], pattern) for key, pattern in where)


def _error(peer: pb.Peer) -> PeerError:
    from probing.api.text import utc

    since = f" since {utc(peer.since_ns)}" if peer.since_ns else ""
    return PeerError(f"failed{since}, as the target knows", hint="ask it with --nodes if it is back")
