"""Writers that are killed: each appends a numbered stream to a store, and counts the acknowledged rows outside itself.

``python store_child.py`` reads orders from stdin, so that a writer starts by a fork and not by half a second of
imports: ``run DIRECTORY ROWS DIE_AT DIE_FROM`` starts a writer of at most so many rows a record, that kills itself at
the DIE_AT-th change of a file counted from its start or from its first record (``open``, ``load``; 0: it lives);
``kill`` kills it; both are answered with a line. The stream is the integers; a record holds those behind the last
position, as a ring would give them.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.tables import TABLES
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.directory_lock import lock_directory
from probing.daemon.store.files import SystemFiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from waiting import until

EVENTS = TABLES["process.events"]
LIMITS = StoreLimits(part_bytes=1 << 16, keep_free_bytes=0, max_age_s=1e9, sync_interval_s=0.01)
# Short: a kill shall come at any instant of a record.
POLL_S = 0.0005
# What a writer tells while it lives: rows acknowledged, records, ns until the store was open, pid.
_PROGRESS = struct.Struct("<qqqq")


def batch(first: int, count: int) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {name: [None] * count for name in EVENTS.physical.names}
    columns["pid"] = list(range(first, first + count))
    columns["ts"] = [1_790_000_000_000_000_000 + i for i in columns["pid"]]
    columns["job"] = [f"job-{i % 50}" for i in columns["pid"]]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[f.name], f.type) for f in EVENTS.physical], schema=EVENTS.physical
    )


class DyingFiles(SystemFiles):
    """A file system that kills the process after ``left`` changes."""

    def __init__(self) -> None:
        self.left = 0

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._count()
        # In two steps, so that a record can be torn.
        return super().write(fd, data[: max(1, len(data) // 2)] if self.left == 1 else data)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def cut(self, path: Path, length: int) -> None:
        self._count()
        super().cut(path, length)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def fsync_dir(self, path: Path) -> None:
        self._count()
        super().fsync_dir(path)


def write(root: Path, rows: int, die_at: int, die_from: str, progress: mmap.mmap) -> None:
    """Appends until the process ends."""
    files = DyingFiles()
    if die_from == "open":
        files.left = die_at
    begin = time.monotonic_ns()
    root.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(root)
    store = Store.open(root, node="n1", limits=LIMITS, files=files)
    opened = time.monotonic_ns() - begin
    done = store.positions.get("ring", {}).get("position", 0)
    records = 0
    _PROGRESS.pack_into(progress, 0, done, records, opened, os.getpid())
    chance = random.Random(done)
    while lock:
        count = chance.randint(1, rows)
        position = {"ring": {"boot_id": "b", "map_id": 1, "position": done + count}}
        store.append({"process.events": [batch(done, count)]}, position)
        done += count
        records += 1
        _PROGRESS.pack_into(progress, 0, done, records, opened, os.getpid())
        if records == 1 and die_from == "load":
            files.left = die_at


def serve(progress: mmap.mmap) -> None:
    """Takes orders from stdin, for one writer at a time."""
    pid = 0
    for line in sys.stdin:
        order, *words = line.split()
        if order == "run":
            pid = os.fork()
            if pid == 0:
                try:
                    write(Path(words[0]), int(words[1]), int(words[2]), words[3], progress)
                finally:
                    os._exit(1)
        elif order == "kill":
            os.kill(pid, signal.SIGKILL)
        if order in ("kill", "wait"):
            _, status = os.waitpid(pid, 0)
            print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, flush=True)


class Writers:
    """Starts writers one at a time, reads what they acknowledged, and kills them."""

    def __init__(self, folder: Path) -> None:
        progress = folder / "progress"
        progress.write_bytes(bytes(mmap.PAGESIZE))
        with open(progress, "r+b") as file:
            self._told = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        command = [sys.executable, __file__, str(progress)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def acknowledged(self) -> int:
        """How many rows were acknowledged; -1 until the store is open."""
        return int(_PROGRESS.unpack_from(self._told)[0])

    @property
    def records(self) -> int:
        return int(_PROGRESS.unpack_from(self._told)[1])

    @property
    def opened_ns(self) -> int:
        """How long the store took to open, s."""
        return int(_PROGRESS.unpack_from(self._told)[2])

    @property
    def pid(self) -> int:
        return int(_PROGRESS.unpack_from(self._told)[3])

    def start(self, root: Path, rows: int, die_at: int = 0, die_from: str = "open") -> None:
        _PROGRESS.pack_into(self._told, 0, -1, 0, 0, 0)
        self._tell(f"run {root} {rows} {die_at} {die_from}")

    def wait_until_open(self) -> None:
        until(lambda: self.acknowledged >= 0, what="a store that is open", poll_s=POLL_S)

    def wait_for_records(self, count: int) -> None:
        until(lambda: self.records >= count, what=f"{count} records", poll_s=POLL_S)

    def kill(self) -> None:
        self._end("kill")

    def wait_until_killed(self) -> None:
        """Waits for a writer that kills itself."""
        self._end("wait")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._told.close()

    def _tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def _end(self, order: str) -> None:
        self._tell(order)
        assert self._process.stdout is not None
        signal_number = int(self._process.stdout.readline())
        if signal_number != signal.SIGKILL:
            raise RuntimeError("the writer ended by itself, not by a kill")


def kill_once(writers: Writers, root: Path, chance: random.Random, records: int) -> int:
    """Starts a writer at ``root`` and kills it at a random instant; returns the rows that it had acknowledged.

    Raises RuntimeError when it ends otherwise, AssertionError when the store does not open in time.
    """
    rows = chance.choice((3, 50, 400))
    how = chance.choice(("records", "records", "load", "open"))
    if how == "records":
        target = chance.randint(0, records)
        writers.start(root, rows)
        writers.wait_until_open()
        writers.wait_for_records(target)
        writers.kill()
    else:
        # A start makes a dozen changes, a record two, a seal a dozen.
        writers.start(root, rows, chance.randint(1, 25 if how == "open" else records * 2), how)
        writers.wait_until_killed()
    return writers.acknowledged


def check(root: Path, acknowledged: int) -> int:
    """Checks that the store at ``root`` has each row of the stream once, to at least ``acknowledged``.

    Appends one row more. Returns the number of rows found. Raises AssertionError.
    """
    with Store.open(root, node="n1", limits=LIMITS, background=False) as store:
        found = sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())
        last = int(store.positions.get("ring", {}).get("position", 0))
        assert found == list(range(last)), f"{len(found)} rows, position {last}"
        assert last >= acknowledged, f"position {last}, acknowledged {acknowledged}"
        assert store.recovery_losses == (), store.recovery_losses
        assert store.status()["state"] == "running", store.status()["reason"]
        position = {"ring": {"boot_id": "b", "map_id": 1, "position": last + 1}}
        store.append({"process.events": [batch(last, 1)]}, position)
    return last + 1


def main() -> None:
    with open(sys.argv[1], "r+b") as file:
        serve(mmap.mmap(file.fileno(), mmap.PAGESIZE))


if __name__ == "__main__":
    main()
