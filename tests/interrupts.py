"""Ctrl-C in the commands of probingctl: beside a node that answers, one that waits, and one that is silent."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_fake_node import FakeNode, hung_job

COMMANDS = (
    "top --all-nodes",
    "top --interval 100ms",
    "ps",
    "nccl --all-nodes",
    "query 'SELECT * FROM comm.ops'",
    "stacks",
    "query --all-nodes 'SELECT op, count(*) FROM comm.ops GROUP BY op'",
    "profile --seconds 10m",
    "status",
    "logs --follow",
    "vars loss",
    "config",
    "tables",
    "nodes",
    "top --once",
    "profile",
)
PLACES = ("answers", "waits", "silent")
# Opens the screen of `top`, which Ctrl-C leaves with 0.
SCREEN = b"\x1b[?1049h"
_PROGRAM = "import sys; from probing.client.main import main; sys.exit(main())"
_GIVE_UP_S = 20.0


@dataclass(frozen=True, slots=True)
class Left:
    """The end of a command: exit code, seconds since the first Ctrl-C, its output on stderr and the terminal.

    ``before``: it had ended by itself.
    """

    code: int
    seconds: float
    stderr: str
    screen: bytes
    before: bool


class Nodes:
    """Two nodes of a job that hangs, and an address whose listener is silent."""

    def __init__(self, directory: Path) -> None:
        self._nodes = hung_job(directory)
        self._silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._silent.bind(str(directory / "silent.sock"))
        self._silent.listen(64)

    def close(self) -> None:
        for node in self._nodes:
            node.stop()
        self._silent.close()

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[str]:
        """The address of a node that behaves as ``place``."""
        if place == "silent":
            yield f"unix:{self._silent.getsockname()}"
            return
        held = threading.Event()
        for node in self._nodes:
            node.hold = held if place == "waits" else None
        yield self._nodes[0].address
        held.set()
        for node in self._nodes:
            node.hold = None

    @property
    def first(self) -> FakeNode:
        return self._nodes[0]


def interrupted(
    words: Sequence[str], address: str, delay: float = 0.0, again: float | None = None, after: bytes = b""
) -> Left:
    """Runs a command on a terminal and interrupts it ``delay`` s after it began, and once more ``again`` s later.

    It has begun when it watches for Ctrl-C, and ``after`` is on the screen.
    """
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *words, "-t", address], stdin=theirs, stdout=theirs, stderr=errors
        )
        os.close(theirs)
        screen = bytearray()
        reader = threading.Thread(target=_drain, args=(ours, screen))
        reader.start()
        try:
            # It watches with its second thread.
            tasks = Path(f"/proc/{child.pid}/task")
            while child.poll() is None and (after not in screen or len(list(tasks.iterdir())) < 2):
                time.sleep(0.001)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(delay)
            before, begun = child.poll() is not None, time.monotonic()
            child.send_signal(signal.SIGINT)
            if again is not None:
                time.sleep(again)
                child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GIVE_UP_S)
            seconds, hangs = time.monotonic() - begun, child.poll() is None
        finally:
            child.kill()
            code = child.wait()
            reader.join()
            os.close(ours)
        errors.seek(0)
        text = errors.read().decode()
    assert not hangs, f"{words} goes on {seconds:.0f} s after Ctrl-C"
    return Left(code, seconds, text, bytes(screen), before)


def check(words: Sequence[str], left: Left) -> None:
    """What must hold however it went. The time is the caller's to judge."""
    assert "Traceback" not in left.stderr, left.stderr
    assert "Exception" not in left.stderr, left.stderr
    shown = SCREEN in left.screen
    assert left.screen.rfind(SCREEN) <= left.screen.rfind(b"\x1b[?1049l"), (words, left.screen[-200:])
    # It may just have ended by itself, or with an error.
    assert left.before or left.code in ((0,) if shown else (130, 0, 1)), (words, left)


def _drain(handle: int, into: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(handle, 65536):
            into.extend(data)


def delays(generator: random.Random) -> tuple[float, float | None]:
    """After how many seconds to interrupt, and how much later again; None: only once."""
    return generator.uniform(0.0, 1.5), generator.choice([None, None, generator.uniform(0.0, 0.1)])
