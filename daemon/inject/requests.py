"""Answers requests to run code in processes: checks the allow-lists, starts an injector for each process, and records
each use.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from probing.api.errors import (
    InternalError,
    NotFound,
    PrivilegeError,
    ProbingError,
    ProcessGone,
    TargetError,
    TargetTimeout,
    UsageError,
)
from probing.api.typed import typed_json
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.config import InjectConfig
from probing.daemon.inject.evaluation import MAX_CODE, MAX_SECONDS, SESSION, Answer, Evaluation
from probing.daemon.inject.lookup import find_functions
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Header, connect
from probing.daemon.processes.liveness import OwnProcesses, real_user
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Sink

__all__ = ("Evaluations",)

AUDIT = "probing.audit"
_log = logging.getLogger(__name__)
PARALLEL = 8
MAX_PROCESSES = 64
# The maximum bytes of all answers together: enough for the longest output in ASCII of MAX_PROCESSES processes.
MAX_ANSWERS = 32 << 20
# The maximum seconds for the injector to start, and to work before and after the code runs.
_START_S = 10.0
_ALL = "*"
_CUT = 1000
_Chosen = Callable[[Sequence[int], str], list[Identity]]


class _Asked(NamedTuple):
    code: str
    seconds: float
    caller: str
    session: str = ""
    ends: bool = False
    most_bytes: int = MAX_ANSWERS


class Evaluations:
    """Answers requests to run code; thread-safe. ``path`` is the injector's socket, on which each connection starts an
    injector. ``chosen`` returns the processes with given pids or of a job. ``own`` contains the daemon's processes."""

    def __init__(
        self,
        config: InjectConfig,
        path: str,
        readers: ReaderPool,
        parsers: ParserPool,
        chosen: _Chosen,
        own: OwnProcesses,
        node: str,
        sink: Sink,
        clock: Clock,
    ) -> None:
        self._config = config
        self._path = path
        self._readers = readers
        self._parsers = parsers
        self._chosen = chosen
        self._own = own
        self._node = node
        self._sink = sink
        self._clock = clock
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="evaluate")
        # Processes in which code runs, by pid and start.
        self._running: set[tuple[int, int]] = set()
        self._freed = threading.Condition()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def answer(self, request: Mapping[str, Any]) -> tuple[Header, bytes]:
        """Answers the request ``eval`` of the control socket. The payload is JSON with ``results`` and ``failures``.

        A result has the keys of ``evaluation.Answer``, and job, run, rank, pid and start_ns.
        """
        asked = _Asked(str(request.get("code", "")), float(request.get("seconds", 0)), str(request.get("caller", "")))
        if not asked.code.strip() or len(asked.code) > MAX_CODE:
            raise UsageError(f"the code has {len(asked.code):,} characters", hint=f"1 to {MAX_CODE:,} can be run")
        if not 0 < asked.seconds <= MAX_SECONDS:
            raise UsageError(f"code may run for {MAX_SECONDS:g} s at most")
        asked = asked._replace(session=str(request.get("session") or ""), ends=bool(request.get("ends")))
        if not SESSION.fullmatch(asked.session):
            raise UsageError("the name of a session has at most 32 characters: digits and the letters a to f")
        pids = [int(pid) for pid in request.get("pids", ())]
        processes = self._processes(pids, str(request.get("job") or ""), request.get("rank"))
        each = asked._replace(most_bytes=MAX_ANSWERS // len(processes))
        answers = list(zip(processes, self._pool.map(lambda who: self._one(who, each), processes), strict=True))
        results = [{**_named(who), **answer} for who, answer in answers if not isinstance(answer, ProbingError)]
        failures = [
            {"pid": who.pid, "rank": who.rank, "job": who.job, "error": answer.to_dict()}
            for who, answer in answers
            if isinstance(answer, ProbingError)
        ]
        return {}, json.dumps({"results": results, "failures": failures}).encode()

    def _processes(self, pids: Sequence[int], job: str, rank: object) -> list[Identity]:
        if not pids and not job and rank is None:
            raise UsageError("the request names no processes to run code in", hint="give a pid, --job or --rank")
        chosen = self._chosen(pids, job)
        if not pids:
            chosen = [who for who in chosen if who.role == "trainer"]
        if rank is not None:
            chosen = [who for who in chosen if who.rank == rank]
        if not chosen:
            raise NotFound("no watched process matches", hint="`probingctl ps` lists jobs, ranks and processes")
        if not pids and len(jobs := {who.job for who in chosen}) > 1:
            raise UsageError(f"{len(jobs)} jobs have a rank {rank}", hint="give --job as well")
        if len(chosen) > MAX_PROCESSES:
            hint = f"give --rank or a pid: code is run in at most {MAX_PROCESSES} processes at once"
            raise UsageError(f"the request matches {len(chosen)} processes", hint=hint)
        return chosen

    def _one(self, who: Identity, asked: _Asked) -> Answer | ProbingError:
        self._record(who, asked, "begun", "")
        error: ProbingError
        try:
            answer = self._evaluated(who, asked)
        except ProbingError as e:
            error = e
        except Exception as e:
            _log.exception("code could not be run in process %d", who.pid)
            error = InternalError(f"{type(e).__name__}: {e}")
        else:
            raised = answer["error"]["type"] if "error" in answer else ""
            self._record(who, asked, "ended", f"the code raised {raised}" if raised else "")
            return answer
        self._record(who, asked, "refused" if isinstance(error, PrivilegeError) else "failed", error.message)
        return error

    def _evaluated(self, who: Identity, asked: _Asked) -> Answer:
        deadline = time.monotonic() + asked.seconds + _START_S
        uid = real_user(who.pid)
        if uid is None:
            raise ProcessGone(f"process {who.pid} exited")
        self._require_allowed(who, uid)
        functions = find_functions(self._readers, self._parsers, who.pid, who.start_ns, deadline)
        evaluation = Evaluation(
            who.pid, who.start_ns, uid, functions.to_dict(), asked.code, asked.seconds, asked.session, asked.ends
        )
        try:
            with self._turn(who, asked.seconds), connect(self._path) as channel:
                answer = channel.request({"op": "eval", **evaluation._asdict()}, timeout=asked.seconds + _START_S)
        except ChannelTimeout:
            raise TargetTimeout(
                f"the injector of process {who.pid} did not answer", hint="ask again; the process goes on unchanged"
            ) from None
        except ChannelClosed as e:
            raise InternalError(f"the injector ended: {e.message}", hint="is probingd-injector.socket active?") from e
        answer.close_fds()
        if len(answer.payload) > asked.most_bytes:
            raise TargetError(f"process {who.pid} answers too much", hint="print less, or ask fewer processes at once")
        try:
            return typed_json(Answer, answer.payload)
        except ValueError as e:
            raise InternalError("the injector's answer is malformed") from e

    @contextmanager
    def _turn(self, who: Identity, seconds: float) -> Iterator[None]:
        """Context manager. While its body runs, no other request runs code in the process (see ``evaluation``).

        Raises TargetTimeout if the code of another request does not end within ``seconds``.
        """
        process = (who.pid, who.start_ns)
        with self._freed:
            if not self._freed.wait_for(lambda: process not in self._running, seconds):
                raise TargetTimeout(f"code of another request runs in process {who.pid}", hint="ask again")
            self._running.add(process)
        try:
            yield
        finally:
            with self._freed:
                self._running.discard(process)
                self._freed.notify_all()

    def _require_allowed(self, who: Identity, uid: int) -> None:
        """Raises PrivilegeError if the process belongs to the daemon, or if the configuration lists neither the
        process's job nor its user.
        """
        config = self._config
        if who.pid in self._own or who.pid in (os.getpid(), os.getppid()):
            hint = "give a process that `probingctl ps` lists"
            raise PrivilegeError(f"process {who.pid} is the daemon's own", hint=hint)
        if who.job and _is_listed([who.job], config.jobs):
            return
        users = [str(uid), *_names(uid)]
        # `*` allows all users except root, who must be listed by name or uid.
        if set(users) & set(config.users) or (uid and _ALL in config.users):
            return
        raise PrivilegeError(
            f"no permission to run code in process {who.pid} of user {users[-1]}"
            + (f" and job {who.job!r}" if who.job else ", which belongs to no job"),
            hint="add the job to inject.jobs, or the user to inject.users, in the node's configuration",
        )

    def _record(self, who: Identity, asked: _Asked, state: str, result: str) -> None:
        row = {
            **who.row(self._node, self._clock.pair().real_ns),
            "caller": asked.caller[:_CUT],
            "action": "eval",
            "state": state,
            "code": asked.code[:_CUT],
            "result": result[:_CUT],
        }
        self._sink.put(AUDIT, batch_of(AUDIT, [row]))


def _named(who: Identity) -> dict[str, object]:
    return {"job": who.job, "run": who.run, "rank": who.rank, "pid": who.pid, "start_ns": who.start_ns}


def _is_listed(names: Iterable[str], allowed: Sequence[str]) -> bool:
    return _ALL in allowed or not set(names).isdisjoint(allowed)


def _names(uid: int) -> list[str]:
    try:
        return [pwd.getpwuid(uid).pw_name]
    except KeyError:
        return []
