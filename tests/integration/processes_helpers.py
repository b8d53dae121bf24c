"""What the tests of processes share: an inetd-like listener, as the supervisor is, and small targets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import waiting

__all__ = ("Listener", "descendants", "listening", "start_ns_of", "started")


class Listener:
    """Starts ``python -m module`` behind ``prefix`` for each connection to ``path``, which is its descriptor 0."""

    def __init__(self, path: Path, module: str, prefix: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> None:
        self.path = str(path)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._command = [*prefix, sys.executable, "-m", module, *arguments]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                self.processes.append(subprocess.Popen(self._command, stdin=client))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
        for process in self.processes:
            process.kill()
            process.wait(10)


@contextmanager
def listening(
    path: Path, module: str, prefix: tuple[str, ...] = (), arguments: tuple[str, ...] = ()
) -> Iterator[Listener]:
    listener = Listener(path, module, prefix, arguments)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def started(arguments: list[str], *, until: str = "", **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child whose output holds a line with ``until``; at the end it and all below it are killed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, **options)

        def said() -> str:
            text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
            if process.poll() is not None and until not in text:
                raise AssertionError(f"the process ended first: {text}")
            return next((line for line in text.splitlines(keepends=True) if until in line and line.endswith("\n")), "")

        try:
            if until:
                process.line = waiting.until(said)  # type: ignore[attr-defined]
            yield process
        finally:
            # torchrun gives its ranks sessions of their own: they are found by descent.
            family = [process.pid, *descendants(process.pid)]
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(10)


def descendants(root: int) -> set[int]:
    """All processes below ``root``."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def start_ns_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) * 10_000_000
