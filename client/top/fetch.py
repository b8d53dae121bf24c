"""Asks all nodes for the rows that the screen shows, in a thread. In each refresh a node gets one request with several
SELECTs, limited in time and size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, NamedTuple

from probing.api.errors import ProbingError, QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.collectives.ranks import PHASES
from probing.client.collectives.silence import Process, innermost
from probing.client.diagnosis.endings import ended_sql
from probing.client.diagnosis.findings import OPEN_COLUMNS, ROW_AGE, newest_sql
from probing.client.messages import thread_of
from probing.client.nodes import time_for
from probing.client.render.rows import rows_of
from probing.client.times import Bound, Interval
from probing.client.top.health import Fetched, Health, NodeRows
from probing.client.top.repeat import Repeater
from probing.client.wire.stream import Room
from probing.federation.execution.answer import Failed

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.wire.node import Node

__all__ = (
    "Fetcher",
    "Functions",
    "name_of",
    "questions",
    "statements",
)

# A run that has ended stays on the screen for this many seconds.
_ENDED_S = 600.0
# The maximum number of ranks of one node that are shown.
_MOST_RANKS = 1024
_OF_DEVICES = "gpu.utilization"
_SOMETIMES = 3
_SELDOM = 5
_RARELY = 60
# How far back rows of devices and processes are read, s: _HISTORY_S in the first refreshes, then _LATELY_S. With more
# than _MOST_WITH_HISTORY nodes the long history is not read, because it would take seconds and gigabytes.
_HISTORY_S = 120
_LATELY_S = 15
_MOST_WITH_HISTORY = 64
_MOST_ROWS = 20_000

_RANKS = f"""
SELECT node, job, run, rank, local_rank, world_size, pid, start_ns, state, command FROM process.processes
WHERE role = 'trainer' AND state <> 'exited' AND {{where}} ORDER BY job, run, rank, pid LIMIT {_MOST_RANKS}
"""
_PROGRESS = f"""
SELECT node, job, run, rank, pid, start_ns, comm, comm_size AS size, comm_rank, seq, calls,
  epoch_ns(last_call) AS call_ns, epoch_ns(now()) AS now_ns, epoch_ns(now()) - epoch_ns(attached) AS seen_ns
FROM comm.progress WHERE ended IS NULL AND {{where}} ORDER BY last_call DESC LIMIT {_MOST_ROWS}
"""
_INFLIGHT = f"""
SELECT node, job, run, comm, comm_name, comm_size AS size, comm_rank, rank, pid, op, seq, age_ns FROM comm.inflight
WHERE {{where}} ORDER BY age_ns DESC LIMIT {_MOST_ROWS}
"""
# Rows of the last ten minutes are read, because a row is written when its step ends, and steps may be long.
_STEPS = """
SELECT node, job, run, pid, max(step) AS step, arg_max(1e9 / duration_ns, step) AS steps_per_s,
  epoch_ns(now()) - epoch_ns(max(t_end)) AS step_age_ns
FROM train.steps WHERE ts > now() - INTERVAL 10 MINUTE AND {where} GROUP BY node, job, run, pid
"""
_TABLES = "SELECT table_schema || '.' || table_name AS name FROM probing.table_docs"
_MEMORY = """
SELECT node, pid, start_ns, arg_max(rss_bytes, ts) AS rss_bytes FROM process.memory
WHERE ts > now() - INTERVAL 60 SECOND AND {where} GROUP BY node, pid, start_ns
"""
_CPU = f"""
SELECT node, pid, start_ns, epoch_ns(ts) AS at, cpu_total_pct AS cpu_pct, rss_kb, thread_count,
  CASE WHEN wall_ns > 0 THEN 100.0 * run_delay_ns / wall_ns END AS delay_pct
FROM cpu.utilization
WHERE scope = 'process' AND role = 'trainer' AND ts > now() - INTERVAL {{since}} SECOND AND {{where}}
{{of_process}} ORDER BY ts DESC LIMIT {_MOST_ROWS}
"""
_GPUS = f"""
SELECT node, epoch_ns(ts) AS at, device_id, uuid, mig, name, total_bytes, used_bytes, gpu_util_pct, sm_active_pct,
  temperature_c, power_w, power_limit_w, sm_clock_mhz, clock_event_reasons
FROM gpu.utilization WHERE ts > now() - INTERVAL {{since}} SECOND {{of_device}} ORDER BY ts DESC LIMIT {_MOST_ROWS}
"""
# Keeps only the newest row of each process or device.
_NEWEST = "QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY ts DESC) = 1"
_GPU_PROCESSES = f"""
SELECT node, pid, start_ns, uuid, arg_max(device_id, ts) AS device_id, arg_max(used_bytes, ts) AS used_bytes,
  arg_max(sm_pct, ts) AS sm_pct
FROM gpu.processes WHERE ts > now() - INTERVAL {_LATELY_S} SECOND AND job IS NOT NULL AND {{where}}
GROUP BY node, pid, start_ns, uuid LIMIT {_MOST_ROWS}
"""


class _Question(NamedTuple):
    """A question. ``table``: only nodes that have this table are asked; empty: all nodes. The question is asked once in
    ``every`` refreshes.
    """

    sql: str
    table: str = ""
    every: int = 1


def questions(where: str, *, calm: bool = False) -> dict[str, _Question]:
    """Returns the questions by name; ``where`` is an SQL condition on the job. Their SQL still contains ``{since}``.

    ``calm``: for a view that is open for hours. Findings, progress and operations in flight are asked for in each
    refresh. Rows that change less often are asked for in every third refresh or less often. For CPUs and GPUs, only the
    newest rows are asked for.
    """
    findings = newest_sql(f"ts > now() - INTERVAL 7 DAY AND {where}", OPEN_COLUMNS, ROW_AGE)
    given = {
        "where": where,
        "since": "{since}",
        "of_process": _NEWEST.format(key="node, pid, start_ns") if calm else "",
        "of_device": _NEWEST.format(key="node, uuid") if calm else "",
    }
    often = _SOMETIMES if calm else 1
    return {
        "ranks": _Question(_RANKS.format(**given), every=often),
        "progress": _Question(_PROGRESS.format(**given)),
        "inflight": _Question(_INFLIGHT.format(**given)),
        "steps": _Question(_STEPS.format(**given), every=often),
        # A node that has train.labels also has the column ``phase`` of comm.progress.
        "phases": _Question(PHASES.format(**given), "train.labels", often),
        "findings": _Question(findings, every=1 if calm else _SELDOM),
        "ended": _Question(ended_sql(where, Interval(Bound(_ENDED_S))), every=_SELDOM),
        "tables": _Question(_TABLES, every=_RARELY),
        "memory": _Question(_MEMORY.format(**given), every=_SELDOM),
        "cpu": _Question(_CPU.format(**given), "cpu.utilization", often),
        "gpus": _Question(_GPUS.format(**given), _OF_DEVICES, often),
        "gpu_processes": _Question(_GPU_PROCESSES.format(**given), "gpu.processes", often),
    }


def statements(found: dict[str, _Question], turn: int, tables: Container[str], *, new: bool) -> dict[str, str]:
    """Returns, by name, the SQL that a node is asked in refresh ``turn``; ``tables``: the node's tables, as far as
    known.

    ``new``: rows of CPUs and GPUs of the last 120 s are asked for, else of the last 15 s. Refreshes 0 and 1 together
    ask all questions; later, questions that are asked seldom are spread over the refreshes.
    """
    since = _HISTORY_S if new else _LATELY_S
    return {
        name: question.sql.replace("{since}", str(since))
        for spread, (name, question) in enumerate(found.items())
        if (not question.table or question.table in tables)
        # The tables of a node are known from its first answer on.
        and (turn == 0 or (turn == 1 and question.table) or (turn + spread) % question.every == 0)
    }


_MAX_BYTES = 64 << 20
# Once in this many requests the node is also asked whether its probes are paused.
_STATUS_EVERY = 5
_STACKS_EVERY_S = 2.0
_MOST_STACKS = 64


class Fetcher:
    """Calls ``deliver`` with a ``Fetched`` every ``interval`` seconds, and ``failed`` with an error that does not come
    from a node.
    """

    def __init__(
        self,
        cluster: Cluster,
        where: str,
        interval: float,
        deliver: Callable[[Fetched], None],
        failed: Callable[[ProbingError], None],
        *,
        calm: bool = False,
    ) -> None:
        """``where`` is an SQL condition on the job; the timeout is ``cluster.timeout``, or longer for many nodes.
        ``calm``: as for ``questions``."""
        self._cluster = cluster
        self._questions = questions(where, calm=calm)
        self._deliver = deliver
        self._turns: dict[str, int] = {}
        self._tables: dict[str, frozenset[str]] = {}
        # The nodes whose tables have become known in this refresh.
        self._fresh: set[str] = set()
        self._paused: dict[str, str] = {}
        # Addresses of the nodes that had failed at the start; None: not yet known.
        self._failed: tuple[str, ...] | None = None
        self._with_history = False
        self.repeater = Repeater("fetch", self._refresh, interval, failed)
        self.health = Health(lambda addresses, seconds: cluster.ask(addresses, name_of, seconds), self.repeater.hurry)

    def stop(self) -> None:
        self.repeater.stop()
        self.health.stop()

    def _refresh(self) -> None:
        addresses = self._addresses()
        asked = self.health.present(addresses)
        self._with_history = len(asked) <= _MOST_WITH_HISTORY
        gathered = self._cluster.ask(asked, self._ask, time_for(len(asked), self._cluster.timeout))
        for answered in gathered.answered:
            self.health.answered(answered.address, answered.node)
        if gathered.failed:
            self.health.failed(gathered.failed)
            for failed in gathered.failed:
                # When the node is back, it may run another daemon with other tables, so its count starts again at 0.
                self._turns.pop(failed.address, None)
        self._deliver(Fetched(time.monotonic(), tuple(a.value for a in gathered.answered), self.health.absent))
        if self._fresh:
            # Questions about single tables were not yet asked at these nodes. One more refresh of all nodes follows at
            # once and asks these questions.
            self._fresh.clear()
            self.repeater.hurry()

    def _addresses(self) -> tuple[str, ...]:
        target = self._cluster.target
        try:
            addresses = self._cluster.addresses()
            if self._failed is None:
                # Nodes that had failed at the start stay in the list. They are queried once they have answered the
                # health check.
                self._failed = tuple(failed.address for failed in self._cluster.absent)
                self.health.failed(self._cluster.absent)
            return (*addresses, *self._failed)
        except ProbingError as e:
            # The target is asked for its peers when it answers.
            self.health.failed([Failed(target, "", e)])
            return (target,)

    async def _ask(self, node: Node, seconds: float) -> tuple[str, NodeRows]:
        address = node.address
        turn = self._turns.get(address, 0)
        known = self._tables.get(address, frozenset()) if turn else frozenset()
        asked = statements(self._questions, turn, known, new=turn <= 1 and self._with_history)
        try:
            replies = await node.replies(asked, seconds, Room(_MAX_BYTES))
        except QueryRejected:
            # The token may be limited to jobs. Such a token gives no access to the table of devices.
            if asked.pop("gpus", None) is None:
                raise
            self._tables[address] = known - {_OF_DEVICES}
            replies = await node.replies(asked, seconds, Room(_MAX_BYTES))
        rows = {name: rows_of(reply.table) for name, reply in zip(asked, replies, strict=True)}
        if "tables" in rows:
            self._tables[address] = frozenset(str(row["name"]) for row in rows["tables"])
            if turn == 0:
                self._fresh.add(address)
        if turn % _STATUS_EVERY == 0:
            status = await node.status(seconds)
            self._paused[address] = status.reason.removeprefix("paused") or " " if status.state == "paused" else ""
        self._turns[address] = turn + 1
        name = replies[0].node
        return name, NodeRows(address, name, rows, self._paused.get(address, ""))


async def name_of(node: Node, seconds: float) -> tuple[str, None]:
    """Returns the name of a node."""
    return (await node.status(seconds)).node, None


class Functions:
    """Keeps the innermost Python frame of each process's training thread, read every 2 s.

    A separate thread reads the frames, so that a slow process delays nothing else.
    """

    def __init__(self, fetcher: Fetcher, cluster: Cluster, changed: Callable[[], None]) -> None:
        self.found: dict[Process, str] = {}
        self._cluster = cluster
        self._health = fetcher.health
        self._changed = changed
        self._lock = threading.Lock()
        self._pids: dict[str, tuple[int, ...]] = {}
        self.repeater = Repeater("stacks", self._read, _STACKS_EVERY_S, lambda _: None)

    def watch(self, nodes: Iterable[NodeRows]) -> None:
        """Makes the thread read the trainers of these nodes, at most 64 for each node."""
        with self._lock:
            before = bool(self._pids)
            for node in nodes:
                if "ranks" in node.rows:
                    pids = (row["pid"] for row in node.rows["ranks"][:_MOST_STACKS])
                    self._pids[node.address] = tuple(pids)
            new = bool(self._pids) and not before
        if new:
            self.repeater.hurry()

    def _read(self) -> None:
        with self._lock:
            pids = {address: own for address, own in self._pids.items() if own}
        gathered = self._cluster.ask(
            self._health.present(pids),
            lambda node, seconds: _frames(node, pids[node.address], seconds),
            time_for(len(pids), self._cluster.timeout),
        )
        found = {process: text for answered in gathered.answered for process, text in answered.value.items()}
        # The frames of a node that did not answer are kept.
        read = {answered.node for answered in gathered.answered}
        kept = {process: text for process, text in self.found.items() if process[0] not in read}
        self.found = {**kept, **found}
        self._changed()


async def _frames(node: Node, pids: tuple[int, ...], seconds: float) -> tuple[str, dict[Process, str]]:
    """Returns the name of ``node``, and for each process its innermost Python frame or the reason why it could not be
    read.
    """
    reply = await node.stacks(pb.StacksRequest(pids=pids), seconds)
    frames: dict[Process, str] = {(reply.node, failed.pid): f"({failed.error.message})" for failed in reply.failures}
    for thread in (thread_of(reply.node, thread) for thread in reply.threads):
        if thread["trains"]:
            frames[reply.node, thread["pid"]] = innermost(thread["frames"]) or ""
    return reply.node, frames
