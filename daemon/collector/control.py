"""Serves the collector's control socket, by which the service reaches the collector.

Each request has a handler. The handler gets the header of the request, with the payload as the field ``payload``, and
returns the header and payload of the answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import InternalError, NotFound, PrivilegeError, ProbingError, UsageError
from probing.api.tables.user import UserTable
from probing.api.typed import with_fields
from probing.daemon.arrow import ipc_bytes
from probing.daemon.collector.live_settings import Changes
from probing.daemon.ipc import Channel, ChannelClosed, Header, Message, peer_credentials
from probing.daemon.python_stack.answers import StackAnswers
from probing.daemon.stack_wire import join_stacks
from probing.daemon.store.manifest import Segment
from probing.daemon.store.needs import Need
from probing.daemon.store.store import Store

__all__ = (
    "ControlServer",
    "Handler",
    "Requests",
)

# The header and the payload of an answer.
_Answer = tuple[Header, bytes]
Handler = Callable[[Header], _Answer]
MAX_CONNECTIONS = 32
ACCEPT_AGAIN_S = 0.1
_log = logging.getLogger(__name__)


class ControlServer:
    """Listens on ``path`` with one thread for each connection. Refuses users other than ``users``, root and the user of
    this process.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler], users: frozenset[int]) -> None:
        self._path = path
        self._handlers = dict(handlers)
        self._users = users | {0, os.getuid()}
        self._socket: socket.socket | None = None
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        # Called in the thread of a connection when the connection ends, for example to release the client's snapshots.
        self.on_disconnect: Callable[[], None] = lambda: None

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(self._path))
        # The mode of the socket lets any user connect. That is safe: only the service can enter the directory, and peer
        # credentials are checked.
        self._path.chmod(0o666)
        server.listen(MAX_CONNECTIONS)
        self._socket = server
        threading.Thread(target=self._accept, args=(server,), name="control", daemon=True).start()

    def stop(self) -> None:
        if self._socket is not None:
            server, self._socket = self._socket, None
            server.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError as e:
                if self._socket is not server:
                    return
                # Perhaps no descriptor is free now, or the client hung up. Later clients must be answered all the same.
                _log.warning("a control connection cannot be accepted: %s", e.strerror)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(client,), name="control-client", daemon=True).start()
            except RuntimeError as e:  # no thread can be started now; the accepting thread must continue
                _log.warning("a control connection is not answered: %s", e)
                client.close()
                self._slots.release()

    def _serve(self, client: socket.socket) -> None:
        try:
            with Channel(client) as channel:
                _, uid, _ = peer_credentials(client)
                if uid not in self._users:
                    channel.send_error(PrivilegeError(f"user {uid} is not allowed to talk to the collector"))
                    return
                while True:
                    self._answer(channel, channel.receive())
        except ChannelClosed:
            pass
        except ProbingError as e:
            _log.warning("a control connection was dropped: %s", e.message)
        finally:
            self.on_disconnect()
            self._slots.release()

    def _answer(self, channel: Channel, request: Message) -> None:
        request.close_fds()
        op = str(request.header.get("op"))
        try:
            handler = self._handlers.get(op)
            if handler is None:
                raise UsageError(f"the collector has no request {op!r}")
            fields = {**request.header, "payload": request.payload} if request.payload else request.header
            header, payload = handler(fields)
        except ProbingError as e:
            channel.send_error(e)
        except Exception as e:  # a bug in one handler must not end the daemon; the client gets the error
            _log.exception("request %s failed", op)
            channel.send_error(InternalError(f"the collector failed at {op}: {type(e).__name__}: {e}"))
        else:
            channel.send(header, payload)


TIMEOUT_MS = 1000.0
MAX_TIMEOUT_S = 30.0
MAX_DAMAGED = 64


class Requests:
    """Answers requests. The fields of a request are the arguments of its method.

    ``live``: functions that make the rows of live tables, by table name. ``flush`` drains the rings, and returns why
    that failed, or "". ``pause`` pauses or resumes the probes, and returns whether they are paused. ``tables``
    describes the tables of users. ``findings`` stores rows of ``diagnosis.findings``, and returns their number.
    ``conditions`` is ``ConditionAnswers.conditions``.
    """

    def __init__(
        self,
        store: Store,
        answers: StackAnswers,
        changes: Changes,
        live: Mapping[str, Callable[[], pa.RecordBatch]],
        flush: Callable[[], str],
        status: Callable[[], Header],
        pause: Callable[[bool], bool],
        tables: Callable[[], list[UserTable]] = list,
        findings: Callable[[Any], int] = lambda _: 0,
        conditions: Callable[[Sequence[int], str, float], Mapping[str, Any]] = lambda *_: {},
    ) -> None:
        self._store = store
        self._answers = answers
        self._changes = changes
        self._live_tables = dict(live)
        self._flush = flush
        self._status = status
        self._pause_probes = pause
        self._tables = tables
        self._put_findings = findings
        self._read_conditions = conditions
        self._snapshots = threading.local()

    def handlers(self) -> dict[str, Handler]:
        return {
            "snapshot": with_fields(self._snapshot),
            "release": with_fields(self._release),
            "damaged": with_fields(self._damaged),
            "live": with_fields(self._live),
            "tables": lambda _: ({}, json.dumps({"tables": self._tables()}).encode()),
            "stacks": with_fields(self._stacks),
            "vars": with_fields(self._vars),
            "conditions": with_fields(self._conditions),
            "config": with_fields(self._config),
            "findings": with_fields(self._findings),
            "status": lambda _: ({}, json.dumps(self._status()).encode()),
            "pause": with_fields(self._pause),
        }

    def release_all(self) -> None:
        """Releases the snapshots of the connection that this thread served and that has ended."""
        for generation in self._held():
            self._store.release(generation)

    def _snapshot(
        self,
        tables: tuple[str, ...] = (),
        needs: dict[str, Need] = {},  # noqa: B006
        seconds: float = 0.0,
    ) -> _Answer:
        behind = self._flush()
        wanted = {name: needs.get(name, Need()) for name in tables}
        snapshot = self._store.snapshot(partial(_holds, wanted), seconds)
        self._held().add(snapshot["generation"])
        missing = [f"rows of the last seconds are missing: {behind}"] if behind else []
        payload = json.dumps({"snapshot": {**snapshot, "missing": missing}}).encode()
        return {"generation": snapshot["generation"]}, payload

    def _release(self, generation: int) -> _Answer:
        self._held().discard(generation)
        self._store.release(generation)
        return {}, b""

    def _damaged(self, paths: tuple[str, ...]) -> _Answer:
        # The client is not trusted: the store ignores paths that are not paths of its segments.
        reported = dict.fromkeys(paths[:MAX_DAMAGED])
        bad = [path for path in reported if self._store.quarantine(path, "a query could not read it")]
        return {}, json.dumps({"set_aside": bad}).encode()

    def _held(self) -> set[int]:
        """Returns the ids of the snapshots that this thread's connection holds."""
        if not hasattr(self._snapshots, "held"):
            self._snapshots.held = set()
        held: set[int] = self._snapshots.held
        return held

    def _findings(self, rows: list[Any]) -> _Answer:
        return {"stored": self._put_findings(rows)}, b""

    def _live(self, table: str) -> _Answer:
        if table not in self._live_tables:
            raise NotFound(f"the collector has no live table {table!r}")
        return {}, ipc_bytes(self._live_tables[table]())

    def _stacks(
        self,
        pids: tuple[int, ...] = (),
        job: str = "",
        timeout_ms: float = TIMEOUT_MS,
        native: bool = False,
        locals: bool = False,  # noqa: A002
    ) -> _Answer:
        return join_stacks(*self._answers.stacks(pids, job, _seconds(timeout_ms), native=native, with_locals=locals))

    def _vars(
        self, names: tuple[str, ...], pids: tuple[int, ...] = (), job: str = "", timeout_ms: float = TIMEOUT_MS
    ) -> _Answer:
        return {}, json.dumps(self._answers.variables(pids, job, names, _seconds(timeout_ms))).encode()

    def _conditions(self, pids: tuple[int, ...] = (), job: str = "", timeout_ms: float = TIMEOUT_MS) -> _Answer:
        return {}, json.dumps(self._read_conditions(pids, job, _seconds(timeout_ms))).encode()

    def _pause(self, paused: bool = False) -> _Answer:
        return {"paused": self._pause_probes(paused)}, b""

    def _config(
        self,
        key: str = "",
        value: str | None = None,
        job: str = "",
        pid: int = 0,
        reset: bool = False,
        yes: bool = False,
        for_ms: int = 0,
        persist: bool = False,
        propose_value: str | None = None,
        propose_reset: bool = False,
    ) -> _Answer:
        process = (0, 0)
        if pid or (job and (reset or value is not None)):
            # Raises NotFound for an unknown process or job, so that a change for a wrong name does not seem to work.
            who = self._answers.chosen([pid] if pid else [], job)[0]
            process = (who.pid, who.start_ns) if pid else process
        if reset:
            self._changes.reset(key, job=job, process=process, confirmed=yes)
        elif value is not None:
            self._changes.change(key, value, job=job, process=process, for_ms=for_ms, persist=persist, confirmed=yes)
        answer = {}
        if propose_value is not None or propose_reset:
            effect = self._changes.effect(key, None if propose_reset else propose_value)
            answer["effect"] = self._changes.described(effect)
        settings = self._changes.to_list(key)
        if job or pid:
            settings = [s for s in settings if (s.get("job", ""), s.get("pid", 0)) in ((job, pid), ("", 0))]
        return {}, json.dumps({**answer, "settings": settings}).encode()


def _holds(needs: Mapping[str, Need], segment: Segment) -> bool:
    """Returns whether ``segment`` may contain rows that its table's entry in ``needs`` asks for. An empty ``needs``
    asks for all rows of all tables.
    """
    if segment.table not in needs:
        return not needs
    return needs[segment.table].holds(segment.ts_min, segment.ts_max, segment.jobs)


def _seconds(milliseconds: float) -> float:
    return min(milliseconds / 1000, MAX_TIMEOUT_S)
