"""What the certificate of a connection says about which node calls."""

from __future__ import annotations

import pytest

from probing.daemon.query.caller import Caller
from probing.daemon.service.peer_identity import proven_node, proves_node

MEMBERS = ("", "gn6", "gn7", "GN8")


@pytest.mark.parametrize(
    ("names", "node"),
    [
        (("gn6",), "gn6"),
        (("gn6", "gn6.example.org"), "gn6"),
        (("gn8",), "GN8"),
        (("gn9",), None),
        (("gn6", "gn7"), None),
        ((), None),
    ],
)
def test_a_certificate_proves_the_node_that_it_names(names: tuple[str, ...], node: str | None) -> None:
    caller = Caller("tcp", "10.0.0.1", nodes=frozenset(names))
    assert proven_node(caller, MEMBERS) == node
    assert [name for name in MEMBERS if proves_node(caller, name)] == [m for m in MEMBERS if m.lower() in names]
