"""The daemon under test: its process, and a client that parts ask it with."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

from gpu_kit.patience import patient

__all__ = ("NODE", "Daemon", "DaemonFailed", "Watch")

NODE = "gpu-kit"
# Of the end of the daemon's log in an error, characters.
TAIL = 1_500


class DaemonFailed(Exception):
    """The daemon did not start; the text has the end of its log."""


class Daemon:
    """``probingd run`` with a state directory, a socket and pins of its own, below ``folder``."""

    def __init__(self, bin_folder: Path, folder: Path, options: Sequence[str] = ()) -> None:
        self.bin = bin_folder
        self.socket = folder / "d.sock"
        self.log = folder / "daemon.log"
        self._instance = f"gpu-kit-{os.getpid()}"
        self._argv = [
            *(str(bin_folder / "probingd"), "run", "--state-dir", str(folder / "state")),
            *("--socket", str(self.socket), "--node-name", NODE, "--instance", self._instance, *options),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self, seconds: float) -> None:
        """Waits until it is ready. Raises DaemonFailed."""
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        end = time.monotonic() + patient(seconds)
        while (left := end - time.monotonic()) > 0:
            if select.select([self._process.stdout], [], [], left)[0]:
                line = self._process.stdout.readline()
                if line == "ready\n":
                    return
                if not line:
                    break
        self.stop()
        raise DaemonFailed(self.log.read_text(errors="replace")[-TAIL:].strip() or "it said nothing")

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, seconds: float = 10.0) -> None:
        """Ends the daemon, and removes its pins."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(patient(seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        command = [str(self.bin / "probingd"), "cleanup", "--instance", self._instance]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=patient(seconds))


class Watch:
    """Asks the daemon at ``socket``; ``bin_folder`` has ``probingctl``."""

    def __init__(self, socket: str, bin_folder: str) -> None:
        self._socket, self._bin = socket, bin_folder
        self._cluster: Cluster | None = None

    def __enter__(self) -> Watch:
        from probing.client.cluster import Cluster

        self._cluster = Cluster(f"unix:{self._socket}")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._client.close()

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Returns the rows of a SELECT; select times by ``epoch_ns``, a datetime has no nanoseconds."""
        found: list[dict[str, Any]] = self._client.query(sql).to_pylist()
        return found

    def pause(self, paused: bool) -> None:
        """Stops all probes, as ``probingctl pause`` does, or lets them run again."""
        self._client.pause(paused)

    def set(self, key: str, value: str) -> None:
        """Sets an option of the running daemon."""
        self._client.config(key, value)

    def stacks(self, pid: int) -> list[Any]:
        """Returns the threads of a process with their Python frames, as ``probing.client.messages.Thread``."""
        return list(self._client.stacks([pid]).threads)

    def json(self, *command: str) -> Any:
        """Returns what a command of ``probingctl`` prints with ``-f json``, whatever its exit code."""
        argv = [str(Path(self._bin, "probingctl")), "-t", f"unix:{self._socket}", "-f", "json", *command]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=patient(30))
        if not done.stdout.strip():
            raise RuntimeError(f"probingctl {' '.join(command)}: {done.stderr.strip()[:500]}")
        return json.loads(done.stdout)

    @property
    def _client(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster
