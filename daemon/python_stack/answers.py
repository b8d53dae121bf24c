"""Answers requests for stacks and variables: chooses the processes, reads them, and adds job and rank."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from probing.api.errors import NotFound, ProbingError
from probing.daemon.arrow import batch_of
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.liveness import process_now
from probing.daemon.processes.reader_pool import Failure
from probing.daemon.python_stack.native.requests import NativeStacks
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.source import Identity, ProcessKey
from probing.daemon.stack_wire import ProcessStacks, ReadFailure, Thread, VariablesRead

__all__ = ("StackAnswers",)

TIMEOUT_S = 1.0
# The minimum timeout for native stacks, s. The first request for a process is slow, because it reads the unwind tables
# of the process's libraries.
NATIVE_TIMEOUT_S = 5.0
NATIVE_PARALLEL = 2
_Threads = list[Thread]


class StackAnswers:
    def __init__(self, node: str, known: Discovery, stacks: PythonStacks, native: NativeStacks, values: Values) -> None:
        self._node = node
        self._known = known
        self._stacks = stacks
        self._native = native
        self._values = values
        self._pool = ThreadPoolExecutor(NATIVE_PARALLEL, thread_name_prefix="native")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def stacks(
        self, pids: Sequence[int], job: str, timeout: float, *, native: bool = False, with_locals: bool = False
    ) -> tuple[list[ProcessStacks], list[ReadFailure]]:
        """Returns the packed stacks of each process, sorted by job, run and rank, and the failures for StacksReply.

        ``timeout``: seconds for each process. Raises NotFound for an unknown job or pid.
        """
        by_key = {i.key: i for i in self.chosen(pids, job)}
        if native:
            threads, failures = self._with_native(by_key, timeout, with_locals=with_locals)
            packed: list[tuple[tuple[int, int], bytes]]
            packed = [(key, json.dumps({"threads": own}).encode()) for key, own in _by_process(threads).items()]
        else:
            packed, failures = self._stacks.packed(by_key, timeout, with_locals=with_locals)
        processes = []
        for (pid, start_ns), text in packed:
            process = by_key[ProcessKey(pid, start_ns)]
            processes.append(ProcessStacks(process.job, process.run, process.rank, pid, start_ns, process.trains, text))
        processes.sort(key=lambda p: (p.job, p.run, p.rank is None, p.rank, p.pid))
        return processes, [_failure(by_key[ProcessKey(f.pid, f.start_ns)], f) for f in failures]

    def variables(self, pids: Sequence[int], job: str, names: Sequence[str], timeout: float) -> VariablesRead:
        """Returns ``values`` and ``failures`` as in VarsReply. Raises NotFound for an unknown job or pid."""
        by_key = {i.key: i for i in self.chosen(pids, job)}
        values, failures = self._values.values(by_key, names, timeout)
        trains = {key.pid: who.trains for key, who in by_key.items()}
        place = {name: n for n, name in enumerate(names)}
        values.sort(key=lambda v: (place.get(v["name"], 0), v["tid"] != trains[v["pid"]]))
        rows = [_with_job(by_key[ProcessKey(v["pid"], v["start_ns"])], v) for v in values]
        return {
            "values": sorted(rows, key=lambda v: (v["job"], v["run"], v["rank"] is None, v["rank"], v["pid"])),
            "failures": [_failure(by_key[ProcessKey(f.pid, f.start_ns)], f) for f in failures],
        }

    def backtrace(self, now_ns: int) -> pa.RecordBatch:
        """Returns rows of ``python.backtrace``, one for each Python and native frame of trainers and data loaders."""
        by_key = {i.key: i for i in self._training()}
        threads, _ = self._with_native(by_key, TIMEOUT_S, with_locals=False)
        rows = []
        for thread in threads:
            known = by_key[ProcessKey(thread["pid"], thread["start_ns"])]
            common = {**_with_job(known, thread), "node": self._node, "ts": now_ns}
            common["trains"] = thread["tid"] == known.trains
            for depth, frame in enumerate(thread["frames"]):
                rows.append({**common, **frame, "depth": depth})
        return batch_of("python.backtrace", rows)

    def chosen(self, pids: Sequence[int], job: str) -> list[Identity]:
        """Returns the processes ``pids``, or all trainers and data loaders if ``pids`` is empty.

        If ``job`` is not empty, only processes of this job are returned. Raises NotFound for an unknown job or pid, and
        for a pid of another job.
        """
        if pids:
            named = [self._of_pid(pid) for pid in dict.fromkeys(pids)]
            if other := [who.pid for who in named if job and who.job != job]:
                hint = "`probingctl ps` lists the processes"
                raise NotFound(f"process {other[0]} does not belong to job {job!r}", hint=hint)
            return named
        training = self._training()
        if not job:
            return training
        of_job = [i for i in training if i.job == job]
        if not of_job:
            raise NotFound(
                f"no running process of job {job!r} is known", hint="`probingctl ps` lists jobs and processes"
            )
        return of_job

    def _with_native(
        self, by_key: Mapping[ProcessKey, Identity], timeout: float, *, with_locals: bool
    ) -> tuple[_Threads, list[Failure]]:
        threads, failures = self._stacks.stacks(by_key, timeout, with_locals=with_locals)
        self._add_native(threads, time.monotonic() + max(timeout, NATIVE_TIMEOUT_S))
        return threads, failures

    def _add_native(self, threads: _Threads, deadline: float) -> None:
        """Adds native frames. If the native frames of a process cannot be read, its threads keep their Python frames,
        and get the reason in ``native_missing``.
        """
        by_process = _by_process(threads)

        def add(key: ProcessKey) -> None:
            try:
                self._native.add(*key, by_process[key], max(0.0, deadline - time.monotonic()))
            except ProbingError as e:
                for thread in by_process[key]:
                    thread["native_missing"] = e.message

        list(self._pool.map(add, by_process))

    def _training(self) -> list[Identity]:
        return [i for i in self._known.live() if i.role in ("trainer", "data_loader")]

    def _of_pid(self, pid: int) -> Identity:
        known = next((i for i in self._known.live() if i.pid == pid), None)
        if known is not None:
            return known
        # Any process may be requested, even if it trains nothing.
        process = process_now(pid)
        if process is None:
            raise NotFound(f"there is no process {pid}", hint="`probingctl ps` lists the processes that run now")
        return Identity(pid, process.start_ns, "", "", "other")


def _by_process(threads: _Threads) -> dict[ProcessKey, _Threads]:
    by_process: dict[ProcessKey, _Threads] = {}
    for thread in threads:
        by_process.setdefault(ProcessKey(thread["pid"], thread["start_ns"]), []).append(thread)
    return by_process


def _with_job(identity: Identity, row: Mapping[str, Any]) -> Any:
    return {"job": identity.job, "run": identity.run, "rank": identity.rank, **row}


def _failure(identity: Identity, failure: Failure) -> ReadFailure:
    return {"pid": failure.pid, "rank": identity.rank, "job": identity.job, "error": failure.error.to_dict()}
