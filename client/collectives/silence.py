"""Explains living ranks that show no operation, by their stacks and by the gaps in which operations were not seen."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from probing.api.errors import PeerError, ProbingError
from probing.api.text import numbers_text
from probing.client.messages import Frame, Thread, thread_of
from probing.client.render.rows import Row, rows_of
from probing.client.zone import clock

if TYPE_CHECKING:
    from probing.api.proto.probing.v1 import node_pb2 as pb
    from probing.client.cluster import Cluster
    from probing.client.wire.node import Node

__all__ = ("MOST_ASKED", "Process", "SilenceWatch", "innermost", "silence_lines", "silent", "waits_in")

Process = tuple[str, int]
# The maximum number of processes whose native stacks are read on one node, and the timeout of that request, s.
MOST_ASKED = 8
NATIVE_S = 6.0
_EVERY_S = 10.0
_LONG_NAME = 80
# How far back the last operation of a process is searched for. If that operation began after the gap, the present wait
# began while operations were seen.
_LOOK_BACK = "1 HOUR"
_STARTS = "SELECT node, pid, start_ns, ts FROM process.events WHERE event = 'start' AND pid IN ({pids})"
# The end of each interval in which operations were not seen: of one process until its library was probed, or of all
# processes during a pause.
_GAPS = """
SELECT node, pid, reason, max(ts_to) AS until FROM probing.losses
WHERE table_name = 'comm.ops' AND count IS NULL AND (pid IN ({pids}) OR pid IS NULL) GROUP BY node, pid, reason
"""
_LAST = f"""
SELECT node, pid, start_ns, max(ts) AS last FROM comm.ops
WHERE ts > now() - INTERVAL {_LOOK_BACK} AND pid IN ({{pids}}) GROUP BY node, pid, start_ns
"""
_UNSEEN = {"gaps": _GAPS, "starts": _STARTS, "last operations": _LAST}


def silent(cluster: Cluster, processes: Sequence[Row]) -> list[Row]:
    """Returns a row for each of ``processes`` (node, job, run, rank, pid, start_ns), at most MOST_ASKED for each node.

    ``waits_in``: the native function in which the process waits; ``python``: the innermost Python frame of its training
    thread; ``native_missing``: why native frames of that thread are missing; ``unseen_until``: operations that began
    before this time were not seen, for the reason ``unseen_why``; ``began_unseen``: the present wait began before
    ``unseen_until``; ``reason``: why there is no stack.
    """
    asked: dict[str, list[Row]] = {}
    for row in processes:
        asked.setdefault(row["node"], []).append(row)
    chosen = [row for own in asked.values() for row in own[:MOST_ASKED]]
    if not chosen:
        return []
    cluster = cluster.of_nodes(asked.keys())
    stacks, reasons = _stacks(cluster, {node: [r["pid"] for r in own[:MOST_ASKED]] for node, own in asked.items()})
    unseen = _unseen(cluster, chosen)
    found = []
    for row in chosen:
        process = row["node"], row["pid"]
        threads = stacks.get(process, [])
        main = next((t for t in threads if t["trains"]), None)
        until, why, last = unseen.get(process, (None, None, None))
        native = waits_in(threads)
        found.append(
            {
                **{name: row[name] for name in ("node", "job", "run", "rank", "pid")},
                "waits_in": native,
                "python": innermost(main["frames"] if main else ()),
                "native_missing": main["native_missing"] if main else None,
                "unseen_until": until,
                "unseen_why": why,
                "began_unseen": until is not None and native is not None and (last is None or last < until),
                "reason": None if threads else reasons.get(process, "no stack could be read"),
            }
        )
    return found


def waits_in(threads: Sequence[Thread]) -> str | None:
    """Returns the call that the threads of a process wait in, such as ``gloo::allreduce`` or ``ncclGroupEnd``; None if
    unknown.
    """
    from probing.diagnosis.facts import Frame as Fact
    from probing.diagnosis.stack_calls import native_wait

    # If there are several calls of one kind, the outermost call of the first thread counts.
    frames = (frame for thread in reversed(threads) for frame in thread["frames"])
    return native_wait(Fact(frame["func"], native=frame["frame_type"] == "Native") for frame in frames)


def innermost(frames: Sequence[Frame]) -> str | None:
    """Returns the innermost Python frame as ``func (file:line)``; None if ``frames`` has no Python frame."""
    frame = next((f for f in frames if f["frame_type"] == "Python"), None)
    if frame is None:
        return None
    func, file = str(frame["func"])[:_LONG_NAME], str(frame["file"]).rsplit("/", 1)[-1][:_LONG_NAME]
    return f"{func} ({file}:{frame['lineno']})" if frame["lineno"] is not None else f"{func} ({file})"


class SilenceWatch:
    """Runs ``silent`` in a thread, at most once in 10 s, for a screen that is redrawn often."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._found: list[Row] = []
        self._thread: threading.Thread | None = None
        self._asked = -math.inf

    def __call__(self, processes: Sequence[Row]) -> list[Row]:
        """Returns the last rows of ``silent`` for ``processes``; calls ``silent`` in a thread if 10 s have passed."""
        now = time.monotonic()
        if processes and now - self._asked > _EVERY_S and (self._thread is None or not self._thread.is_alive()):
            self._asked = now
            self._thread = threading.Thread(target=self._ask, args=(list(processes),), name="silent", daemon=True)
            self._thread.start()
        # Rows with an earlier job name are left out: the name may change, for example once the coordinator is known.
        wanted = {_place(row) for row in processes}
        return [row for row in self._found if _place(row) in wanted]

    def _ask(self, processes: list[Row]) -> None:
        # A node that does not answer is reported by the next frame.
        with suppress(ProbingError):
            self._found = silent(self._cluster, processes)


def _place(row: Row) -> tuple[Any, ...]:
    return row["node"], row["pid"], row["job"], row["run"]


def silence_lines(rows: Sequence[Row], blamed: Container[int]) -> list[str]:
    """Returns lines for the rows of ``silent``; ranks in the same state share a line.

    ``blamed``: ranks whose state a finding has described already.
    """
    same: dict[str, list[Row]] = {}
    for row in rows:
        if row["rank"] not in blamed:
            same.setdefault(_text(row), []).append(row)
    lines = [f"{_ranks(own)}: {text}" for text, own in same.items()]
    gaps: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["unseen_until"] is not None:
            gaps.setdefault((clock(row["unseen_until"]), row["unseen_why"]), []).append(row)
    lines += [f"{_ranks(own)}: operations before {until} are not seen ({why})" for (until, why), own in gaps.items()]
    return lines


def _ranks(rows: Sequence[Row]) -> str:
    ranks = [row["rank"] for row in rows]
    return f"rank{'' if len(ranks) == 1 else 's'} {numbers_text(ranks)}"


def _text(row: Row) -> str:
    if row["reason"] is not None:
        return f"no operation in flight; {row['reason']}"
    python = f", Python in {row['python']}" if row["python"] else ""
    if row["waits_in"] is None:
        missing = f" (training thread: {row['native_missing']})" if row["native_missing"] else ""
        return f"no collective on its stacks{missing}{python}"
    began = f"; began before {clock(row['unseen_until'])}" if row["began_unseen"] else ""
    return f"in {row['waits_in']} (native stack{began}){python}"


def _stacks(cluster: Cluster, pids: dict[str, list[int]]) -> tuple[dict[Process, list[Thread]], dict[Process, str]]:
    """Returns the threads of each process, with native frames; and for each process without threads, the reason."""
    from probing.api.proto.probing.v1 import node_pb2 as pb

    async def ask(node: Node, seconds: float) -> tuple[str, pb.StacksReply | str]:
        name = (await node.status(seconds)).node
        if not pids.get(name):
            # An empty list of pids would mean all processes.
            return name, pb.StacksReply()
        try:
            return name, await node.stacks(pb.StacksRequest(pids=pids[name], native=True), NATIVE_S)
        except ProbingError as e:
            # The other rows about the node are still shown.
            return name, e.message

    stacks: dict[Process, list[Thread]] = {}
    reasons: dict[Process, str] = {}
    gathered = cluster.ask(cluster.addresses(), ask, cluster.timeout)
    if cluster.strict:
        gathered.require(strict=True)
    for answered in gathered.answered:
        reply = answered.value
        if isinstance(reply, str):
            reasons |= {(answered.node, pid): reply for pid in pids.get(answered.node, ())}
            continue
        for thread in reply.threads:
            found = thread_of(reply.node, thread, native=True)
            stacks.setdefault((reply.node, thread.pid), []).append(found)
        for failed in reply.failures:
            reasons[reply.node, failed.pid] = failed.error.message
    return stacks, reasons


def _unseen(cluster: Cluster, rows: Sequence[Row]) -> dict[Process, tuple[str, str, str | None]]:
    """Returns, for each process with a gap, the end and the reason of its newest gap, and the begin of the last
    operation that was seen.
    """
    pids = ", ".join(str(row["pid"]) for row in rows)
    try:
        tables = cluster.query_all({name: sql.format(pids=pids) for name, sql in _UNSEEN.items()})
    except PeerError:
        # The nodes of these processes, or the only node, do not answer any more, so the stacks are missing, too.
        return {}
    gaps, starts, ops = (rows_of(tables[name]) for name in _UNSEEN)
    began = {_key(r): r["ts"] for r in starts}
    last = {_key(r): r["last"] for r in ops}
    by_process: dict[tuple[str, int | None], list[Row]] = {}
    for gap in gaps:
        by_process.setdefault((gap["node"], gap["pid"]), []).append(gap)
    found: dict[Process, tuple[str, str, str | None]] = {}
    for row in rows:
        # A gap without a pid concerns all processes of the node.
        of_row = (gap for pid in (row["pid"], None) for gap in by_process.get((row["node"], pid), ()))
        # Pids are reused: a gap that ended before this process began belongs to an earlier process.
        own = [gap for gap in of_row if gap["until"] > began.get(_key(row), "")]
        if own:
            newest = max(own, key=lambda g: str(g["until"]))
            found[row["node"], row["pid"]] = newest["until"], newest["reason"], last.get(_key(row))
    return found


def _key(row: Row) -> tuple[Any, ...]:
    return row["node"], row["pid"], row["start_ns"]
