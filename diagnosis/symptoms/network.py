"""Symptoms of the network: ports that are down or count errors, and connections of ranks that lose packets."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from statistics import median

from probing.api.text import share_text
from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.hardware_facts import HardwareEvent, NetworkPath, NetworkPort
from probing.diagnosis.symptoms.symptom import Symptom
from probing.diagnosis.words import clean

__all__ = ("network_symptoms",)

# The counters whose increase is reported, and a text for each. Some count faults and stay 0 on a healthy port; others
# count congestion and may grow a little.
_FAULTS = {
    "link_downed": "link downs",
    "link_error_recovery": "recoveries of the link",
    "symbol_error": "symbol errors",
    "port_rcv_errors": "packets received with an error",
    "port_rcv_remote_physical_errors": "packets that a switch had marked as bad",
    "local_link_integrity_errors": "failures of the link's integrity",
    "excessive_buffer_overrun_errors": "overruns of the receive buffer",
    "local_ack_timeout_err": "acknowledgments that did not come in time",
    "out_of_sequence": "packets out of sequence",
    "packet_seq_err": "packets that the peer missed",
    "port_xmit_discards": "packets discarded instead of sent",
}
# A path loses packets if at least this share of its segments was retransmitted. The share is computed only from at
# least _LEAST_SEGMENTS segments.
_RESENT = 0.01
_LEAST_SEGMENTS = 100
_LEAST_RESENT = 5
_TIMES_OTHERS = 3.0
_TIMEOUTS = 3
_CABLE = "Examine cable and transceiver of the port, and the port of the switch: `ibstat`, `mlxlink`, `ethtool -S`."
_KERNEL = {"link_down": "lost its link", "nic_error": "reported an error"}


def network_symptoms(node: NodeFacts) -> Iterator[Symptom]:
    """Yields the symptoms of ports, of network devices in reports of the kernel, and of connections."""
    for port in node.hardware.ports:
        yield from _port(node, port)
    for event in node.hardware.events:
        if event.source == "kernel" and event.kind in _KERNEL:
            yield _reported(node, event)
    for path in node.hardware.paths:
        # Loopback loses no packets: the sender retransmits there because the receiver gets no CPU.
        if not _is_loopback(path.peer):
            yield from _path(node, path)


def _port(node: NodeFacts, port: NetworkPort) -> Iterator[Symptom]:
    name = f"port {port.port} of {clean(port.device)}"
    if port.state not in (None, "ACTIVE") and port.ranks:
        text = f"is {clean(port.state or '')} ({clean(port.physical_state or 'unknown')})"
        yield Symptom(
            "network_fault",
            node.node,
            name,
            port.ranks,
            True,
            f"{name}, which it uses, {text}",
            f"{name} {text}",
            None,
            (),
            (_CABLE,),
        )
    faults = [(_FAULTS[counter], count) for counter, count in port.risen if counter in _FAULTS and count > 0]
    if faults:
        listed = ", ".join(f"{count} {what}" for what, count in faults[:4])
        text = f"counts errors: {listed}"
        lately = "lately" if port.seconds is None else f"in {port.seconds:.0f} s"
        yield Symptom(
            "network_fault",
            node.node,
            name,
            port.ranks,
            False,
            f"{name}, which it uses, {text}",
            f"{name} {text}",
            None,
            tuple(f"{count} {what} {lately}" for what, count in faults),
            (_CABLE,),
        )


def _reported(node: NodeFacts, event: HardwareEvent) -> Symptom:
    name = clean(event.part or "a network device")
    text = f"{_KERNEL[event.kind]} {'once' if event.count == 1 else f'{event.count} times'} in the last hour"
    return Symptom(
        "network_fault",
        node.node,
        name,
        (),
        False,
        f"{name} {text}",
        f"{name} {text}",
        event.first_ns,
        (clean(event.text, 160),),
        (_CABLE,),
        event.last_ns,
    )


def _path(node: NodeFacts, path: NetworkPath) -> Iterator[Symptom]:
    others = [_lost(other) for other in node.hardware.paths if other.rank != path.rank]
    lost = _lost(path)
    loses = lost >= max(_RESENT, _TIMES_OTHERS * median(others or [0.0])) and path.resent >= _LEAST_RESENT
    if not loses and path.timeouts < _TIMEOUTS:
        return
    name = f"the path to {clean(path.peer)}"
    text = (
        f"loses packets: {share_text(lost)} of {path.segments} segments were sent again"
        if loses
        else (f"gives no answer: {path.timeouts} retransmissions in a row")
    )
    others_text = f"the other ranks of the node {share_text(median(others))}" if others else "no other rank to compare"
    yield Symptom(
        "packet_loss",
        node.node,
        f"rank {path.rank} to {clean(path.peer)}",
        (path.rank,),
        False,
        f"{name} {text}",
        f"{name} of rank {path.rank} {text}",
        None,
        (others_text,) if loses else (),
        ("Look at both hosts' ports, and at the switches between them: `probingctl net`, `probingctl rdma`.",),
    )


def _is_loopback(peer: str) -> bool:
    try:
        return ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return False


def _lost(path: NetworkPath) -> float:
    return path.resent / path.segments if path.segments >= _LEAST_SEGMENTS else 0.0
