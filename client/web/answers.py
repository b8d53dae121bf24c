"""Builds an answer as JSON: ``data`` and the contract. The contract says how many nodes were asked, how many answered,
when, and which nodes failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypedDict

from probing.api.errors import (
    FormatError,
    NotFound,
    Overloaded,
    PartialAnswer,
    PeerError,
    PrivilegeError,
    ProbingError,
    QueryError,
    QueryMemory,
    QueryTimeout,
    TargetError,
    Unauthenticated,
    UsageError,
)
from probing.api.text import utc
from probing.client.render.rows import plain
from probing.federation.execution.clocks import spread_ns

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.federation.execution.answer import FailedReport

__all__ = ("Contract", "Lacking", "contract_of", "encoded", "error_body", "status_of")

# HTTP statuses by class of error. An error has the status of its first class here.
_STATUS: tuple[tuple[type[ProbingError], int], ...] = (
    (UsageError, 400),
    (Unauthenticated, 401),
    (PrivilegeError, 403),
    (NotFound, 404),
    (QueryTimeout, 504),
    (QueryMemory, 413),
    (QueryError, 400),
    (Overloaded, 429),
    (PartialAnswer, 502),
    (PeerError, 502),
    (TargetError, 502),
    (FormatError, 502),
)


class Lacking(TypedDict):
    """A node, or a process on it, that gave no answer, and why."""

    node: str
    error: str


class Contract(TypedDict):
    """Numbers of nodes, the time (ISO 8601, UTC), rows that nodes lost in the last ten minutes, and by how much their
    clocks may differ; None: unknown."""

    asked: int
    answered: int
    failures: list[Lacking]
    at: str
    lost_rows: int | None
    clock_error_ns: int | None


def contract_of(cluster: Cluster, lost_rows: int | None, failures: Iterable[Lacking] = ()) -> Contract:
    """Returns the contract of all questions that ``cluster`` has asked. One failure makes a node count as failed."""
    reports = [outcome.report() for outcome in cluster.outcomes]
    asked = {address for report in reports for address in report["asked"]}
    failed = {entry["address"]: entry for report in reports for entry in report["failed"]}
    answered = {entry["address"]: entry["node"] for report in reports for entry in report["answered"]}
    names = {node for address, node in answered.items() if address not in failed}
    now_ns = time.monotonic_ns()
    return {
        "asked": len(asked),
        "answered": len(names),
        "failures": [*starmap(_lacking, failed.items()), *failures],
        "at": utc(time.time_ns()),
        "lost_rows": lost_rows,
        "clock_error_ns": spread_ns(cluster.clocks.of(node, now_ns) for node in names) if len(names) > 1 else None,
    }


def _lacking(address: str, entry: FailedReport) -> Lacking:
    return {"node": entry["node"] or address, "error": entry["reason"]}


def encoded(value: object) -> bytes:
    """Returns ``value`` as JSON, in ASCII; numbers that JSON lacks are null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return plain(value)


def status_of(error: ProbingError) -> int:
    """Returns the HTTP status for ``error``."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: ProbingError) -> dict[str, str]:
    """Returns the body of an answer with ``error``; ``code`` is its class, such as ``NotFound``."""
    return {"error": error.message, "hint": error.hint, "code": error.kind}
