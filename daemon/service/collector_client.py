"""Sends the service's requests to the collector's control socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from msgspec import Struct

from probing.api.errors import FormatError, InternalError, PeerError, ProbingError
from probing.api.tables import Table
from probing.api.tables.user import user_table_from
from probing.api.typed import typed, typed_json
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Header, Message, connect, error_of
from probing.daemon.query.caller import wait_readable
from probing.daemon.query.snapshot import QueryFile, QuerySnapshot
from probing.daemon.stack_wire import ConditionsRead, ProcessStacks, ReadFailure, VariablesRead, split_stacks
from probing.daemon.store.needs import Need

__all__ = ("CollectorClient",)

KEPT = 4
RELEASE_TIMEOUT_S = 2.0
MAX_REPORTED = 1000
_HINT = "the daemon restarts the collector: ask again; if the error stays, the daemon's log says why the collector ends"
_Cancelled = Callable[[], bool]
_T = TypeVar("_T")


def _never() -> bool:
    return False


class CollectorClient:
    """Sends requests to the collector. Thread-safe: each request has its own connection. Up to KEPT idle connections
    stay open.

    Every method raises PeerError if the collector does not answer, and the error in its answer if there is one. Methods
    with ``cancelled`` raise QueryError once ``cancelled`` returns True.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[Channel] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def status(self, timeout: float) -> Header:
        """Returns the fields of probing.v1.StatusReply."""
        return _read(Header, self._request({"op": "status"}, timeout), "status")

    def pause(self, paused: bool, timeout: float) -> bool:
        """Pauses or resumes all probes. Returns whether the probes are now paused."""
        answer = self._request({"op": "pause", "paused": paused}, timeout)
        return bool(answer.header.get("paused", paused))

    def live(self, table: str, timeout: float, cancelled: _Cancelled = _never) -> bytes:
        """Returns the rows of a live table in its logical schema, as an Arrow IPC stream."""
        return self._request({"op": "live", "table": table}, timeout, cancelled).payload

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        """Reports segments that could not be read, so that the store checks them. Raises nothing."""
        # If this fails, the next query that reads these segments reports them again.
        with suppress(ProbingError):
            self._request({"op": "damaged", "paths": list(paths)[:MAX_REPORTED]}, timeout)

    def tables(self, timeout: float) -> dict[str, Table]:
        """Returns the tables of present and former probes of users, by name."""
        found = _read(dict[str, list[Any]], self._request({"op": "tables"}, timeout), "tables")
        try:
            return {table.name: table for table in map(user_table_from, found["tables"])}
        except (FormatError, KeyError) as e:
            raise InternalError("the collector returned malformed tables") from e

    def stacks(
        self, pids: Sequence[int], job: str, timeout: float, *, native: bool = False, with_locals: bool = False
    ) -> tuple[list[ProcessStacks], list[ReadFailure]]:
        """Returns the packed stacks of each process, and the failures for StacksReply. ``timeout``: seconds for each
        process.
        """
        answer = self._of_processes("stacks", pids, job, timeout, {"native": native, "locals": with_locals})
        return split_stacks(answer.header, answer.payload)

    def variables(self, pids: Sequence[int], job: str, names: Sequence[str], timeout: float) -> VariablesRead:
        """Returns the fields ``values`` and ``failures`` that docs/architecture.md describes."""
        return _read(VariablesRead, self._of_processes("vars", pids, job, timeout, {"names": list(names)}), "values")

    def evaluate(self, request: Mapping[str, Any], timeout: float) -> Header:
        """Runs code in processes; returns ``results`` and ``failures`` of ``inject.requests.Evaluations``.

        ``request`` has the keys ``pids``, ``job``, ``rank``, ``code``, ``seconds`` (the time limit of the code),
        ``session``, ``ends`` (whether the session ends), and ``caller`` (for the audit rows).
        """
        return _read(Header, self._request({"op": "eval", **request}, timeout), "results")

    def label(self, request: Mapping[str, Any], timeout: float) -> int:
        """Sets labels; returns the number of ranks. ``request``: fields of ``labels.source.LabelRequest``."""
        return int(_read(Header, self._request({"op": "label", **request}, timeout), "ranks")["ranks"])

    def keep_group(self, group: str, record: bytes, number: int, timeout: float) -> None:
        """Writes the record of a group to disk, unless a record with a higher ``number`` was written before."""
        self._request({"op": "keep_group", "group": group, "number": number}, timeout, payload=record)

    def kept_groups(self, timeout: float) -> tuple[dict[str, str], list[str]]:
        """Returns the records of groups on disk by name, and the groups whose records cannot be read."""
        kept = _read(_KeptGroups, self._request({"op": "kept_groups"}, timeout), "records")
        return kept.records, kept.damaged

    def record_findings(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """Stores rows of ``diagnosis.findings``; the collector sets ``node`` and ``ts``."""
        self._request({"op": "findings", "rows": list(rows)}, timeout)

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> ConditionsRead:
        """Returns ``processes``, ``loads`` and ``failures`` of ``ConditionAnswers.conditions``."""
        return _read(ConditionsRead, self._of_processes("conditions", pids, job, timeout, {}), "conditions")

    def config(self, request: Mapping[str, Any], timeout: float) -> Header:
        """Changes a setting, or returns all settings: fields of ConfigReply. ``request``: fields of ConfigRequest."""
        return _read(Header, self._request({"op": "config", **request}, timeout), "settings")

    def _of_processes(self, op: str, pids: Sequence[int], job: str, timeout: float, more: Mapping[str, Any]) -> Message:
        request = {"op": op, "pids": list(pids), "job": job, "timeout_ms": max(1, int(timeout * 1000)), **more}
        return self._request(request, timeout + 1.0)

    @contextmanager
    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: _Cancelled = _never
    ) -> Iterator[QuerySnapshot]:
        """Yields a snapshot of the rows in ``needs`` (by table). Its files stay until the context ends.

        ``timeout``, in seconds, limits the wait for the answer, and then the time for which the collector keeps the
        snapshot.

        The connection stays open until the context ends: if it breaks, the collector releases its snapshots.
        """
        asked = {name: need.packed() for name, need in needs.items()}
        request: Header = {"op": "snapshot", "tables": list(needs), "needs": asked, "seconds": timeout}
        channel, message = self._ask(request, timeout, cancelled)
        try:
            yield _snapshot(message, needs)
        finally:
            self._release(channel, message)

    def _release(self, channel: Channel, message: Message) -> None:
        try:
            generation = message.header.get("generation")
            channel.request({"op": "release", "generation": generation}, timeout=RELEASE_TIMEOUT_S)
        except InternalError:
            # Closing the connection releases the snapshot, too.
            channel.close()
        else:
            self._keep(channel)

    def _request(self, header: Header, timeout: float, cancelled: _Cancelled = _never, payload: bytes = b"") -> Message:
        channel, message = self._ask(header, timeout, cancelled, payload)
        self._keep(channel)
        return message

    def _ask(
        self, header: Header, timeout: float, cancelled: _Cancelled, payload: bytes = b""
    ) -> tuple[Channel, Message]:
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            reused = channel is not None
            if channel is None:
                channel = self._connect(timeout)
            try:
                return channel, self._exchange(channel, header, payload, deadline, cancelled)
            except ChannelClosed as e:
                # A kept connection may belong to a collector that has since been replaced, so another connection is
                # tried.
                if not reused:
                    raise PeerError("the collector ended before it answered", hint=_HINT) from e
            except ChannelTimeout as e:
                raise PeerError(f"the collector did not answer within {timeout:.1f} s", hint=_HINT) from e

    def _exchange(
        self, channel: Channel, header: Header, payload: bytes, deadline: float, cancelled: _Cancelled
    ) -> Message:
        """Sends one request and returns the answer. Closes ``channel`` unless it can be used for another request."""
        try:
            channel.send(header, payload, timeout=max(deadline - time.monotonic(), 0.001))
            if not wait_readable(channel.fileno(), deadline, cancelled):
                raise ChannelTimeout("no answer in time")
            message = channel.receive(max(deadline - time.monotonic(), 0.001))
        except BaseException:
            channel.close()
            raise
        message.close_fds()
        if error := message.header.get("error"):
            self._keep(channel)
            raise error_of(error)
        return message

    def _connect(self, timeout: float) -> Channel:
        try:
            return connect(self._path, timeout)
        except ChannelClosed as e:
            raise PeerError("the collector does not answer", hint=_HINT) from e

    def _keep(self, channel: Channel) -> None:
        with self._lock:
            if len(self._idle) < KEPT:
                self._idle.append(channel)
                return
        channel.close()


def _read(kind: type[_T], message: Message, what: str) -> _T:
    """Returns a ``kind`` made from ``message``. The header has the small fields, the payload has the large fields."""
    try:
        return typed(kind, {**message.header, **typed_json(Header, message.payload or b"{}")})
    except ValueError as e:
        raise InternalError(f"the collector returned malformed {what}: {e}") from e


class _KeptGroups(Struct):
    records: dict[str, str]
    damaged: list[str]


class _Segment(Struct):
    path: str
    rows: int


class _Part(Struct):
    path: str
    length: int
    tables: dict[str, int] = {}


class _Snapshot(Struct):
    tables: dict[str, list[_Segment]]
    parts: list[_Part]
    missing: list[str] = []


class _Snapshots(Struct):
    snapshot: _Snapshot


def _snapshot(message: Message, needs: Mapping[str, Need]) -> QuerySnapshot:
    found = _read(_Snapshots, message, "snapshots").snapshot
    segments = {name: [QueryFile(s.path, s.rows) for s in found.tables.get(name, ())] for name in needs}
    # A part without a list of tables may have rows of any table.
    parts = [part for part in found.parts if not part.tables or not needs.keys().isdisjoint(part.tables)]
    return QuerySnapshot(segments, [(part.path, part.length) for part in parts], found.missing)
