"""Asks a node for everything about one rank, and draws the rank's page: its stack, variables, last collectives and
devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import bandwidth, size
from probing.client.messages import Frame, Thread, Variable, thread_of
from probing.client.render.rows import Row, rows_of
from probing.client.stacks.text import frame_text
from probing.client.top.figures import Line, Span, brief_age, fitted
from probing.client.top.model import RankKey
from probing.client.top.pane import filled, pane
from probing.client.wire.loop import wait
from probing.client.wire.stream import Room
from probing.client.zone import clock

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = (
    "RankFacts",
    "ask_rank",
    "rank_page",
)

_MAX_BYTES = 4 << 20
_MOST_OPS = 40
_MOST_READ = 40
_OPS = f"""
SELECT ts, comm, comm_name, comm_size, op, seq, bytes, duration_ns, busbw_gbps, state, error FROM comm.ops
WHERE pid = {{pid}} AND start_ns = {{start_ns}} AND ts > now() - INTERVAL 1 HOUR ORDER BY ts DESC LIMIT {_MOST_OPS}
"""
_WATCHED = f"""
SELECT name, arg_max(value, ts) AS value, max(ts) AS ts FROM python.variables
WHERE pid = {{pid}} AND start_ns = {{start_ns}} AND ts > now() - INTERVAL 1 DAY GROUP BY name ORDER BY name
LIMIT {_MOST_READ}
"""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts about one rank. ``threads``: the main thread first; ``reason``: why there are no threads. ``problem``:
    why rows are missing.
    """

    key: RankKey
    threads: tuple[Thread, ...] = ()
    ops: tuple[Row, ...] = ()
    watched: tuple[Row, ...] = ()
    reason: str = ""
    problem: str = ""


def ask_rank(cluster: Cluster, address: str, key: RankKey) -> RankFacts:
    """Returns the facts that the node at ``address`` has about the process ``key``. After a failure, ``reason`` or
    ``problem`` says why facts are missing.
    """
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


_MOST_GPUS = 16
_FRAMES_WITH_VARIABLES = 3
_MOST_VARIABLES = 12
_MOST_THREADS = 32


def rank_page(
    row: Row | None, facts: RankFacts | None, scroll: int, width: int, height: int
) -> tuple[tuple[Line, ...], int]:
    """Returns the lines of the page, and ``scroll`` limited to the length of the page.

    ``row`` is None if the rank is gone; ``facts`` is None until the node has answered.
    """
    title = "the process has ended" if row is None else f"job {row['job']}  run {row['run']}"
    above: list[Line] = [(Span(fitted(f" rank page  {title}", width), "title"),)]
    above += [] if row is None else pane(row, width, _MOST_GPUS if height > 40 else 2)
    keys = "Esc back  j/k scroll  p pause  q quit"
    below: list[Line] = [(Span(fitted(keys, width), "keys"),)]
    body = list(_body(facts, width, height))
    room = max(1, height - len(above) - len(below))
    first = max(0, min(scroll, len(body) - room))
    shown = body[first : first + room]
    return filled([*above, *shown, *([()] * (room - len(shown))), *below], width, height), first


def _body(facts: RankFacts | None, width: int, height: int) -> Iterator[Line]:
    if facts is None:
        yield (Span("  asking ...", "dim"),)
        return
    main = facts.threads[:1]
    yield _heading("STACK", main[0]["thread"] if main else "")
    if not main:
        yield (Span(f"  {facts.reason or 'no stack could be read'}", "warn"),)
    for thread in main:
        yield from _stack(thread)
    yield _heading("LAST COLLECTIVES", facts.problem)
    yield from _operations(facts, width, max(5, height // 4))
    yield _heading("VARIABLES", "")
    yield from _variables(facts)
    if len(facts.threads) > 1:
        yield _heading("OTHER THREADS", "")
        for thread in facts.threads[1:_MOST_THREADS]:
            inner = _frame(thread["frames"][0]) if thread["frames"] else "no frame"
            yield (Span(f"  {thread['thread']} ({thread['state']})  ", ""), Span(inner, "dim"))


def _heading(title: str, text: str) -> Line:
    return (Span(title, "head"), Span(f"  {text}", "dim"))


def _stack(thread: Thread) -> Iterator[Line]:
    if not thread["complete"]:
        yield (Span("  incomplete", "warn"),)
    for i, frame in enumerate(thread["frames"]):
        yield (Span("  "), Span(_frame(frame), "bold" if i == 0 else ""))
    if not thread["frames"]:
        yield (Span("  no Python frame", "dim"),)


def _frame(frame: Frame) -> str:
    return frame_text(frame["func"], frame["file"], frame["lineno"], frame["frame_type"])


def _operations(facts: RankFacts, width: int, most: int) -> Iterator[Line]:
    if not facts.ops:
        yield (Span("  none in the last hour", "dim"),)
        return
    yield (Span(f"  {'TIME':<9}  {'OPERATION':<18}  {'SEQ':>8}  {'BYTES':>8}  {'TOOK':>7}  {'BUS':>10}  STATE", "dim"),)
    for row in facts.ops[:most]:
        bus = bandwidth(row["busbw_gbps"]) if row["busbw_gbps"] is not None else ""
        seq = "" if row["seq"] is None else str(row["seq"])
        text = (
            f"  {clock(row['ts'])[-9:]}  {fitted(str(row['op']), 18)}  {seq:>8}  {size(row['bytes']):>8}"
            f"  {brief_age(row['duration_ns']):>7}  {bus:>10}  "
        )
        state = row["error"] or row["state"] or ""
        comm = f"  {row['comm_name'] or row['comm'] or ''}" if width >= 100 else ""
        yield (Span(text), Span(str(state), "bad" if row["error"] else "dim"), Span(comm, "dim"))


def _variables(facts: RankFacts) -> Iterator[Line]:
    shown = False
    for row in facts.watched:
        shown = True
        yield (
            Span(f"  {row['name']}", "bold"),
            Span(f" = {row['value']}"),
            Span(f"  watched, {clock(row['ts'])}", "dim"),
        )
    for frame in facts.threads[0]["frames"][:_FRAMES_WITH_VARIABLES] if facts.threads else ():
        variables = frame.get("locals", [])
        if variables:
            shown = True
            yield (Span(f"  in {frame['func']}", "dim"),)
        for variable in variables[:_MOST_VARIABLES]:
            yield (Span(f"    {variable['name']}", "bold"), Span(f" = {_value(variable)}"))
        if len(variables) > _MOST_VARIABLES:
            yield (Span(f"    and {len(variables) - _MOST_VARIABLES} more", "dim"),)
    if not shown:
        yield (Span("  none could be read", "dim"),)


def _value(variable: Variable) -> str:
    if variable["value"] is None:
        return f"({variable['reason'] or 'not known'})"
    return f"{variable['value']}  {variable['type']}"
