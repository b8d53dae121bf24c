"""Asks a node for all that is known of one rank: its stacks with variables, and its last collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.messages import Thread, thread_of
from probing.client.render.rows import Row, rows_of
from probing.client.top.model import RankKey
from probing.client.wire.loop import wait
from probing.client.wire.stream import Room

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("RankFacts", "ask_rank")

_MAX_BYTES = 4 << 20
_MOST_OPS = 40
_MOST_VARIABLES = 40
_OPS = f"""
SELECT ts, comm, comm_name, comm_size, op, seq, bytes, duration_ns, busbw_gbps, state, error FROM comm.ops
WHERE pid = {{pid}} AND start_ns = {{start_ns}} AND ts > now() - INTERVAL 1 HOUR ORDER BY ts DESC LIMIT {_MOST_OPS}
"""
_WATCHED = f"""
SELECT name, arg_max(value, ts) AS value, max(ts) AS ts FROM python.variables
WHERE pid = {{pid}} AND start_ns = {{start_ns}} AND ts > now() - INTERVAL 1 DAY GROUP BY name ORDER BY name
LIMIT {_MOST_VARIABLES}
"""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """``threads`` with the main thread first; ``reason``: why there is none. ``problem``: why rows are missing."""

    key: RankKey
    threads: tuple[Thread, ...] = ()
    ops: tuple[Row, ...] = ()
    watched: tuple[Row, ...] = ()
    reason: str = ""
    problem: str = ""


def ask_rank(cluster: Cluster, address: str, key: RankKey) -> RankFacts:
    """Returns what the node at ``address`` knows of the process ``key``. What fails is a reason in it, no error."""
    _, pid, start_ns = key
    node = cluster.node(address)
    ops: list[Row] = []
    watched: list[Row] = []
    threads: list[Thread] = []
    reason = problem = ""
    asked = {"ops": _OPS.format(pid=pid, start_ns=start_ns), "variables": _WATCHED.format(pid=pid, start_ns=start_ns)}
    try:
        ops, watched = (rows_of(reply.table) for reply in wait(node.replies(asked, cluster.timeout, Room(_MAX_BYTES))))
    except ProbingError as e:
        problem = e.message
    try:
        threads, reason = _threads(wait(node.stacks(pb.StacksRequest(pids=[pid], locals=True), cluster.timeout)))
    except ProbingError as e:
        reason = e.message
    threads.sort(key=lambda thread: (thread["tid"] != pid, thread["tid"]))
    return RankFacts(key, tuple(threads), tuple(ops), tuple(watched), reason, problem)


def _threads(reply: pb.StacksReply) -> tuple[list[Thread], str]:
    threads = [thread_of(reply.node, thread, local_variables=True) for thread in reply.threads]
    return threads, "; ".join(failed.error.message for failed in reply.failures)
