"""Asks each node once for its facts before a job, measures its clock offset by the same call, and builds the case for
the checks. Also formats the results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from probing.api.errors import FormatError, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import age, escape, plural
from probing.client.render.table import wrapped
from probing.client.wire.loop import wait
from probing.diagnosis.facts_file import decoded
from probing.diagnosis.preflight.env_file import Plan
from probing.diagnosis.preflight.facts import Case, NodeFacts, NodeRank, Transfer
from probing.diagnosis.preflight.network import Cell
from probing.diagnosis.preflight.result import FAIL, SKIPPED, STATES, WARN, Result

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.wire.node import Node

__all__ = (
    "Wanted",
    "gathered",
    "results_text",
    "with_bandwidth",
)

DEFAULT_PORT = 29500
# Prefixes of addresses at which other nodes cannot reach the node.
_WILDCARDS = ("0.0.0.0:", "[::]:", "unix:", ":")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values of --python, --iface and --job."""

    python: str = ""
    iface: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    facts: NodeFacts | None
    problem: str
    offset_ns: float
    error_ns: float


def gathered(cluster: Cluster, wanted: Wanted, plan: Plan) -> Case:
    """Returns the case of all nodes. Raises PeerError if no node answers."""
    asked = len(cluster.outcomes)
    addresses = _addresses(cluster)
    variables = _master_of(plan)
    port = variables.get("MASTER_PORT", "")
    request = pb.PreflightRequest(
        python=wanted.python,
        job=wanted.job,
        master_addr=variables.get("MASTER_ADDR", ""),
        master_port=int(port) if port.isascii() and port.isdigit() and int(port[:6]) < 65536 else DEFAULT_PORT,
        peers=sorted(set(addresses.values())) if len(addresses) > 1 else (),
    )
    answered = cluster.each(lambda node, seconds: _ask(node, request, seconds)).answered
    replies = [(a.node, a.value) for a in answered]
    silent = {name: reply.problem for name, reply in replies if reply.facts is None}
    failures = [*cluster.absent, *(failed for outcome in cluster.outcomes[asked:] for failed in outcome.failed)]
    silent |= {failed.node or failed.address: failed.reason for failed in failures}
    nodes = [(reply.facts, reply) for _, reply in replies if reply.facts is not None]
    known = {facts.node for facts, _ in nodes}
    silent |= {
        name: "the node is in --env-file, and was not asked" for name in plan.ranks if name not in {*known, *silent}
    }
    return Case(
        nodes=tuple(_planned(facts, plan.ranks) for facts, _ in sorted(nodes, key=lambda one: one[0].node)),
        silent=silent,
        addresses=addresses,
        offsets={facts.node: (reply.offset_ns, reply.error_ns) for facts, reply in nodes},
        variables=plan.variables,
        planned=bool(plan.ranks),
        python=wanted.python,
        iface=wanted.iface,
    )


def with_bandwidth(cluster: Cluster, case: Case) -> Case:
    """Returns the case with the bandwidths between nodes, measured one after the other so that no two share a link."""
    transfers: dict[str, tuple[Transfer, ...]] = {}
    known = {node.node for node in case.nodes}
    for address in cluster.addresses():
        node = cluster.node(address)
        try:
            asked = wait(node.status(cluster.timeout)).node
            peers = [own for name, own in sorted(case.addresses.items()) if name != asked]
            if asked not in known or not peers:
                continue
            reply = wait(node.preflight(pb.PreflightRequest(peers=peers, bandwidth=True), cluster.timeout))
            transfers[asked] = decoded(NodeFacts, reply.facts).transfers
        except ProbingError as e:
            transfers[address] = (Transfer(address, why=e.message),)
    nodes = tuple(replace(node, transfers=transfers.get(node.node, ())) for node in case.nodes)
    return replace(case, nodes=nodes, bandwidth=True)


def _planned(facts: NodeFacts, ranks: Mapping[str, tuple[NodeRank, ...]]) -> NodeFacts:
    return replace(facts, ranks=ranks.get(facts.node, ())) if ranks else facts


def _master_of(plan: Plan) -> dict[str, str]:
    """Returns the variables of the plan. If MASTER_ADDR or MASTER_PORT is not among them, the value of the first rank
    that has the variable is added.
    """
    found = dict(plan.variables)
    for ranks in plan.ranks.values():
        for rank in ranks:
            for variable in rank.variables:
                if variable.name in ("MASTER_ADDR", "MASTER_PORT"):
                    found.setdefault(variable.name, variable.value)
    return found


def _addresses(cluster: Cluster) -> dict[str, str]:
    """Returns HOST:PORT by node: the address at which the node was asked, or for a Unix socket the address that the
    node reports, if any.
    """

    async def ask(node: Node, seconds: float) -> tuple[str, str]:
        name = (await node.status(seconds)).node
        if not node.address.startswith("unix:"):
            return name, node.address
        own = (peer.address for peer in (await node.peers(seconds)).peers if peer.node == name)
        return name, next((a for a in own if not a.startswith(_WILDCARDS)), "")

    return {answer.node: answer.value for answer in cluster.each(ask).answered if answer.value}


async def _ask(node: Node, request: pb.PreflightRequest, seconds: float) -> tuple[str, _Answer]:
    begun = time.time_ns()
    reply = await node.preflight(request, seconds)
    ended = time.time_ns()
    # As in NTP (RFC 5905, 8), the offset is exact to half of the round trip.
    offset = ((reply.received_ns - begun) + (reply.node_time_ns - ended)) / 2
    error = max((ended - begun) - (reply.node_time_ns - reply.received_ns), 0) / 2
    try:
        facts, problem = decoded(NodeFacts, reply.facts), ""
    except FormatError as e:
        facts, problem = None, e.message
    if facts is not None and facts.node != reply.node:
        facts = replace(facts, node=reply.node)
    return reply.node, _Answer(facts, problem, offset, error)


# A matrix of more nodes than this is too wide; the result itself names the pairs that matter.
_MOST_COLUMNS = 8
_CELL = 8
_COLOURS = {FAIL: "31;1", WARN: "33", SKIPPED: "2"}
_WORD = 8


def results_text(found: Sequence[Result], cells: Sequence[Cell], width: int | None, *, colour: bool = False) -> str:
    """Returns the text for a terminal of ``width`` columns; None: 80 columns."""
    lines = []
    for result in sorted(found, key=lambda one: STATES.index(one.state)):
        lines += _result(result, width or 80, colour=colour)
    matrix = _matrix(cells)
    counted = ", ".join(
        f"{number} {state}" for state in reversed(STATES) if (number := sum(r.state == state for r in found))
    )
    verdict = "do not start the job" if any(r.state == FAIL for r in found) else "nothing prevents the job"
    return "\n".join([*lines, *(["", *matrix] if matrix else []), "", f"{counted}: {verdict}"]) + "\n"


def _result(result: Result, width: int, *, colour: bool) -> list[str]:
    word = f"{result.state:<{_WORD}}"
    shown = f"\x1b[{_COLOURS[result.state]}m{word}\x1b[0m" if colour and result.state in _COLOURS else word
    text = list(wrapped(f"{result.check}: {escape(result.text)}", width - _WORD))
    if result.hint and result.state in (FAIL, WARN):
        text += [f"  {line}" for line in wrapped(escape(result.hint), width - _WORD - 2)]
    return [(shown if n == 0 else " " * _WORD) + line for n, line in enumerate(text)]


def _matrix(cells: Sequence[Cell]) -> list[str]:
    """Returns a table of the round trips from row to column; no lines if there are too many nodes or no measurement."""
    nodes = sorted({cell[0] for cell in cells})
    if not 1 < len(nodes) <= _MOST_COLUMNS or all(cell[2] is None for cell in cells):
        return []
    known = {(a, b): ns for a, b, ns, _ in cells}
    first = min(max(len(escape(node)) for node in nodes), 80 - (_CELL + 1) * len(nodes))

    def row(head: str, values: Sequence[str]) -> str:
        return f"{escape(head)[:first]:<{first}} " + " ".join(f"{escape(v)[-_CELL:]:>{_CELL}}" for v in values)

    def value(a: str, b: str) -> str:
        return "-" if a == b or (a, b) not in known else "lost" if known[a, b] is None else age(known[a, b])

    title = f"round trips of {plural(len(nodes), 'node')}, from row to column"
    return [title, row("", nodes), *(row(a, [value(a, b) for b in nodes]) for a in nodes)]
