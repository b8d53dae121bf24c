"""Facts of jobs over gRPC: from the collector's rows to the client of Python."""

from __future__ import annotations

import time
from typing import Any

import pytest
from job_members import calling
from query_helpers import logical, operations
from service_helpers import Service

from probing.api.errors import NotFound, PeerError, Unauthenticated
from probing.client.cluster import Cluster
from probing.daemon.cluster import Member
from probing.daemon.diagnose.coordination.peers import Sight, job_mark
from probing.diagnosis.facts_file import from_json

IDENTITY = {"node": "n0", "job": "j", "run": "0", "start_ns": 10_000_000}
FRAME = {"func": "fit", "file": "/a/train.py", "lineno": 7, "frame_type": "Python", "ip": 1, "entry": True}


@pytest.fixture
def service(service: Service) -> Service:
    """With the two ranks of job j; rank 0 waits in an operation."""
    now = time.time_ns()
    row = {**IDENTITY, "ts": now, "role": "trainer", "state": "running", "world_size": 2}
    waits = {**IDENTITY, "ts": now, "pid": 100, "rank": 0, "comm": "default_pg", "comm_rank": 0, "comm_size": 2}
    waits |= {"backend": "gloo", "seq": 13, "op": "all_reduce", "state": "started", "age_ns": 7_000_000_000}
    service.collector.files.live_rows = {
        "process.processes": logical("process.processes", [{**row, "pid": 100 + n, "rank": n} for n in (0, 1)]),
        "comm.inflight": logical("comm.inflight", [waits]),
        "comm.progress": logical("comm.progress", []),
        "gpu.devices": logical("gpu.devices", []),
        "rdma.qps": logical("rdma.qps", []),
        "net.sockets": logical("net.sockets", []),
        "process.envs": logical("process.envs", []),
    }
    at = now - operations(1)[0]["ts"] - 30 * 10**9
    service.collector.files.segment("comm.ops", [{**one, "ts": one["ts"] + at} for one in operations(13)])
    service.collector.threads = [_thread(100, 7), _thread(101, 7)]
    return service


def _thread(pid: int, line: int) -> dict[str, Any]:
    own = {"job": "j", "run": "0", "rank": pid - 100, "pid": pid, "start_ns": 10_000_000, "tid": pid}
    return {
        **own,
        "thread": "MainThread",
        "state": "sleeping",
        "gil": False,
        "complete": True,
        "frames": [{**FRAME, "lineno": line}],
    }


def test_the_facts_of_a_job_reach_the_client(service: Service) -> None:
    with Cluster(f"unix:{service.root}/s.sock") as cluster:
        [(node, [data])] = cluster.facts("j")
    facts = from_json(data)
    assert (node, facts.job, facts.run, facts.world_size) == ("n0", "j", "0", 2)
    first, second = facts.ranks
    assert [(one.seq, one.op) for one in first.open] == [(13, "all_reduce")]
    assert [one.seq for one in first.done] == list(range(13))
    assert second.open == second.done == ()
    [thread] = second.threads
    assert (thread.main, thread.moving, thread.frames[0].func, thread.frames[0].line) == (True, False, "fit", 7)
    # AND what this collector cannot do is missing, and nothing else
    assert {one.kind for one in facts.missing} == {"condition"}
    # THEN native stacks were asked of the ranks, of the one that does not wait first
    native = [request for request in service.collector.requests if request["op"] == "stacks" and request["native"]]
    assert [request["pids"] for request in native] == [[101, 100]]


def test_without_a_job_the_facts_of_all_come(service: Service) -> None:
    with Cluster(f"unix:{service.root}/s.sock") as cluster:
        [(_, found)] = cluster.facts()
        assert [from_json(data).job for data in found] == ["j"]
        service.collector.files.live_rows["process.processes"] = logical("process.processes", [])
        service.collector.files.segments.clear()
        assert cluster.facts() == [("n0", [])]


def test_errors_reach_the_client(service: Service) -> None:
    with Cluster(f"unix:{service.root}/s.sock") as cluster, pytest.raises(NotFound, match="no job x"):
        cluster.facts("x")
    with Cluster(service.tcp) as cluster, pytest.raises(Unauthenticated):
        cluster.facts("j")


def test_a_node_shows_with_whom_its_ranks_are_connected(service: Service) -> None:
    end = {**IDENTITY, "ts": 7, "pid": 100, "role": "trainer", "netns": 1, "state": "open", "seen": 7}
    ends = [("10.0.0.1", "10.0.0.2", "j"), ("10.0.0.1", "10.0.0.3", "j"), ("10.0.0.1", "10.0.0.4", "other")]
    rows = [{**end, "local_address": a, "peer_address": b, "job": job} for a, b, job in ends]
    service.collector.files.live_rows["net.sockets"] = logical("net.sockets", rows)
    address = f"unix:{service.root}/s.sock"
    mark = job_mark("j", "0", living=True)
    with calling("x", [Member(name, address, "healthy", jobs=(mark,)) for name in ("n0", "-")]) as asked:
        assert [one.node for one in asked.holders("j", "0")] == ["n0", "-"]
        shown = Sight(frozenset(("10.0.0.1",)), frozenset(("10.0.0.2", "10.0.0.3")))
        assert asked.sight("n0", "j", "0", 10.0).result(10) == shown
        assert asked.sight("n0", "nothing", "0", 10.0).result(10) == Sight()
        # Who says that it is there, and is not, is not heard.
        with pytest.raises(PeerError, match="- answers as n0"):
            asked.sight("-", "j", "0", 10.0).result(10)
        with pytest.raises(PeerError, match="not known"):
            asked.sight("nobody", "j", "0", 10.0).result(10)
