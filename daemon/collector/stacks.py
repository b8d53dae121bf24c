"""Stacks for the control socket: who is meant, read by the readers, told with job and rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import NotFound
from probing.daemon.arrow import batch_of
from probing.daemon.collector.libraries import process_now
from probing.daemon.python_stack.source import Failure
from probing.daemon.source import Identity

__all__ = ("Known", "StackAnswers", "Stacks")

TIMEOUT_S = 1.0


class Known(Protocol):
    """What is asked of ``processes.discovery.Discovery``."""

    def live(self) -> list[Identity]: ...


class Stacks(Protocol):
    def stacks(
        self, targets: Iterable[tuple[int, int]], timeout: float
    ) -> tuple[list[dict[str, Any]], list[Failure]]: ...


class StackAnswers:
    def __init__(self, node: str, known: Known, stacks: Stacks) -> None:
        self._node = node
        self._known = known
        self._stacks = stacks

    def request(self, pids: Sequence[int], job: str, timeout: float) -> dict[str, Any]:
        """``threads`` and ``failures`` as StacksReply has them. Raises NotFound for an unknown job or pid."""
        identities = self._chosen(pids, job)
        by_key = {(i.pid, i.start_ns): i for i in identities}
        threads, failures = self._stacks.stacks(by_key, timeout)
        told = [_thread(by_key[t["pid"], t["start_ns"]], t) for t in threads]
        return {
            "threads": sorted(told, key=lambda t: (t["job"], t["run"], t["rank"] is None, t["rank"], t["pid"])),
            "failures": [_failure(by_key[f.pid, f.start_ns], f) for f in failures],
        }

    def backtrace(self, now_ns: int) -> pa.RecordBatch:
        """``python.backtrace``: a row a frame of all trainers and data loaders."""
        identities = [i for i in self._known.live() if i.role in ("trainer", "data_loader")]
        by_key = {(i.pid, i.start_ns): i for i in identities}
        threads, _ = self._stacks.stacks(by_key, TIMEOUT_S)
        rows = []
        for thread in threads:
            known = by_key[thread["pid"], thread["start_ns"]]
            common = {**_thread(known, thread), "node": self._node, "ts": now_ns}
            for depth, frame in enumerate(thread["frames"]):
                rows.append({**common, **frame, "depth": depth})
        return batch_of("python.backtrace", rows)

    def _chosen(self, pids: Sequence[int], job: str) -> list[Identity]:
        if pids:
            return [self._of_pid(pid) for pid in dict.fromkeys(pids)]
        live = [i for i in self._known.live() if i.role in ("trainer", "data_loader")]
        if not job:
            return live
        chosen = [i for i in live if i.job == job]
        if not chosen:
            raise NotFound(
                f"no running process of job {job!r} is known", hint="`probingctl ps` lists jobs and processes"
            )
        return chosen

    def _of_pid(self, pid: int) -> Identity:
        known = next((i for i in self._known.live() if i.pid == pid), None)
        if known is not None:
            return known
        # Any process may be asked for, also one that trains nothing.
        found = process_now(pid)
        if found is None:
            raise NotFound(f"there is no process {pid}", hint="`probingctl ps` lists the processes that run now")
        return Identity(pid, found.start_ns, "", "", "other")


def _thread(identity: Identity, thread: dict[str, Any]) -> dict[str, Any]:
    return {"job": identity.job, "run": identity.run, "rank": identity.rank, **thread}


def _failure(identity: Identity, failure: Failure) -> dict[str, Any]:
    return {"pid": failure.pid, "rank": identity.rank, "job": identity.job, "error": failure.error.to_dict()}
