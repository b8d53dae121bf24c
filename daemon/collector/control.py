"""Serves the collector's control socket, by which alone the service reaches the collector: a method for each request,
which returns a header and a payload.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import InternalError, NotFound, PrivilegeError, ProbingError, UsageError
from probing.daemon.arrow import ipc_bytes
from probing.daemon.collector.live_settings import Changes
from probing.daemon.ipc import Channel, ChannelClosed, Message, peer_credentials
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

# A function that takes the header of a request, and returns header and payload of the answer.
Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]
MAX_CONNECTIONS = 32
_log = logging.getLogger(__name__)


class ControlServer:
    """Listens on ``path`` with one thread for each connection, and refuses users that are not in ``users``."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler], users: frozenset[int]) -> None:
        self._path = path
        self._handlers = dict(handlers)
        self._users = users | {0, os.getuid()}
        self._socket: socket.socket | None = None
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        # The thread of a connection calls it when the connection ends, for example to release the client's snapshots.
        self.on_disconnect: Callable[[], None] = lambda: None

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(self._path))
        # Only the service may enter the directory; peer credentials decide which users may connect.
        self._path.chmod(0o666)
        server.listen(MAX_CONNECTIONS)
        self._socket = server
        threading.Thread(target=self._accept, args=(server,), name="control", daemon=True).start()

    def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name="control-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with Channel(client) as channel:
                _, uid, _ = peer_credentials(client)
                if uid not in self._users:
                    channel.send_error(PrivilegeError(f"user {uid} may not talk to the collector"))
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
                raise UsageError(f"the collector knows no request {op!r}")
            header, payload = handler(request.header)
        except ProbingError as e:
            channel.send_error(e)
        except Exception as e:  # a bug in one handler must not end the daemon; the client sees it
            _log.exception("request %s failed", op)
            channel.send_error(InternalError(f"the collector failed at {op}: {type(e).__name__}: {e}"))
        else:
            channel.send(header, payload)


MAX_TIMEOUT_S = 30.0
MAX_DAMAGED = 64
_Answer = tuple[dict[str, Any], bytes]


class Requests:
    """Answers requests. ``live`` makes the rows of live tables by name. ``flush`` drains the rings and returns why it
    could not, or "". ``pause`` stops or resumes the probes and returns whether they are paused. ``tables`` describes
    the tables of users' probes. ``findings`` stores rows of ``diagnosis.findings`` and returns their number.
    ``conditions`` is ``ConditionAnswers.conditions``."""

    def __init__(
        self,
        store: Store,
        answers: StackAnswers,
        changes: Changes,
        live: Mapping[str, Callable[[], pa.RecordBatch]],
        flush: Callable[[], str],
        status: Callable[[], dict[str, Any]],
        pause: Callable[[bool], bool],
        tables: Callable[[], list[dict[str, Any]]] = list,
        findings: Callable[[Any], int] = lambda _: 0,
        conditions: Callable[[list[int], str, float], dict[str, Any]] = lambda *_: {},
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
            "snapshot": self._snapshot,
            "release": self._release,
            "damaged": self._damaged,
            "live": self._live,
            "tables": lambda _: ({}, json.dumps({"tables": self._tables()}).encode()),
            "stacks": self._stacks,
            "vars": self._vars,
            "conditions": lambda request: ({}, json.dumps(self._read_conditions(*_meant(request))).encode()),
            "config": self._config,
            "findings": self._findings,
            "status": lambda _: ({}, json.dumps(self._status()).encode()),
            "pause": lambda request: ({"paused": self._pause_probes(bool(request.get("paused")))}, b""),
        }

    def release_all(self) -> None:
        """Release the snapshots of this thread's connection, which ended."""
        for generation in self._held():
            self._store.release(generation)

    def _snapshot(self, request: dict[str, Any]) -> _Answer:
        behind = self._flush()
        snapshot = self._store.snapshot(_wanted(request))
        self._held().add(snapshot["generation"])
        missing = [f"rows of the last seconds are missing: {behind}"] if behind else []
        payload = json.dumps({"snapshot": {**snapshot, "missing": missing}}).encode()
        return {"generation": snapshot["generation"]}, payload

    def _release(self, request: dict[str, Any]) -> _Answer:
        generation = int(request.get("generation", 0))
        self._held().discard(generation)
        self._store.release(generation)
        return {}, b""

    def _damaged(self, request: dict[str, Any]) -> _Answer:
        # The client is not trusted: the store checks the files itself, and only its own.
        paths = [str(path) for path in list(request.get("paths", ()))[:MAX_DAMAGED]]
        bad = [path for path in dict.fromkeys(paths) if self._store.quarantine(path, "a query could not read it")]
        return {}, json.dumps({"set_aside": bad}).encode()

    def _held(self) -> set[int]:
        """Returns the snapshots of this thread's connection."""
        if not hasattr(self._snapshots, "held"):
            self._snapshots.held = set()
        held: set[int] = self._snapshots.held
        return held

    def _findings(self, request: dict[str, Any]) -> _Answer:
        return {"stored": self._put_findings(request.get("rows"))}, b""

    def _live(self, request: dict[str, Any]) -> _Answer:
        name = str(request.get("table"))
        if name not in self._live_tables:
            raise NotFound(f"the collector has no live table {name!r}")
        return {}, ipc_bytes(self._live_tables[name]())

    def _stacks(self, request: dict[str, Any]) -> _Answer:
        found = self._answers.stacks(
            *_meant(request), native=bool(request.get("native")), with_locals=bool(request.get("locals"))
        )
        return join_stacks(*found)

    def _vars(self, request: dict[str, Any]) -> _Answer:
        pids, job, timeout = _meant(request)
        names = [str(name) for name in request.get("names", ())]
        return {}, json.dumps(self._answers.variables(pids, job, names, timeout)).encode()

    def _config(self, request: dict[str, Any]) -> _Answer:
        key, job, pid = str(request.get("key") or ""), str(request.get("job") or ""), int(request.get("pid") or 0)
        changes = "value" in request or bool(request.get("reset"))
        confirmed = bool(request.get("yes"))
        process = (0, 0)
        if pid or (job and changes):
            # The process or job must exist: a wrong name must not look as if it had worked.
            who = self._answers.chosen([pid] if pid else [], job)[0]
            process = (who.pid, who.start_ns) if pid else process
        if request.get("reset"):
            self._changes.reset(key, job=job, process=process, confirmed=confirmed)
        elif "value" in request:
            self._changes.change(
                key,
                str(request["value"]),
                job=job,
                process=process,
                for_ms=int(request.get("for_ms") or 0),
                persist=bool(request.get("persist")),
                confirmed=confirmed,
            )
        answer: dict[str, Any] = {}
        if "propose_value" in request or request.get("propose_reset"):
            text = None if request.get("propose_reset") else str(request["propose_value"])
            answer["effect"] = self._changes.described(self._changes.effect(key, text))
        settings = self._changes.to_list(key)
        if job or pid:
            settings = [s for s in settings if (s.get("job", ""), s.get("pid", 0)) in ((job, pid), ("", 0))]
        return {}, json.dumps({**answer, "settings": settings}).encode()


def _wanted(request: Mapping[str, Any]) -> Callable[[Segment], bool]:
    """Tests a segment against the ``needs`` of the request's ``tables``; a request without tables needs everything."""
    asked = request.get("needs") or {}
    needs = {str(name): Need.from_dict(asked.get(name) or {}) for name in request.get("tables") or ()}

    def wanted(segment: Segment) -> bool:
        if segment.table not in needs:
            return not needs
        return needs[segment.table].holds(segment.ts_min, segment.ts_max, segment.jobs)

    return wanted


def _meant(request: Mapping[str, Any]) -> tuple[list[int], str, float]:
    pids = [int(pid) for pid in request.get("pids", ())]
    timeout = min(float(request.get("timeout_ms") or 1000) / 1000, MAX_TIMEOUT_S)
    return pids, str(request.get("job") or ""), timeout
