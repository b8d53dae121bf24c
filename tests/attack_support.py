"""A worker that is attacked, and what can be seen of it from outside: its memory, its descriptors, and files."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from probing.daemon.arrow import batch_of
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout
from probing.daemon.store import Store
from probing.daemon.store.segments.files import segment_path

# A worker that was given up is gone after this: a kill, not a speed.
GONE_S = 10.0
READY_S = 60.0
MAX_ANSWER = 64 << 20
_OF_THE_MACHINE = ("/sys/fs/cgroup/", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu/")


class _Watched:
    """Tells whether anything in directories is opened, read, made or changed, by inotify (inotify(7))."""

    _OPEN, _ACCESS, _MODIFY, _ATTRIB, _CREATE, _DELETE, _MOVED = 0x20, 0x1, 0x2, 0x4, 0x100, 0x200, 0xC0
    _EVENT = struct.Struct("iIII")

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = self._OPEN | self._ACCESS | self._MODIFY | self._ATTRIB | self._CREATE | self._DELETE | self._MOVED
        for folder in folders:
            if libc.inotify_add_watch(self._fd, os.fsencode(folder), mask) < 0:
                raise OSError(ctypes.get_errno(), f"inotify: {folder}")

    def events(self) -> list[tuple[str, int]]:
        """Names and kinds, since the last call."""
        found: list[tuple[str, int]] = []
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return found
        at = 0
        while at < len(data):
            _, mask, _, length = self._EVENT.unpack_from(data, at)
            name = data[at + self._EVENT.size : at + self._EVENT.size + length]
            found.append((name.rstrip(b"\0").decode(), mask))
            at += self._EVENT.size + length
        return found

    def close(self) -> None:
        os.close(self._fd)


class Place:
    """Under ``root``: ``state``, which workers may read, with a segment of ``rows`` of comm.ops, and ``outside``; both
    have files that nobody may open."""

    def __init__(self, root: Path, rows: Sequence[Mapping[str, object]]) -> None:
        self.root, self.state, self.outside = root, root / "state", root / "outside"
        for folder in (self.state, self.outside):
            folder.mkdir()
            for name in ("secret", "secret.csv", "x.parquet"):
                (folder / name).write_text("42\n")
        self.segment = self.state / segment_path("comm.ops", "2026-09-21", (1, 1))
        self.segment.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_batches([batch_of("comm.ops", rows)]), self.segment)
        self._watched = _Watched(self.state, self.outside)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._watched.close()

    def of(self, attack: str) -> str:
        """The text of an attack here."""
        return attack.replace("{state}", str(self.state)).replace("{outside}", str(self.outside))

    def events(self) -> list[tuple[str, int]]:
        """What was opened, read, made or changed in both since the last call: names, and inotify's masks."""
        return self._watched.events()


class Victim:
    """A worker of ``memory_bytes`` at a place."""

    def __init__(self, place: Place, memory_bytes: int) -> None:
        self._segment = str(place.segment)
        self.last = False
        ours, theirs = socket.socketpair()
        options = [f"--state_dir={place.state}", f"--query.memory_bytes={memory_bytes}"]
        argv = [sys.executable, "-m", "probing.daemon.confined.sql_worker", *options]
        self.process = subprocess.Popen(argv, stdin=theirs, cwd="/")
        theirs.close()
        self._channel = Channel(ours)
        assert self.ask("SELECT 1", READY_S) == "end"
        self._rest = self.resident()
        self._descriptors = self._open()

    def ask(self, sql: str, seconds: float) -> str:
        """How it ended: ``end``, the kind of an error, ``deadline``, or ``gone``: the worker died."""
        spec = {"statements": [sql], "segments": {"comm.ops": [self._segment]}, "parts": [], "max_bytes": MAX_ANSWER}
        text = json.dumps(spec).encode()
        deadline = time.monotonic() + seconds
        try:
            self._channel.send({"op": "query", "spec_bytes": len(text), "live": []}, text)
            how = "end"
            while True:
                header = self._channel.receive(max(deadline - time.monotonic(), 0.001)).header
                # An error of the statement, or of the whole request.
                if error := header.get("statement", header).get("error"):
                    how = str(error["kind"])
                if "end" in header or "error" in header:
                    self.last = bool(header.get("last"))
                    return how
        except ChannelTimeout:
            return "deadline"
        except ChannelClosed:
            return "gone"

    def grown(self) -> int:
        """The largest growth of its resident memory since the first attack, bytes."""
        return self.resident() - self._rest

    def resident(self) -> int:
        """The most bytes of resident memory that it ever had, all of it: libraries as well."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def opened(self) -> set[str]:
        """What it has open and had not before the first attack, but for what DuckDB asks of the machine."""
        # Each database that DuckDB makes looks for the limits of its own cgroup.
        usual = (*_OF_THE_MACHINE, f"/proc/{self.process.pid}/cgroup")
        return {name for name in self._open() - self._descriptors if not name.startswith(usual)}

    def close(self) -> None:
        """Give it up, as one does at a deadline. Raises subprocess.TimeoutExpired when it stays."""
        self._channel.close()
        try:
            self.process.wait(GONE_S)
        finally:
            self.process.kill()

    def _open(self) -> set[str]:
        folder = Path(f"/proc/{self.process.pid}/fd")
        found = set()
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(str(entry.readlink()))
        return found


class Collection:
    """A store to which a thread appends rows, as the collector does, as long as the context lasts."""

    def __init__(self, root: Path, rows: Sequence[Mapping[str, object]]) -> None:
        self._store = Store.open(root, node="n0")
        self._batch = batch_of("comm.ops", rows)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._append)
        self.appended = 0

    def __enter__(self) -> Collection:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._store.close()

    def stored(self) -> int:
        """Rows that the store has; to be asked for when nothing is appended any more."""
        self._stop.set()
        self._thread.join()
        return self._store.rows("comm.ops", ["seq"]).num_rows

    def _append(self) -> None:
        while not self._stop.wait(0.01):
            self._store.append({"comm.ops": [self._batch]}, {})
            self.appended += self._batch.num_rows
