"""Finds out which node a caller's connection proves.

With TLS a node is proven by the DNS names among the alternative names of its certificate. A certificate may have
several names, such as ``gn6`` and ``gn6.example.org``, and a certificate that all nodes share has the names of all
nodes. So a claimed name is checked against the certificate. Without a claimed name, the certificate names the caller
only if it has the name of exactly one member.
"""

from __future__ import annotations

from collections.abc import Iterable

from probing.daemon.query.caller import Caller

__all__ = ("proven_node", "proves_node")


def proves_node(caller: Caller, name: str) -> bool:
    """Returns whether the connection of ``caller`` proves that it is the node ``name``."""
    return name.lower() in caller.nodes


def proven_node(caller: Caller, members: Iterable[str]) -> str | None:
    """Returns the only name of ``members`` (names of nodes) that the connection of ``caller`` proves.

    None if the connection proves no name, or several.
    """
    proven = [name for name in members if name and proves_node(caller, name)]
    return proven[0] if len(proven) == 1 else None
