"""Jobs: ranks that execute commands, a line each, and answer with a line of JSON behind ``@``."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gpu_kit.part import Skip
from gpu_kit.patience import patient

__all__ = ("Answer", "Job", "JobFailed", "free_port")

Answer = dict[str, Any]
# Of the end of a rank's log that an error shows, characters.
TAIL = 600


class JobFailed(Exception):
    """A rank ended, or did not answer in time; the text has the end of its log."""


def free_port() -> int:
    """Returns a TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Job:
    """``size`` ranks of ``command``. Two ranks share a GPU: NCCL from 2.30 allows it by NCCL_MULTI_RANK_GPU_ENABLE, and
    older ones compare GPUs within a host only (init.cc, "Duplicate GPU detected"), so each rank has a host of its own
    by NCCL_HOSTID, and they talk over the loopback.
    """

    def __init__(self, command: Sequence[str], folder: Path, size: int, environ: Mapping[str, str]) -> None:
        self.port = free_port()
        self.size = size
        self.logs = [folder / f"rank{rank}.log" for rank in range(size)]
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_IB_DISABLE": "1",
            "TORCH_FR_BUFFER_SIZE": "20000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000",
            **environ,
        }
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._read = [bytearray() for _ in range(size)]
        for rank, path in enumerate(self.logs):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "NCCL_DOUBLE_TRUTH": str(path.with_suffix(".truth"))}
            own |= {"NCCL_HOSTID": f"gpu-kit-{rank}"} if size > 1 else {}
            with path.open("wb") as log:
                self.ranks.append(
                    subprocess.Popen(
                        list(command),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env={**os.environ, **common, **own},
                    )
                )

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    @property
    def pid(self) -> int:
        return self.ranks[0].pid

    @property
    def name(self) -> str:
        """The end of the name that the daemon knows the job by."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def ready(self, seconds: float = 60.0) -> Job:
        """Waits until all ranks run, and returns the job. Raises Skip where one says that something is missing."""
        for found in self.hear(seconds):
            if "missing" in found:
                raise Skip(found["missing"])
        return self

    def tell(self, command: str, ranks: Sequence[int] | None = None) -> None:
        """Sends a command without waiting for its answer."""
        for rank in self._all(ranks):
            stdin = self.ranks[rank].stdin
            assert stdin is not None
            try:
                stdin.write(command.encode() + b"\n")
                stdin.flush()
            except BrokenPipeError:
                raise self._failed(rank, f"ended before {command!r}") from None

    def hear(self, seconds: float = 30.0, ranks: Sequence[int] | None = None) -> list[Answer]:
        """Returns the next answer of each rank. Raises JobFailed where one does not come."""
        end = time.monotonic() + patient(seconds)
        return [self._answer(rank, end) for rank in self._all(ranks)]

    def do(self, command: str, seconds: float = 30.0, ranks: Sequence[int] | None = None) -> list[Answer]:
        """Sends a command and returns the answers."""
        self.tell(command, ranks)
        return self.hear(seconds, ranks)

    def truth(self, rank: int) -> list[dict[str, Any]]:
        """Returns the lines that a double of NCCL wrote of its calls, in a rehearsal."""
        path = self.logs[rank].with_suffix(".truth")
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def finish(self, seconds: float = 15.0) -> None:
        """Lets the ranks end by themselves, as a job does."""
        self.tell("exit")
        end = time.monotonic() + patient(seconds)
        for rank, process in enumerate(self.ranks):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._failed(rank, "did not end") from None

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except BrokenPipeError:
                        continue

    def _answer(self, rank: int, end: float) -> Answer:
        stdout, read = self.ranks[rank].stdout, self._read[rank]
        assert stdout is not None
        while True:
            while (at := read.find(b"\n")) >= 0:
                line = bytes(read[:at])
                del read[: at + 1]
                # Libraries print as well.
                if line.startswith(b"@"):
                    answer: Answer = json.loads(line[1:])
                    if "error" in answer:
                        raise self._failed(rank, answer["error"])
                    return answer
            left = end - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise self._failed(rank, "did not answer in time")
            part = os.read(stdout.fileno(), 65_536)
            if not part:
                raise self._failed(rank, f"ended with {self.ranks[rank].wait()}")
            read += part

    def _failed(self, rank: int, what: str) -> JobFailed:
        tail = self.logs[rank].read_text(errors="replace")[-TAIL:].strip()
        return JobFailed(f"rank {rank} {what}{': ' if tail else ''}{tail}")

    def _all(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.size) if ranks is None else ranks
