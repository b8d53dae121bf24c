"""``health``: shows what is wrong with the hardware and the system of each node, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from probing.api.errors import FormatError
from probing.api.numpy_import import allow_numpy
from probing.api.text import escape, plural
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import terminal_width, wrapped
from probing.client.session import opened, warn
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.diagnosis.facts import Facts, NodeFacts
    from probing.diagnosis.verdict import Finding

    # The facts of a node, the findings about the node, and texts about facts that could not be read.
    _Judged = tuple[NodeFacts, Sequence[Finding], Sequence[str]]

__all__ = ("EXAMPLES", "collect", "run")

EXAMPLES = ("probingctl health --all-nodes", "probingctl health -f json")
_PATIENCE_S = 10.0
_WRONG, _UNDECIDED = 3, 4
_COLUMNS = ("verdict", "severity", "confidence", "sentence", "evidence", "next_steps")


def run(settings: Settings) -> None:
    with opened(replace(settings, timeout=min(settings.timeout, _PATIENCE_S))) as cluster:
        nodes, damaged = _asked(cluster)
        silent = any(outcome.failed for outcome in cluster.outcomes)
    width = terminal_width() if settings.output is None else None
    lines = [*(line for one in nodes for line in _lines(*one)), *damaged]
    text = "".join(part + "\n" for line in lines for part in wrapped(escape(line), width or 1 << 16))
    objects = [_object(*one) for one in nodes]
    for line in damaged if settings.format != "table" else ():
        warn(line)
    write_objects(settings, objects, text, [row for one in nodes for row in _flat(one[0], one[1])])
    if any(found for _, found, _ in nodes):
        raise typer.Exit(_WRONG)
    if silent or damaged or any(missing for _, _, missing in nodes):
        raise typer.Exit(_UNDECIDED)


def collect(cluster: Cluster) -> list[Row]:
    """Returns the nodes with their findings, as docs/json.md describes; nodes with damaged facts are left out."""
    return [_object(*one) for one in _asked(cluster)[0]]


def _asked(cluster: Cluster) -> tuple[list[_Judged], list[str]]:
    """Returns the nodes ordered by name, and a line for each node with damaged facts."""
    allow_numpy()
    from probing.diagnosis.facts_file import from_json

    nodes: list[_Judged] = []
    damaged: list[str] = []
    for name, pieces in cluster.facts(hardware=True):
        try:
            nodes += [_judged(from_json(piece)) for piece in pieces]
        except FormatError as e:
            damaged.append(f"node {name}: {e.message}")
    return sorted(nodes, key=lambda one: one[0].node), damaged


def _judged(facts: Facts) -> _Judged:
    from probing.diagnosis.ladder import diagnose
    from probing.diagnosis.rules import hardware

    found = diagnose(facts, (hardware,))
    return facts.nodes[0], found.findings, [missing.text for missing in found.missing]


def _lines(node: NodeFacts, findings: Sequence[Finding], missing: Sequence[str]) -> Iterator[str]:
    if not findings:
        state = "cannot tell whether something is wrong" if missing else "nothing is wrong"
        yield f"node {node.node}: {state}: {_seen(node)}"
    for finding in findings:
        yield f"{finding.severity}: {finding.sentence}"
        yield from (f"  {line}" for line in finding.evidence)
        yield from (f"  Do next: {step}" for step in finding.next_steps)
    yield from (f"node {node.node}: not known: {text}" for text in missing)


def _seen(node: NodeFacts) -> str:
    """Returns the parts that the health check covers: "8 GPUs, 4 ports, 3 disks, 12 file systems"."""
    parts = node.hardware
    counts = ((parts.gpus, "GPU"), (parts.ports, "port"), (parts.disks, "disk"), (parts.file_systems, "file system"))
    return ", ".join(plural(len(own), name) for own, name in counts if own) or "no reading was stored yet"


def _object(node: NodeFacts, findings: Sequence[Finding], missing: Sequence[str]) -> Row:
    parts = node.hardware
    return {
        "node": node.node,
        "gpus": len(parts.gpus),
        "ports": len(parts.ports),
        "disks": len(parts.disks),
        "file_systems": len(parts.file_systems),
        "findings": [_finding(finding) for finding in findings],
        "missing": list(missing),
    }


def _flat(node: NodeFacts, findings: Sequence[Finding]) -> list[Row]:
    rows = [{"node": node.node, **_finding(finding)} for finding in findings]
    return rows or [{"node": node.node, **dict.fromkeys(_COLUMNS)}]


def _finding(finding: Finding) -> Row:
    return {
        "verdict": finding.verdict.id,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "sentence": finding.sentence,
        "evidence": list(finding.evidence),
        "next_steps": list(finding.next_steps),
    }
