"""Discovery in one control group: what is outside is not watched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cgroup_support import cpu_group
from processes_helpers import listening, started
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Loss

TRAINER = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]


class Nothing:
    def put(self, table: str, batch: object) -> None: ...

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)


def test_only_processes_of_the_group_are_watched(tmp_path: Path) -> None:
    name = f"watched-{os.getpid()}"
    job = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    ranks = [{**job, "RANK": str(rank)} for rank in range(3)]
    with (
        listening(tmp_path / "reader.sock", "probing.daemon.confined.reader") as listener,
        cpu_group(name, 1.0) as group,
        cpu_group(f"{name}-2", 1.0) as neighbour,
        started(TRAINER, until="ready", env=ranks[0]) as outside,
        started(TRAINER, until="ready", env=ranks[1]) as inside,
        started(TRAINER, until="ready", env=ranks[2]) as beside,
    ):
        (group / "cgroup.procs").write_text(str(inside.pid))
        (neighbour / "cgroup.procs").write_text(str(beside.pid))
        readers = ReaderPool(listener.path)
        watched = Discovery(readers, Nothing(), SystemClock(), "n1", cgroup=f"/{name}", rescan_s=0.2)
        every = Discovery(readers, Nothing(), SystemClock(), "n1", rescan_s=0.2)
        try:
            every.start()
            until(lambda: {outside.pid, inside.pid, beside.pid} <= {who.pid for who in every.live()})
            watched.start()
            assert watched.scanned(20)
            until(lambda: watched.live())
            assert [who.pid for who in watched.live()] == [inside.pid]
        finally:
            watched.stop()
            every.stop()
            readers.close()
