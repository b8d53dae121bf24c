"""Ports of RDMA devices are active, all at the rate of the others, on as many devices on each node."""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case, NodeFacts, Port
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, by_value, compared, names, skipped

__all__ = ("check",)

NAME = "infiniband"


def check(case: Case) -> Iterator[Result]:
    """Fails for ports that NCCL_IB_HCA names and that are down, and for rates below that of most ports."""
    with_ports = [node for node in case.nodes if node.ports]
    if not with_ports:
        if case.nodes:
            why = next((why for node in case.nodes if (why := node.problem("ports"))), "no node has an RDMA device")
            yield skipped(NAME, why)
        return
    used = {node.node: [port for port in node.ports if _named(case, node, port)] for node in with_ports}
    rates = [port.rate_gbps for ports in used.values() for port in ports if port.state == "ACTIVE" and port.rate_gbps]
    usual = next(iter(by_value(("", rate) for rate in rates)), None)
    found = [result for node, ports in used.items() for port in ports for result in _of(node, port, usual)]
    yield from found
    if without := [node.node for node in case.nodes if not node.ports and not node.problem("ports")]:
        yield Result(NAME, FAIL, f"{names(without)} without RDMA devices, others have some", tuple(without))
    active = {node: str(sum(port.state == "ACTIVE" for port in ports)) for node, ports in used.items()}
    if len(set(active.values())) > 1:
        yield from compared(NAME, "the number of active ports,", active, hint="is a cable out, or a device missing?")
    elif not found:
        at = f" at {usual:g} Gb/s" if usual else ""
        yield Result(NAME, PASS, f"{next(iter(active.values()))} ports are active{at} on {names(active)}")


def _of(node: str, port: Port, usual: float | None) -> Iterator[Result]:
    where = f"{port.hca} port {port.port} of {node}"
    if port.state != "ACTIVE":
        # A port without a cable may be meant; one that trains or has errors is not.
        state = WARN if port.phys_state in ("Disabled", "Polling") else FAIL
        text = f"{where} is {port.state or 'in an unknown state'} ({port.phys_state or 'unknown'})"
        yield Result(NAME, state, text, (node,), "look at cable, transceiver and subnet manager")
    elif usual and port.rate_gbps and port.rate_gbps < usual:
        text = f"{where} has {port.rate_gbps:g} Gb/s, the others {usual:g}"
        yield Result(NAME, FAIL, text, (node,), "the link came up with fewer lanes or a lower rate: reseat the cable")


def _named(case: Case, node: NodeFacts, port: Port) -> bool:
    """Whether NCCL would use the port, by NCCL_IB_HCA (prefixes; ``=`` whole names; ``^`` all but these)."""
    value = case.variable(node, "NCCL_IB_HCA")
    if not value:
        return True
    but, text = value.startswith("^"), value.removeprefix("^")
    whole = text.startswith("=")
    parts = [part.partition(":") for part in text.removeprefix("=").split(",") if part]
    fits = any(
        (port.hca == hca if whole else port.hca.startswith(hca)) and number in ("", str(port.port))
        for hca, _, number in parts
    )
    return fits != but
