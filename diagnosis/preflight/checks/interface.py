"""The interfaces that NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or --iface name are there, and up.

NCCL's syntax (user guide, NCCL_SOCKET_IFNAME): a list of prefixes; ``=`` in front: whole names; ``^``: all but these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from probing.diagnosis.preflight.facts import Case, Interface, NodeFacts
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("check", "chosen")

NAME = "interface"
# NCCL takes no loopback and no docker interface by itself; an operstate of tunnels is unknown.
_UP = ("up", "unknown", None)


def check(case: Case) -> Iterator[Result]:
    """Fails where no interface of a node fits, and warns where none that fits is up."""
    good: dict[str, list[str]] = {}
    named = False
    for node in case.nodes:
        for what, wanted in _wanted(case, node):
            named = True
            if why := node.problem("interfaces"):
                yield skipped(NAME, f"the interfaces of {node.node} are not known: {why}", [node.node])
                continue
            fitting = chosen(wanted, node.interfaces)
            have = names(interface.name for interface in node.interfaces) or "none"
            if not fitting:
                text = f"{node.node} has no interface {_named(wanted)} ({what}); it has {have}"
                yield Result(NAME, FAIL, text, (node.node,), "name one that every node has, or its prefix")
            elif not any(interface.state in _UP for interface in fitting):
                text = f"{names(i.name for i in fitting)} of {node.node} is {fitting[0].state} ({what})"
                yield Result(NAME, FAIL if len(fitting) == 1 else WARN, text, (node.node,), "bring the link up")
            else:
                good.setdefault(f"{what} {_named(wanted)}", []).append(node.node)
    for wanted, nodes in good.items():
        yield Result(NAME, PASS, f"{wanted} is there on {names(nodes)}")
    if not named and case.nodes:
        yield skipped(NAME, "no interface is named by NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or --iface")


def chosen(wanted: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Returns the interfaces that NCCL would choose from for the value ``wanted``."""
    text, but = (wanted[1:], True) if wanted.startswith("^") else (wanted, False)
    whole = text.startswith("=")
    parts = [part.partition(":")[0] for part in text.removeprefix("=").split(",") if part]
    if but:
        return [i for i in interfaces if not _fits(i.name, parts, whole) and i.name != "lo"]
    return [i for i in interfaces if _fits(i.name, parts, whole)]


def _named(wanted: str) -> str:
    """Returns the value without the signs of NCCL's syntax: ``eth9``, ``but docker``."""
    return f"but {wanted[1:].removeprefix('=')}" if wanted.startswith("^") else wanted.removeprefix("=")


def _fits(name: str, parts: Sequence[str], whole: bool) -> bool:
    return any(name == part if whole else name.startswith(part) for part in parts)


def _wanted(case: Case, node: NodeFacts) -> Iterator[tuple[str, str]]:
    if case.iface:
        yield "--iface", "=" + case.iface
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := case.variable(node, name):
            # gloo takes whole names.
            yield name, value if name.startswith("NCCL") else "=" + value
