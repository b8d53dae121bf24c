"""Asks nodes for all parts of a report. Each question has a deadline, and one that fails costs only its part."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probing.api.errors import NotFound, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.bugreport import local
from probing.client.bugreport.questions import CONFIG, NAMES, QUESTIONS, Question
from probing.client.render.rows import rows_of
from probing.client.wire.node import Node
from probing.client.wire.stream import Room

__all__ = ("Failure", "Gathered", "Wanted", "add_local", "gather", "silent")

QUESTION_S = 10.0
# The share of a node's time that its questions may take, so that what was answered is kept.
_SHARE = 0.85
_MAX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options ask for beside the usual. ``log``: a file in place of the journal."""

    python: str = ""
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part is missing."""

    message: str
    hint: str = ""


@dataclass(slots=True)
class Gathered:
    """What a node answered, as it was answered. ``local``: the node is this machine.

    ``rows`` are those of each question, ``names`` those of NAMES.
    """

    address: str
    status: pb.StatusReply | Failure
    local: bool
    rows: dict[str, list[dict[str, Any]] | Failure] = field(default_factory=dict)
    names: dict[str, list[dict[str, Any]] | Failure] = field(default_factory=dict)
    check: list[dict[str, Any]] | Failure = field(default_factory=lambda: Failure("it was not asked"))
    log: list[str] | Failure = field(default_factory=lambda: Failure("it was not asked"))
    interpreter: dict[str, str] | Failure | None = None

    @property
    def node(self) -> str:
        """The name of the node; empty where it does not answer."""
        return "" if isinstance(self.status, Failure) else self.status.node


async def gather(node: Node, seconds: float, wanted: Wanted) -> Gathered:
    """Returns what a node answers within ``seconds``. Raises nothing of ours."""
    deadline = time.monotonic() + _SHARE * seconds

    def left() -> float:
        return max(min(QUESTION_S, deadline - time.monotonic()), 0.05)

    async def rows(question: Question) -> list[dict[str, Any]]:
        (reply,) = await node.replies({"": question.sql}, left(), Room(_MAX_BYTES))
        return rows_of(reply.table)

    async def interpreter() -> dict[str, str]:
        return _versions(await node.preflight(pb.PreflightRequest(python=wanted.python), left()))

    status = await _tried(node.status(left()))
    gathered = Gathered(node.address, status, _is_local(node.address, status))
    gathered.names = {question.name: await _tried(rows(question)) for question in NAMES}
    gathered.rows = {question.name: await _tried(rows(question)) for question in QUESTIONS}
    if wanted.python:
        gathered.interpreter = await _tried(interpreter())
    return gathered


def silent(address: str, reason: str) -> Gathered:
    """Returns what there is of a node that could not be asked."""
    failure = Failure(reason)
    return Gathered(address, failure, False, {question.name: failure for question in QUESTIONS})


def add_local(found: Gathered, wanted: Wanted, *, alone: bool) -> None:
    """Adds what only the machine of the node itself has. ``alone``: it is the only node, so the log is of it."""
    there = "run `probingd check` and `journalctl --unit='probingd*'` there"
    config = found.rows[CONFIG.name]
    if found.local:
        known = config if isinstance(config, list) else []
        found.check, found.log = _read(lambda: local.check(known)), _read(local.journal)
    else:
        found.check = found.log = Failure("it runs on another machine", there)
    path = wanted.log
    if path is not None and (found.local or alone):
        found.log = _read(lambda: local.log_file(path))


def _versions(reply: pb.PreflightReply) -> dict[str, str]:
    from probing.diagnosis.facts_file import decoded
    from probing.diagnosis.preflight.facts import NodeFacts

    facts = decoded(NodeFacts, reply.facts)
    if why := facts.problem("versions"):
        raise NotFound(why)
    return {version.name: version.value for version in facts.versions}


def _is_local(address: str, status: pb.StatusReply | Failure) -> bool:
    if not isinstance(status, Failure) and status.boot_id:
        return status.boot_id == local.boot_id()
    # The collector, which knows the boot, does not answer.
    return address.startswith("unix:")


async def _tried(ask: Awaitable[Any]) -> Any:
    try:
        return await ask
    except ProbingError as e:
        return Failure(e.message, e.hint)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ProbingError as e:
        return Failure(e.message, e.hint)
