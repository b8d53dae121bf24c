"""A reader as the daemon has it, but in this process: requests go through its own loop. And a parser likewise."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from probing.daemon.confined.reader import serve
from probing.daemon.ipc import Channel, Message
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.snapshot import Snapshot
from probing.daemon.python_stack.walk.walker import Limits, RawThread, Walker

__all__ = ("ServedReaders", "offset_of", "readers", "walked")


class ServedReaders:
    """``processes.reader_pool.ReaderPool`` with one reader."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.asked: list[str] = []

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        with self._lock:
            self.asked.append(op)
            return self._channel.request({"op": op, "pid": pid, "start_ns": start_ns, **args}, timeout=timeout + 30)


@contextmanager
def readers() -> Iterator[ServedReaders]:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(Channel(theirs),), daemon=True)
    thread.start()
    try:
        yield ServedReaders(Channel(ours))
    finally:
        ours.close()
        thread.join(10)
        theirs.close()


def walked(pid: int, runtime: RuntimeInfo, layout: Layout) -> list[RawThread]:
    """The threads, with their frames, of a process that waits."""
    return Walker(Snapshot(ProcessMemory(pid)), layout, Limits(), float("inf")).walk(runtime.runtime)


def offset_of(layout: Layout, code: int, instr: int) -> int:
    """The offset in the code, as the kernel's sampler records it."""
    if layout.code_adaptive is not None:
        return instr - (code + layout.code_adaptive)
    return instr * 2 if layout.instr == "lasti_units" else instr
