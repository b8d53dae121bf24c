"""The function that a process waits in, by its native frames."""

from __future__ import annotations

import math
from typing import Any

import pytest

from probing.client.collectives.silence import SilenceWatch, innermost, waits_in

RECEIVE = ["pthread_cond_wait", "gloo::transport::tcp::UnboundBuffer::waitRecv(int*)"]
RING = [*RECEIVE, "gloo::(anonymous namespace)::ring(X)", "gloo::(anonymous namespace)::allreduce(X)"]


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        ([[*RING, "c10d::AsyncAllreduceWork::allreduce(X)"]], "gloo::allreduce"),
        (
            [["syscall", "ncclGroupEndInternal(ncclSimInfo*)", "ncclGroupEnd", "c10d::ProcessGroupNCCL::allreduce(X)"]],
            "ncclGroupEnd",
        ),
        ([["poll", "pncclCommInitRankConfig"]], "pncclCommInitRankConfig"),
        ([["recv", "c10d::TCPStore::wait(std::vector<X> const&)"]], "c10d::Store::wait"),
        ([["ioctl", "libcuda.so.1+0x1234", "cuStreamSynchronize", "cudaStreamSynchronize"]], "cudaStreamSynchronize"),
        ([[*RECEIVE, "c10d::RecvWork::wait(X)"]], "gloo::waitRecv"),
        ([["pthread_cond_wait", "c10d::Work::wait(X<Y>)", "PyObject_Vectorcall"]], "c10d::Work::wait"),
        # The most particular thread counts, and idle threads of the libraries do not.
        (
            [["c10d::Work::wait(X)"], ["epoll_wait", "gloo::transport::tcp::Loop::run()"], ["gloo::barrier(X)"]],
            "gloo::barrier",
        ),
        (
            [
                ["pthread_cond_wait", "c10d::ProcessGroupGloo::runLoop(int)"],
                ["clock_nanosleep"],
                ["c10d::ProcessGroupNCCL::Watchdog::runLoop()"],
            ],
            None,
        ),
        ([], None),
    ],
)
def test_what_a_process_waits_in(stacks: list[list[str]], expected: str | None) -> None:
    threads = [{"frames": [{"func": name, "frame_type": "Native"} for name in stack]} for stack in stacks]
    assert waits_in(threads) == expected


def test_the_innermost_python_frame() -> None:
    native = {"func": "poll", "file": "/lib/libc.so.6", "lineno": None, "frame_type": "Native"}
    frame = {"func": "read", "file": "/home/user/data.py", "lineno": 12, "frame_type": "Python"}
    assert innermost([native, frame]) == "read (data.py:12)"
    assert innermost([{**frame, "lineno": None}]) == "read (data.py)"
    assert innermost([{**frame, "func": "x" * 4096}]) == f"{'x' * 80} (data.py:12)"
    assert innermost([native]) is None


def test_a_process_whose_job_has_another_name_now_is_not_the_silent_one() -> None:
    nobody_is_asked: Any = None
    watch = SilenceWatch(nobody_is_asked)
    watch._asked = math.inf
    before = {"node": "a", "pid": 9, "job": "pid:9", "run": "0-x"}
    watch._found = [before]
    assert watch([{**before, "job": "10.0.0.1:29500"}]) == []
    assert watch([before]) == [before]
