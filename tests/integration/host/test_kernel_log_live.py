"""process.kmsg of the real kernel log: a line of a program, and a real kill for lack of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroup_support import memory_group
from fakes import Sink
from processes_helpers import start_ns_of
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.host.kernel_log.source import KernelLogSource
from probing.daemon.source import Identity

KMSG = Path("/dev/kmsg")
# Joins its group on request, and then wants more than the group has.
GREEDY = """
import sys
sys.stdin.readline()
kept = [bytearray(b"x" * (1 << 20)) for _ in range(400)]
"""


class Watch:
    def __init__(self) -> None:
        self.rows = Sink()
        self.source = KernelLogSource(str(KMSG), self.rows, SystemClock(), "n1")

    def find(self, **wanted: object) -> dict[str, object]:
        self.source.tick()
        rows = self.rows.take("process.kmsg")
        return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), {})


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    made.source.tick()
    made.rows.take("process.kmsg")
    yield made
    made.source.stop()


def test_a_line_of_a_program_is_of_no_kind(watch: Watch) -> None:
    before, text = time.time_ns(), f"probingd test {os.getpid()}: NVRM: Xid (PCI:0000:3b:00): 79"
    # Without its end a line can be continued, and is not shown yet.
    KMSG.write_text(f"<13>{text}\n")
    row = until(lambda: watch.find(message=text), what="the line")
    assert (row["facility"], row["level"], row["kind"]) == ("user", "notice", "other")
    assert before - 1_000_000_000 <= int(str(row["ts"])) <= time.time_ns()


def test_a_kill_for_lack_of_memory_names_the_rank(watch: Watch) -> None:
    with (
        memory_group(f"probing-kmsg-{os.getpid()}", 40 << 20) as group,
        subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE) as process,
    ):
        (group / "cgroup.procs").write_text(str(process.pid))
        watch.source.process_identified(Identity(process.pid, start_ns_of(process.pid), "j", "r", "trainer", 3))
        process.communicate(b"\n")
        assert process.returncode == -signal.SIGKILL
    row = until(lambda: watch.find(kind="oom_kill", pid=process.pid), what="the line of the kill")
    assert (row["job"], row["rank"], row["facility"]) == ("j", 3, "kern")
