"""Servers that have no requests, in each way to wait for one; and ranks that are stuck beside such a wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import ago, facts, frame, history, in_collective, op, rank, thread

from probing.diagnosis.facts import Condition, Facts, Rank, Thread
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, NOTE

LIB = "/usr/lib/python3.11"
SITE = f"{LIB}/site-packages"
LISTENS: dict[str, Any] = {"target": "socket:[4711] tcp 0.0.0.0:8000", "target_kind": "listener"}
ACCEPTS: dict[str, Any] = {"syscall": "accept4", **LISTENS}
POLLS: dict[str, Any] = {"syscall": "poll", "target": "anon_inode:[eventfd]", "target_kind": "other"}
FUTEX: dict[str, Any] = {"syscall": "futex", "wchan": "futex_do_wait"}
QUEUE = (f"get {LIB}/queue.py:171", "next_request serve.py:23")
ON = "on tcp 0.0.0.0:8000"


def receiver(*frames: str, **fields: Any) -> Thread:
    return thread(*frames, main=False, tid=105, name="receiver", **fields)


# What the main thread waits for, its stack, its condition, and another thread.
WAITS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Thread | None]] = {
    "accept": (ON, (f"accept {LIB}/socket.py:294", "next_request serve.py:23"), ACCEPTS, None),
    "epoll": (ON, (f"select {LIB}/selectors.py:468", "serve serve.py:23"), {"syscall": "epoll_wait", **LISTENS}, None),
    "asyncio": (
        ON,
        (f"select {LIB}/selectors.py:468", f"_run_once {LIB}/asyncio/base_events.py:1898", "main serve.py:23"),
        {"syscall": "epoll_wait", **LISTENS},
        None,
    ),
    "uvicorn": (
        ON,
        (frame("uv__io_poll", native=True), f"run {SITE}/uvicorn/server.py:65", "main serve.py:23"),
        {"syscall": "epoll_pwait", **LISTENS},
        None,
    ),
    "zmq poll": (
        "for messages of ZeroMQ",
        (f"poll {SITE}/zmq/sugar/poll.py:106", "next_request serve.py:23"),
        POLLS,
        None,
    ),
    "zmq recv": (
        "for messages of ZeroMQ",
        (frame("poll", native=True), frame("zmq_msg_recv", native=True), "next_request serve.py:23"),
        POLLS,
        None,
    ),
    "queue": (
        f"in a queue for requests {ON}",
        QUEUE,
        FUTEX,
        receiver(f"accept {LIB}/socket.py:294", "listen serve.py:7", state="S", **ACCEPTS),
    ),
    "queue of ZeroMQ": (
        "in a queue for requests of ZeroMQ",
        QUEUE,
        FUTEX,
        receiver(f"poll {SITE}/zmq/sugar/poll.py:106", "listen serve.py:7", state="S", **POLLS),
    ),
    "ring": (
        "in a ring of shared memory",
        (f"acquire_read {SITE}/vllm/distributed/device_communicators/shm_broadcast.py:864", "busy_loop worker.py:23"),
        {"syscall": "sched_yield", "state": "R", "cpu_ns": 9 * 10**8, "switches": 10**5, "asleep_since_ns": None},
        None,
    ),
}


def server(number: int, wait: str, *calls: Any) -> Rank:
    """Returns a rank that waits for requests."""
    _, frames, condition, other = WAITS[wait]
    still = {"state": "S", "interval_ns": 10**9, "cpu_ns": 0, "switches": 0, "asleep_since_ns": ago(39)}
    threads = (thread(*frames, moving=wait == "ring"), *((other,) if other is not None else ()))
    return rank(number, *history(6, ago=40), *calls, threads=threads, condition=Condition(**{**still, **condition}))


def waiting(number: int) -> Rank:
    return rank(number, *history(6, ago=40), op(7, "broadcast", ago=39), stack=in_collective("broadcast"))


def stuck(number: int) -> Rank:
    still = Condition(state="S", syscall="clock_nanosleep", interval_ns=10**9, cpu_ns=0, asleep_since_ns=ago(39))
    return rank(number, *history(6, ago=40), stack=thread("reload serve.py:40"), condition=still)


def findings(found: Facts) -> list[tuple[str, str, list[int], tuple[int, ...]]]:
    diagnosis = diagnose(found)
    assert not [missing for missing in diagnosis.missing if missing.kind == "rule"]
    return [(f.verdict.id, f.severity, [c.rank for c in f.culprits], f.victims) for f in diagnosis.findings]


@pytest.mark.parametrize("wait", WAITS)
def test_ranks_that_wait_for_the_one_that_receives_requests_are_idle(wait: str) -> None:
    whole = facts(server(0, wait), waiting(1), waiting(2))
    assert findings(whole) == [("idle", NOTE, [0], (1, 2))]
    (finding,) = diagnose(whole).findings
    assert WAITS[wait][0] in finding.sentence
    assert "ranks 1-2 wait for that in broadcast seq 7" in finding.sentence


@pytest.mark.parametrize("wait", WAITS)
def test_an_idle_server_is_a_note(wait: str) -> None:
    assert findings(facts(server(0, wait), server(1, wait))) == [("idle", NOTE, [0, 1], ())]


@pytest.mark.parametrize("wait", WAITS)
def test_the_rank_that_is_stuck_beside_idle_ones_is_named(wait: str) -> None:
    assert findings(facts(server(0, wait), stuck(1), server(2, wait))) == [("stuck_outside", ERROR, [1], (0, 2))]
    assert findings(facts(server(0, wait), stuck(1), waiting(2))) == [("not_joined", ERROR, [1], (2,))]


@pytest.mark.parametrize(
    "monitor", ["/site-packages/prometheus_client/exposition.py", "/lib/python3.11/http/server.py"]
)
def test_a_queue_beside_a_server_of_metrics_is_no_idle_server(monitor: str) -> None:
    metrics = receiver(f"select {LIB}/selectors.py:415", f"serve_forever {monitor}:23", state="S", **LISTENS)
    one = server(0, "queue")
    one = replace(one, threads=(one.threads[0], metrics))
    assert findings(facts(one, waiting(1), waiting(2))) == [("not_joined", ERROR, [0], (1, 2))]


def test_a_socket_that_torch_listens_on_is_no_source_of_requests() -> None:
    store = receiver(state="S", **LISTENS)
    one = server(0, "queue")
    one = replace(one, threads=(one.threads[0], store))
    assert findings(facts(one, waiting(1), waiting(2))) == [("not_joined", ERROR, [0], (1, 2))]
