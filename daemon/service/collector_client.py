"""Sends the service's requests to the collector's control socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from probing.api.errors import FormatError, InternalError, PeerError, ProbingError
from probing.api.tables import Table
from probing.api.tables.user import user_table_from
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message, connect, error_of
from probing.daemon.query.caller import wait_readable
from probing.daemon.query.snapshot import QueryFile, QuerySnapshot
from probing.daemon.stack_wire import ProcessStacks, split_stacks
from probing.daemon.store.needs import Need

__all__ = ("CollectorClient",)

KEPT = 4
RELEASE_TIMEOUT_S = 2.0
MAX_REPORTED = 1000
_HINT = "it is started again by itself; ask again, and if it stays so, the daemon's log says why it ends"
_Cancelled = Callable[[], bool]


def _never() -> bool:
    return False


class CollectorClient:
    """Safe for many threads: each request has its own connection, of which up to KEPT stay open afterwards.

    Every method raises PeerError if the collector does not answer, and the error that the collector answers with;
    methods with ``cancelled`` raise QueryError once ``cancelled`` returns True.
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

    def status(self, timeout: float) -> dict[str, Any]:
        """Returns the fields of probing.v1.StatusReply."""
        return _body(self._request({"op": "status"}, timeout))

    def pause(self, paused: bool, timeout: float) -> bool:
        """Stops or resumes all probes; returns whether they are paused now."""
        answer = self._request({"op": "pause", "paused": paused}, timeout)
        return bool(answer.header.get("paused", paused))

    def live(self, table: str, timeout: float, cancelled: _Cancelled = _never) -> bytes:
        """Returns the rows of a live table in its logical schema, as an Arrow IPC stream."""
        return self._request({"op": "live", "table": table}, timeout, cancelled).payload

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        """Reports segments that could not be read, so that the store examines them. Raises nothing."""
        # If this fails, the next query that reads them reports them again.
        with suppress(ProbingError):
            self._request({"op": "damaged", "paths": list(paths)[:MAX_REPORTED]}, timeout)

    def tables(self, timeout: float) -> dict[str, Table]:
        """Returns the tables of users' probes, present and past, by name."""
        found = _body(self._request({"op": "tables"}, timeout)).get("tables")
        try:
            return {table.name: table for table in map(user_table_from, found or ())}
        except (FormatError, TypeError) as e:
            raise InternalError("the collector's tables make no sense") from e

    def stacks(
        self, pids: Sequence[int], job: str, timeout: float, *, native: bool = False, with_locals: bool = False
    ) -> tuple[list[ProcessStacks], list[dict[str, Any]]]:
        """Returns the packed stacks of each process, and the failures in StacksReply. ``timeout``: s, per process."""
        answer = self._of_processes("stacks", pids, job, timeout, {"native": native, "locals": with_locals})
        return split_stacks(answer.header, answer.payload)

    def variables(self, pids: Sequence[int], job: str, names: Sequence[str], timeout: float) -> dict[str, Any]:
        """Returns the fields ``values`` and ``failures`` that docs/architecture.md describes."""
        return _body(self._of_processes("vars", pids, job, timeout, {"names": list(names)}))

    def evaluate(
        self, pids: Sequence[int], job: str, rank: int | None, code: str, seconds: float, caller: str, timeout: float
    ) -> dict[str, Any]:
        """Runs ``code`` in processes; returns ``results`` and ``failures`` of ``inject.requests.Evaluations``.

        ``seconds``: for the code; ``timeout``: for the answer. ``caller``: for the audit rows.
        """
        request: dict[str, Any] = {"op": "eval", "pids": list(pids), "job": job, "code": code, "seconds": seconds}
        return _body(self._request({**request, "rank": rank, "caller": caller}, timeout))

    def record_findings(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """Stores rows of ``diagnosis.findings``; the collector sets ``node`` and ``ts``."""
        self._request({"op": "findings", "rows": list(rows)}, timeout)

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> dict[str, Any]:
        """Returns ``processes``, ``loads`` and ``failures`` of ``ConditionAnswers.conditions``."""
        return _body(self._of_processes("conditions", pids, job, timeout, {}))

    def config(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Changes a setting, or returns all settings: fields of ConfigReply. ``request``: fields of ConfigRequest."""
        return _body(self._request({"op": "config", **request}, timeout))

    def _of_processes(self, op: str, pids: Sequence[int], job: str, timeout: float, more: Mapping[str, Any]) -> Message:
        request = {"op": op, "pids": list(pids), "job": job, "timeout_ms": max(1, int(timeout * 1000)), **more}
        return self._request(request, timeout + 1.0)

    @contextmanager
    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: _Cancelled = _never
    ) -> Iterator[QuerySnapshot]:
        """Yields a snapshot of the rows in ``needs`` (by table); its files stay until the context ends.

        The connection is held until then: the collector releases the snapshots of a connection that breaks.
        """
        asked = {name: need.to_dict() for name, need in needs.items()}
        request: dict[str, object] = {"op": "snapshot", "tables": list(needs), "needs": asked}
        channel, message = self._ask(request, timeout, cancelled)
        try:
            yield _snapshot(_body(message).get("snapshot"), needs)
        finally:
            self._release(channel, message)

    def _release(self, channel: Channel, message: Message) -> None:
        try:
            generation = message.header.get("generation")
            channel.request({"op": "release", "generation": generation}, timeout=RELEASE_TIMEOUT_S)
        except InternalError:
            # Closing releases as well.
            channel.close()
        else:
            self._keep(channel)

    def _request(self, header: dict[str, object], timeout: float, cancelled: _Cancelled = _never) -> Message:
        channel, message = self._ask(header, timeout, cancelled)
        self._keep(channel)
        return message

    def _ask(self, header: dict[str, object], timeout: float, cancelled: _Cancelled) -> tuple[Channel, Message]:
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            reused = channel is not None
            if channel is None:
                channel = self._connect(timeout)
            try:
                return channel, self._exchange(channel, header, deadline, cancelled)
            except ChannelClosed as e:
                # A kept connection may belong to a collector that has been replaced since.
                if not reused:
                    raise PeerError("the collector ended before it answered", hint=_HINT) from e
            except ChannelTimeout as e:
                raise PeerError(f"the collector did not answer within {timeout:.1f} s", hint=_HINT) from e

    def _exchange(self, channel: Channel, header: dict[str, object], deadline: float, cancelled: _Cancelled) -> Message:
        """Sends one request and returns the answer; closes ``channel`` unless it can take another request."""
        try:
            channel.send(header, timeout=max(deadline - time.monotonic(), 0.001))
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


def _body(message: Message) -> dict[str, Any]:
    """Returns the header and the JSON object of the payload, which has what does not fit into a header."""
    if not message.payload:
        return message.header
    try:
        return {**message.header, **json.loads(message.payload)}
    except (ValueError, TypeError) as e:
        raise InternalError("the collector's answer is no JSON object") from e


def _snapshot(found: Any, needs: Mapping[str, Need]) -> QuerySnapshot:
    try:
        segments = {
            name: [QueryFile(str(entry["path"]), int(entry["rows"])) for entry in found["tables"].get(name, ())]
            for name in needs
        }
        # A part without a list of tables may have rows of any table.
        parts = [part for part in found["parts"] if not needs.keys().isdisjoint(part.get("tables") or needs)]
        missing = [str(text) for text in found.get("missing", ())]
        return QuerySnapshot(segments, [(str(part["path"]), int(part["length"])) for part in parts], missing)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InternalError("the collector's snapshot makes no sense") from e
