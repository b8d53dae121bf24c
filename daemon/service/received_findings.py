"""Accepts findings from other nodes of a job.

A finding is accepted from a node that is proven to take part in the job (``coordination.proofs``), and only in the name
of that node. It may name ranks of that node or of this node. If the name of that node sorts before this node's name, so
that the node may diagnose the job, it may also name ranks of other nodes that take part. The certificate of the
connection proves the node. Without certificates the node is taken from the row, and ``detail`` says so.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from probing.api.errors import FormatError, Overloaded, PrivilegeError, UsageError
from probing.api.tables.schema import Row
from probing.api.text import escape
from probing.daemon.query.caller import Caller
from probing.daemon.row_check import checked_row
from probing.daemon.service.peer_identity import proven_node, proves_node

if TYPE_CHECKING:
    # At run time these modules are imported after the start, together with the rules.
    from probing.daemon.diagnose.coordination.proofs import Proofs
    from probing.daemon.diagnose.watch import JobWatch

__all__ = ("AT_ONCE", "ROWS_AN_HOUR", "ReceivedFindings")

ROWS_AN_HOUR, AT_ONCE = 240, 64
"""The rate limit for the rows of one node, in rows an hour, and the burst, in rows."""
MAX_ROW_BYTES = 256 << 10
_TABLE = "diagnosis.findings"
_OWN = frozenset({"node", "ts"})
_MAX_ROWS = 16
_MAX_NODES = 1024
_MAX_RANKS = 512
_MAX_NODE_NAME = 256
_NAMES = ("job", "run", "finding_id", "verdict", "severity", "state", "sentence", "found_by")
_LISTS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")
_SEVERITIES = ("error", "warning", "note")
_Row = Mapping[str, Any]


class _Allowance(NamedTuple):
    left: float
    since: float


class ReceivedFindings:
    """Accepts or refuses findings. ``taken`` is called with each accepted row. ``certified`` returns whether a
    certificate proves a node.

    Several threads may call ``take``; there is no lock, so counts and rate limits are then approximate. ``refused``
    counts the refused rows.
    """

    def __init__(
        self,
        node: str,
        watch: JobWatch,
        parts: Proofs,
        taken: Callable[[_Row], None] = lambda _: None,
        certified: Callable[[str], bool] = lambda _: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._watch = watch
        self._parts = parts
        self._taken = taken
        self._certified = certified
        self._now = now
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._without_certificate = 0
        self.refused = 0

    @property
    def problems(self) -> list[str]:
        """Returns the reasons why rows were refused lately, one for each sender, for ``status``."""
        return list(self._refused.values())

    @property
    def detail(self) -> str:
        """Returns a text about findings of nodes that no certificate proves, for ``status``; empty if there
        are none.
        """
        count = self._without_certificate
        return f"{count} findings of other nodes, which no certificate proves" if count else ""

    def take(self, rows: bytes, caller: Caller) -> int:
        """Passes rows of ``diagnosis.findings``, a JSON list, to the watch. Rows of jobs without a rank here are left
        out.

        Returns the number of accepted rows. Raises FormatError and UsageError for malformed rows, PrivilegeError for
        rows that the caller has no right to send, and Overloaded for too many rows.
        """
        checked = _rows(rows)
        known = [row for row in checked if self._watch.watches(row["job"], row["run"])]
        senders = [self._sender(row, caller) for row in known]
        for row, sender in zip(known, senders, strict=True):
            try:
                self._check(row, sender)
                self._count(sender)
            except (UsageError, PrivilegeError, Overloaded) as e:
                self.refused += 1
                self._note(sender, escape(f"findings of node {sender} are refused: {e.message}"))
                raise
        for row, sender in zip(known, senders, strict=True):
            self._without_certificate += not caller.nodes
            self._refused.pop(sender, None)
            row["found_by"] = sender
            self._watch.take(row)
            self._taken(row)
        return len(known)

    def _sender(self, row: _Row, caller: Caller) -> str:
        """Returns the node that sends ``row``. Raises PrivilegeError unless it is proven to take part in the job."""
        job, run, sender = str(row["job"]), str(row["run"]), str(row["found_by"])
        if caller.nodes and not proves_node(caller, sender):
            sender = proven_node(caller, self._parts.claims(job, run)) or ""
        if not caller.nodes and self._certified(sender):
            self.refused += 1
            raise PrivilegeError(f"node {sender} has a certificate, and this connection does not show it")
        if not sender or not self._parts.takes_part(job, run, sender):
            self.refused += 1
            raise PrivilegeError(
                f"node {sender or 'of this certificate'} is not proven to take part in the job",
                hint="its ranks must be connected with ranks of a node that takes part (docs/cluster.md)",
            )
        return sender

    def _check(self, row: _Row, sender: str) -> None:
        """Raises PrivilegeError if ``row`` names ranks that ``sender`` has no right to name."""
        job, run = row["job"], row["run"]
        own = self._parts.holding(job, run).ranks
        claims = self._parts.claims(job, run)
        for rank, node in _named(row, "culprits"):
            if own and (node == self._node) != (rank in own):
                raise PrivilegeError(f"rank {rank} is not on node {node}")
            if node not in (self._node, sender) and (sender > self._node or (node and node not in claims)):
                raise PrivilegeError(f"the sender has no right to name rank {rank} of node {node}")
        if not {node for _, node in _named(row, "stacks")} <= {self._node, sender, *claims}:
            raise PrivilegeError("the finding has stacks of nodes that do not take part")

    def _count(self, sender: str) -> None:
        now = self._now()
        left, since = self._allowances.pop(sender, _Allowance(AT_ONCE, now))
        left = min(left + (now - since) * ROWS_AN_HOUR / 3600, AT_ONCE)
        self._allowances[sender] = _Allowance(left - 1 if left >= 1 else left, now)
        while len(self._allowances) > _MAX_NODES:
            self._allowances.popitem(last=False)
        if left < 1:
            raise Overloaded(f"the sender sends more than {ROWS_AN_HOUR} findings an hour")

    def _note(self, sender: str, text: str) -> None:
        self._refused[sender] = text
        while len(self._refused) > _MAX_NODES:
            self._refused.popitem(last=False)


def _rows(rows: bytes) -> list[Row]:
    try:
        sent = json.loads(rows)
    except (ValueError, RecursionError) as e:
        raise FormatError("the findings are not JSON") from e
    if not isinstance(sent, list) or len(sent) > _MAX_ROWS:
        raise UsageError(f"give a list of at most {_MAX_ROWS} findings")
    return [_checked(row) for row in sent]


def _checked(row: Any) -> Row:
    found = checked_row(_TABLE, row, _OWN)
    if any(not isinstance(found.get(name), str) for name in _NAMES) or type(found.get("opened")) is not int:
        raise UsageError(f"a finding lacks one of the fields {', '.join(_NAMES)}, opened")
    if found["state"] not in ("open", "closed") or found["severity"] not in _SEVERITIES:
        raise UsageError("a finding must be open or closed, and an error, a warning or a note")
    if sum(len(value) for value in found.values() if isinstance(value, str)) > MAX_ROW_BYTES:
        raise UsageError(f"a finding has more than {MAX_ROW_BYTES} bytes")
    for name in _LISTS:
        _list(found.get(name))
    _check_names(found)
    return found


def _list(text: Any) -> list[Any]:
    try:
        items = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list):
        raise UsageError("a list of a finding is not a JSON list")
    return items


def _check_names(row: _Row) -> None:
    """Raises UsageError if the columns ``ranks`` and ``nodes`` disagree with ``culprits``, or other columns with ranks
    are malformed.
    """
    culprits = _named(row, "culprits")
    nodes = set((row.get("nodes") or "").split(",")) - {""}
    if _numbers(row.get("ranks")) != [rank for rank, _ in culprits][:_MAX_RANKS]:
        raise UsageError("a finding names other ranks than its culprits")
    if not nodes <= {node for _, node in culprits}:
        raise UsageError("a finding names other nodes than the nodes of its culprits")
    _numbers(row.get("victims"))
    _named(row, "stacks")


def _named(row: _Row, column: str) -> list[tuple[int, str]]:
    """Returns rank and node of each item of ``column``. Raises UsageError for an item without a rank or node."""
    items = _list(row.get(column))
    if not all(isinstance(one, dict) and type(one.get("rank")) is int for one in items):
        raise UsageError(f"the {column} of a finding have no ranks")
    if not all(isinstance(one.get("node"), str) and len(one["node"]) < _MAX_NODE_NAME for one in items):
        raise UsageError(f"the {column} of a finding have no nodes")
    return [(one["rank"], one["node"]) for one in items]


def _numbers(text: str | None) -> list[int]:
    """Returns the numbers in ``text``. Raises UsageError."""
    try:
        numbers = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise UsageError("the ranks of a finding are not numbers") from None
    if len(numbers) > _MAX_RANKS:
        raise UsageError(f"a finding names more than {_MAX_RANKS} ranks")
    return numbers
