"""Starts and ends of processes, as the kernel reports them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FORK, EXEC, EXIT = 1, 2, 3
SOURCE = r"""
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_barrier_t barrier;

static void *end_together(void *unused)
{
	pthread_barrier_wait(&barrier);
	return unused;
}

int main(int argc, char **argv)
{
	int threads = atoi(argv[1]), status = atoi(argv[2]);
	pthread_t thread;

	pthread_barrier_init(&barrier, 0, threads + 1);
	for (int i = 0; i < threads; i++)
		pthread_create(&thread, 0, end_together, 0);
	pthread_barrier_wait(&barrier);
	if (status >= 0)
		exit(status);
	pthread_exit(0);
}
"""


@pytest.fixture(scope="module")
def threads_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    (folder / "threads.c").write_text(SOURCE)
    subprocess.run(["cc", "-pthread", "-o", folder / "threads", folder / "threads.c"], check=True)
    return folder / "threads"


class Events:
    """All lifecycle records of some processes."""

    def __init__(self, session: Any, until: Callable[..., object]) -> None:
        self._ring = session.rings["lifecycle"]
        self._until = until
        self._parts: list[np.ndarray[Any, Any]] = []

    def of(self, pid: int) -> np.ndarray[Any, Any]:
        drained = self._ring.drain()
        self._ring.commit(drained.position)
        self._parts.append(drained.records)
        every = np.concatenate(self._parts)
        return every[every["tgid"] == pid]

    def complete(self, pid: int) -> np.ndarray[Any, Any]:
        """Once its end is reported; a process can be waited for before its last thread has ended."""
        self._until(lambda: EXIT in self.of(pid)["type"])
        return self.of(pid)


@pytest.fixture
def events(open_session: Callable[..., Any], until: Callable[..., object]) -> Events:
    return Events(open_session("lifecycle"), until)


@pytest.fixture
def fallback() -> bool:
    """Tracepoints have one road."""
    return False


def test_each_process_starts_once_and_ends_once(events: Events, threads_path: Path) -> None:
    for count, status in ((23, 7), (7, 0), (5, 255)):
        process = subprocess.Popen([threads_path, str(count), str(status)])
        start_ns = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]) * 10_000_000
        assert process.wait(20) == status
        found = events.complete(process.pid)
        assert found["type"].tolist() == [FORK, EXEC, EXIT]
        assert found["start_ns"].tolist() == [start_ns] * 3
        assert found["exit_code"].tolist() == [0, 0, status << 8]
        assert found["comm"][1:].tolist() == [b"threads"] * 2
        assert found["ppid"][0] == os.getpid()
        assert (np.diff(found["ktime"].astype("i8")) >= 0).all()


def test_threads_that_end_together_are_one_end(events: Events, threads_path: Path) -> None:
    pids = []
    for _ in range(43):
        process = subprocess.Popen([threads_path, "13", "-1"])
        assert process.wait(20) == 0
        pids.append(process.pid)
    for pid in pids:
        assert events.complete(pid)["type"].tolist() == [FORK, EXEC, EXIT]


def test_signal_is_in_the_exit_code(events: Events) -> None:
    process = subprocess.Popen(["sleep", "600"])
    events_before = process.pid
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    assert events.complete(events_before)["exit_code"][-1] == signal.SIGKILL


def test_fork_without_exec(events: Events) -> None:
    script = "import os; pid = os.fork(); pid or os._exit(23); os.waitpid(pid, 0); print(pid)"
    done = subprocess.run(["python3", "-c", script], capture_output=True, text=True, check=True)
    found = events.complete(int(done.stdout))
    assert found["type"].tolist() == [FORK, EXIT]
    assert found["exit_code"][-1] == 23 << 8
