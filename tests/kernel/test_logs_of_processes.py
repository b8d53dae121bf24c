"""Lines that real processes write, seen where their libc writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from collectives_support import plain
from fakes import LiveReaders
from waiting import until

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.config import LogsConfig
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.logs.source import OBJECTS, RING, LogSource
from probing.daemon.processes.procfs import parse_stat
from probing.daemon.source import Identity, Loss

# Told by lines of stdin; what it writes goes where the test cannot read it.
PYTHON = """
import os, sys, threading
print("ready", file=sys.stderr, flush=True)
for line in sys.stdin:
    exec(line)
    os.write(int(sys.argv[1]), b".")
"""
NATIVE = r"""
#include <cstdio>
#include <iostream>
#include <string>
#include <unistd.h>
int main(int, char **arguments)
{
	int said = std::stoi(arguments[1]);
	std::string command;

	while (std::getline(std::cin, command)) {
		if (command == "stdio")
			fprintf(stderr, "host:1:2 [0] NCCL %s from stdio\n", "WARN");
		else if (command == "stream")
			std::cerr << "NCCL WARN from a " << "stream" << std::endl;
		else if (command == "long")
			std::cout << std::string(3000, 'x') << " NCCL WARN far behind\n" << std::flush;
		if (write(said, ".", 1) != 1)
			return 1;
	}
}
"""


class Writing:
    """A process that writes to nowhere, and says over a pipe that it has."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        heard, said = os.pipe()
        self.process = subprocess.Popen(
            [*command, str(said)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[said],
        )
        os.close(said)
        self.heard = heard
        self.do("" if str(command[0]) != sys.executable else "pass")

    @property
    def who(self) -> Identity:
        start_ns = parse_stat(Path(f"/proc/{self.process.pid}/stat").read_bytes()).start_ns
        return Identity(self.process.pid, start_ns, "job0", "run", "trainer", 3, 3, 4, 0)

    def do(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert os.read(self.heard, 1) == b"."

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.heard)


class Kept:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.losses: list[Loss] = []

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        assert table == "process.logs"
        self.rows += plain(batch)

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)


class Watching:
    def __init__(self, session: Session, **options: Any) -> None:
        self.session, self.sink, self.on = session, Kept(), True
        self.identities: dict[int, Identity] = {}
        config = LogsConfig(enabled=True, **options)
        self.source = LogSource(
            session, self, LiveReaders(), find_symbols, self.sink, SystemClock(), "node", config, lambda who: self.on
        )  # type: ignore[arg-type]
        self.source.start()

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return self.identities.get(pid)

    def follow(self, writing: Writing) -> None:
        who = writing.who
        self.identities[who.pid] = who
        self.source.process_identified(who)
        until(lambda: self.source.watched == len(self.identities))

    def rows(self) -> list[dict[str, Any]]:
        ring = self.session.rings[RING]
        records, position = ring.drain()
        for batch in self.source.assemble(records, SystemClock().pair()).values():
            self.sink.rows += plain(batch)
        ring.commit(position)
        return self.sink.rows


@pytest.fixture
def watch(open_session: Callable[..., Session]) -> Iterator[Callable[..., Watching]]:
    made: list[Watching] = []

    def make(**options: Any) -> Watching:
        made.append(Watching(open_session(*OBJECTS), **options))
        return made[-1]

    yield make
    for watching in made:
        watching.source.stop()


@pytest.fixture
def python() -> Iterator[Writing]:
    writing = Writing([sys.executable, "-c", PYTHON])
    yield writing
    writing.close()


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Writing]:
    source = tmp_path / "writes.cpp"
    source.write_text(NATIVE)
    subprocess.run(["c++", "-O1", "-o", tmp_path / "writes", source], check=True)
    writing = Writing([tmp_path / "writes"])
    yield writing
    writing.close()


def test_lines_of_python(watch: Callable[..., Watching], python: Writing) -> None:
    watching = watch()
    watching.follow(python)
    before = SystemClock().pair().real_ns
    python.do("print('CUDA out of memory, tried 2 GiB', flush=True); print('all is well', flush=True)")
    python.do("sys.stderr.write('RuntimeError: '); sys.stderr.write('token=hunter2 '); sys.stderr.write('bad\\n')")
    python.do("os.write(2, b'\\x1b[31mNCCL WARN\\x1b[0m \\xff \\x07\\n'); os.write(1, b'ncc'); os.write(1, b'NCCL WA')")
    python.do("os.write(1, b'RN in pieces\\r50%\\r')")
    rows = watching.rows()
    assert [(row["stream"], row["kind"], row["line"]) for row in rows] == [
        ("stdout", "out of memory", "CUDA out of memory, tried 2 GiB"),
        ("stderr", "Error:", "RuntimeError: token=***"),
        ("stderr", "NCCL WARN", "NCCL WARN \ufffd \\x07"),
        ("stdout", "NCCL WARN", "nccNCCL WARN in pieces"),
    ]
    pid = python.process.pid
    assert {(row["pid"], row["tid"], row["job"], row["rank"], row["suppressed"]) for row in rows} == {
        (pid, pid, "job0", 3, 0)
    }
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
    assert all(before <= row["ts"] <= SystemClock().pair().real_ns for row in rows)


RAISES = """
import io, sys
def fetch_shard(n, depth):
    if depth:
        return fetch_shard(n, depth - 1)
    raise type("ShardCorrupt", (Exception,), {"__module__": "data"})(f"shard {n}: /data/shard-{n}.tar")
def hook(*args):
    # As torch's: the whole traceback in one call, a prefix before each line.
    kept, sys.stderr = sys.stderr, io.StringIO()
    old(*args)
    text, sys.stderr = sys.stderr.getvalue(), kept
    sys.stderr.write("\\n".join(f"[rank1]: {s}" if s else "" for s in text.split("\\n")))
    sys.stderr.flush()
old = sys.__excepthook__
try:
    fetch_shard(17, 5)
except Exception:
    hook(*sys.exc_info())
"""


def test_the_exception_below_a_traceback_of_torch(watch: Callable[..., Watching], python: Writing) -> None:
    watching = watch()
    watching.follow(python)
    python.do(f"exec({RAISES!r}, {{}})")
    assert [(row["stream"], row["line"]) for row in watching.rows()] == [
        ("stderr", "[rank1]: Traceback (most recent call last):"),
        ("stderr", "[rank1]: data.ShardCorrupt: shard 17: /data/shard-17.tar"),
    ]


def test_threads_do_not_mix(watch: Callable[..., Watching], python: Writing) -> None:
    watching = watch()
    watching.follow(python)
    python.do("os.write(1, b'NCCL WARN of ')")
    python.do("t = threading.Thread(target=os.write, args=(1, b'RuntimeError: of another\\n')); t.start(); t.join()")
    python.do("os.write(1, b'the first\\n')")
    rows = watching.rows()
    assert sorted(row["line"] for row in rows) == ["NCCL WARN of the first", "RuntimeError: of another"]
    assert len({row["tid"] for row in rows}) == 2


def test_lines_of_stdio_and_streams(watch: Callable[..., Watching], native: Writing) -> None:
    watching = watch(line_bytes=4096)
    watching.follow(native)
    for command in ("stdio", "stream", "long"):
        native.do(command)
    first, second, third = watching.rows()
    assert (first["stream"], first["line"]) == ("stderr", "host:1:2 [0] NCCL WARN from stdio")
    assert (second["stream"], second["line"]) == ("stderr", "NCCL WARN from a stream")
    assert (third["stream"], third["line"]) == ("stdout", "x" * 3000 + " NCCL WARN far behind")


def test_other_processes_are_left_alone(watch: Callable[..., Watching], python: Writing, native: Writing) -> None:
    watching = watch()
    watching.follow(python)
    native.do("stdio")
    python.do("os.posix_spawn('/bin/echo', ['echo', 'NCCL WARN of a child'], {}); os.wait()")
    python.do("pid = os.fork() or (os.write(1, b'NCCL WARN of a fork\\n'), os._exit(0)); os.waitpid(pid, 0)")
    python.do("os.write(1, b'NCCL WARN of its own\\n')")
    assert [row["line"] for row in watching.rows()] == ["NCCL WARN of its own"]
    counters = watching.session.counters()
    # The pipe to the test is written to as well, by a call of its own.
    assert counters["probe:60"]["hits"] == 4
    assert counters[RING] == {"pushed": 1, "lost": 0}


def test_it_ends_when_it_is_switched_off(watch: Callable[..., Watching], python: Writing) -> None:
    watching = watch()
    watching.follow(python)
    watching.on = False
    watching.source.settings_changed()
    until(lambda: watching.source.watched == 0)
    python.do("os.write(1, b'NCCL WARN\\n')")
    assert watching.rows() == []
    assert "probe:60" not in watching.session.counters()
    watching.on = True
    watching.source.settings_changed()
    until(lambda: watching.source.watched == 1)
    python.do("os.write(1, b'NCCL WARN again\\n')")
    assert [row["line"] for row in watching.rows()] == ["NCCL WARN again"]


def test_a_flood_is_held_back_and_counted(watch: Callable[..., Watching], python: Writing) -> None:
    watching = watch(lines_per_s=3)
    watching.follow(python)
    python.do("for i in range(200): os.write(1, b'NCCL WARN %d\\n' % i)")
    python.do("os.write(2, b'RuntimeError: without end')")
    stored = len(watching.rows())
    counted = sum(row["suppressed"] for row in watching.sink.rows)
    python.process.kill()
    python.process.wait()
    watching.source.process_exited(watching.identities[python.process.pid])
    until(lambda: watching.source.watched == 0)
    left_out = sum(loss.count or 0 for loss in watching.sink.losses)
    more = len(watching.sink.rows) - stored
    assert stored + more + counted + left_out + sum(r["suppressed"] for r in watching.sink.rows[stored:]) == 201
    assert {(loss.table, loss.stage) for loss in watching.sink.losses} == {("process.logs", "rate")}
