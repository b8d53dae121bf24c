"""MASTER_ADDR resolves to the same host on all nodes, is one of theirs, and MASTER_PORT is free or listening there."""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case, NodeFacts
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("check",)

NAME = "master"
_LOOPBACK = ("127.", "::1")


def check(case: Case) -> Iterator[Result]:
    """Fails where the name does not resolve, or to the node itself on several, and where the port is taken."""
    address = next((value for node in case.nodes if (value := case.variable(node, "MASTER_ADDR"))), "")
    port = next((value for node in case.nodes if (value := case.variable(node, "MASTER_PORT"))), "29500")
    if not address:
        if case.nodes:
            yield skipped(NAME, "no MASTER_ADDR is known: name it in --env-file F")
        return
    where = f"{address}:{port}"
    known = [(node, node.master) for node in case.nodes if node.master is not None]
    found = 0
    for node in case.nodes:
        if why := node.problem("master"):
            yield Result(
                NAME,
                FAIL,
                f"{node.node} cannot resolve MASTER_ADDR {address}: {why}",
                (node.node,),
                "name a host that all nodes resolve, or an IP address",
            )
            found += 1
    owners = [node for node, master in known if master.local]
    if _apart(owners):
        text = f"MASTER_ADDR {address} is the node itself on each of {names(n.node for n in owners)}"
        yield Result(NAME, FAIL, text, tuple(n.node for n in owners), "name the master by an address that others reach")
        found += 1
    elif known and not owners and not case.silent:
        yield Result(NAME, WARN, f"MASTER_ADDR {address} is no address of these nodes", (), "is it the right host?")
        found += 1
    for node, master in known:
        if master.port == "taken":
            text = f"MASTER_PORT {port} of {node.node} is taken by a connection, so that nobody can listen on it"
            yield Result(NAME, FAIL, text, (node.node,), "choose another MASTER_PORT")
            found += 1
    if not found and known:
        state = next((master.port for _, master in known if master.port), None)
        yield Result(NAME, PASS, f"{where} resolves on all nodes" + (f", the port is {state}" if state else ""))


def _apart(owners: list[NodeFacts]) -> bool:
    """Whether they are several machines: two daemons may share one, which has no boot id then that differs."""
    return len({node.boot_id or node.node for node in owners}) > 1
