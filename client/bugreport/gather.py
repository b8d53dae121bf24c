"""Asks nodes for all parts of a bug report, and this machine for `probingd check` and the daemon's log. Each question
has a deadline; a failed question leaves out only its part of the report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from probing.api.errors import NotFound, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables.schema import Row
from probing.client.bugreport.questions import CONFIG, NAMES, QUESTIONS, Question
from probing.client.render.rows import rows_of
from probing.client.wire.node import Node
from probing.client.wire.stream import Room

__all__ = (
    "Failure",
    "Gathered",
    "Wanted",
    "add_local",
    "check",
    "gather",
    "journal",
    "silent",
)

MAX_LINES = 4000
MAX_LOG_BYTES = 4 << 20
COMMAND_S = 20.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# _PLACES: the options by which `probingd check` finds the running daemon. Their values are passed on only if they match
# _PLACE, because they come from a node.
_PLACE = re.compile(r"/[\w./-]{1,200}|[\w-]{1,32}")
_PLACES = ("instance", "state_dir", "socket", "probes.bpffs")
_UNITS = "probingd*"
_NO_LOG = "name the log with --log FILE if the daemon does not write to the journal"


def _boot_id() -> str:
    """Returns the id of this machine's boot, which shows whether a node is this machine; empty if it is unreadable."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def check(config: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the results of `probingd check` for the daemon that runs with ``config`` (rows of probing.config). Raises
    NotFound if there is no probingd, ProbingError if the check fails."""
    own = sysconfig.get_path("scripts")
    program = shutil.which("probingd", path=os.pathsep.join((own, os.environ.get("PATH", os.defpath))))
    if program is None:
        raise NotFound("there is no probingd beside probingctl or on PATH", hint="run `probingd check -f json`")
    values = {str(row["key"]): str(row["value"]) for row in config if row["value"] != row["default"]}
    places = [f"--{key}={values[key]}" for key in _PLACES if _PLACE.fullmatch(values.get(key, ""))]
    out = _output([program, "check", "-f", "json", *places], fine=(0, 3))
    try:
        found = json.loads(out)
        return [dict(one) for one in found]
    except (ValueError, TypeError):
        raise ProbingError("probingd check printed no list", hint="run `probingd check` to see its output") from None


def journal() -> list[str]:
    """Returns the last lines of the daemon's units in the journal, oldest first. A line has time, unit, priority and
    message. Raises ProbingError if there are no lines or if they cannot be read."""
    if shutil.which("journalctl") is None:
        raise NotFound("journalctl is not installed", hint=_NO_LOG)
    fields = "MESSAGE,PRIORITY,_SYSTEMD_UNIT,UNIT"
    out = _output(
        [
            "journalctl",
            f"--unit={_UNITS}",
            "--no-pager",
            "--output=json",
            f"--output-fields={fields}",
            f"--lines={MAX_LINES}",
            "--quiet",
        ]
    )
    lines = list(_journal_lines(out))
    if not lines:
        raise NotFound("the journal has no line of probingd that this user may read", hint=f"ask as root, or {_NO_LOG}")
    return lines


def _log_file(path: Path) -> list[str]:
    """Returns the last lines of the daemon's log ``path``. Raises UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - MAX_LOG_BYTES, 0))
            return file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()[-MAX_LINES:]
    except OSError as e:
        raise UsageError(f"cannot read the log {path}: {e.strerror}", hint="name a file with --log FILE") from None


def _journal_lines(out: bytes) -> Iterator[str]:
    for line in out[-MAX_LOG_BYTES:].splitlines():
        try:
            entry = json.loads(line)
            message = entry["MESSAGE"]
            # The journal gives bytes that are not text as a list of numbers: systemd.journal-fields(7).
            text = bytes(message).decode(errors="replace") if isinstance(message, list) else str(message)
            at = datetime.fromtimestamp(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, timezone.utc)
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        unit = str(entry.get("_SYSTEMD_UNIT") or entry.get("UNIT") or "").partition("@")[0]
        yield f"{at:%Y-%m-%dT%H:%M:%S.%fZ} {unit.removesuffix('.service')} {entry.get('PRIORITY', '')} {text}"


def _output(words: Sequence[str], *, fine: tuple[int, ...] = (0,)) -> bytes:
    name = " ".join((Path(words[0]).name, *words[1:2]))
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProbingError(f"{name} did not end within {COMMAND_S:.0f} s") from None
    except OSError as e:
        raise ProbingError(f"{name} cannot be run: {e.strerror}") from None
    if done.returncode not in fine:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ProbingError(f"{name} ended with {done.returncode}: {said[0][:400] if said else ''}")
    return done.stdout


QUESTION_S = 10.0
# The share of ``seconds`` that the questions to a node may take. After that, each further question gets a timeout of
# only 0.05 s, so that the answers so far are kept.
_SHARE = 0.85
_MAX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a report. ``python``: the interpreter whose versions are reported; ``log``: a file that is read in
    place of the journal.
    """

    python: str = ""
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part of a report is missing."""

    message: str
    hint: str = ""


@dataclass(slots=True)
class Gathered:
    """The answers of a node, not yet redacted. ``local``: the node is this machine."""

    address: str
    status: pb.StatusReply | Failure
    local: bool
    rows: dict[str, list[Row] | Failure] = field(default_factory=dict)
    names: dict[str, list[Row] | Failure] = field(default_factory=dict)
    check: list[Row] | Failure = field(default_factory=lambda: Failure("this part was not asked for"))
    log: list[str] | Failure = field(default_factory=lambda: Failure("this part was not asked for"))
    interpreter: dict[str, str] | Failure | None = None

    @property
    def node(self) -> str:
        """The name of the node; empty if the node did not answer."""
        return "" if isinstance(self.status, Failure) else self.status.node


async def gather(node: Node, seconds: float, wanted: Wanted) -> Gathered:
    """Returns the answers that a node gives within ``seconds``. Raises no ProbingError."""
    deadline = time.monotonic() + _SHARE * seconds

    def left() -> float:
        return max(min(QUESTION_S, deadline - time.monotonic()), 0.05)

    async def rows(question: Question) -> list[Row]:
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
    """Returns the part of a report about a node that could not be asked."""
    failure = Failure(reason)
    return Gathered(address, failure, False, {question.name: failure for question in QUESTIONS})


def add_local(found: Gathered, wanted: Wanted, *, alone: bool) -> None:
    """Sets ``check`` and ``log`` of ``found``. If the node is this machine, both are read; else each is a Failure whose
    hint says how to read them on the node's machine.

    ``alone``: ``found`` is the only node of the report, so --log names the log of that node.
    """
    there = "run `probingd check` and `journalctl --unit='probingd*'` on that machine"
    config = found.rows[CONFIG.name]
    if found.local:
        known = config if isinstance(config, list) else []
        found.check, found.log = _read(lambda: check(known)), _read(journal)
    else:
        found.check = found.log = Failure("the daemon runs on another machine", there)
    path = wanted.log
    if path is not None and (found.local or alone):
        found.log = _read(lambda: _log_file(path))


def _versions(reply: pb.PreflightReply) -> dict[str, str]:
    from probing.diagnosis.facts_file import decoded
    from probing.diagnosis.preflight.facts import NodeFacts

    facts = decoded(NodeFacts, reply.facts)
    if why := facts.problem("versions"):
        raise NotFound(why)
    return {version.name: version.value for version in facts.versions}


def _is_local(address: str, status: pb.StatusReply | Failure) -> bool:
    if not isinstance(status, Failure) and status.boot_id:
        return status.boot_id == _boot_id()
    # If the collector does not answer, the boot id of the node is unknown. A Unix socket belongs to this machine.
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
