"""The parser: the process without rights that parses files of targets.

It gets files as descriptors. Before it reads the first file, it limits its memory and CPU time, gives up the right to
gain privileges, and by Landlock limits itself to the interpreter's files. It handles one request at a time, with a
limit of CPU time for each, and can be killed at any time. Its requests, and the answers or the modules that define
them:

* ``ping``: header ``pid`` of the parser.
* ``symbols`` (``patterns``, and one descriptor): payload, JSON, ``found``: ``elf.symbols.FileSymbols``, with the
  ``head`` of a symbol in base64.
* ``unwind``: ``python_stack.native.unwind``.
* ``flight_dump``: ``nccl_uprobes.flight_recorder.dump``.
* ``ras_report``: ``nccl_uprobes.ras.json_report``.
* ``nccl_layout``: ``nccl_uprobes.layouts.from_dwarf``.
* ``rdma_qps``, ``interface_addresses``: ``net.rdma.nldev`` and ``net.interfaces.addresses``, over a netlink socket.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from binascii import b2a_base64
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType

# Otherwise OpenBLAS, numpy's maths library, would reserve address space for the stack of a thread on each core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from probing.api.errors import ProbingError, UnsupportedTarget, UsageError
from probing.daemon.confined.sandbox import confine, limit
from probing.daemon.confined.serving import inherit, internal_error, serve
from probing.daemon.elf.file import Elf
from probing.daemon.elf.symbols import matching_symbols
from probing.daemon.ipc import Message

__all__ = ("main",)

MEMORY_BYTES = 3 << 30
# The limit of CPU time of the process, s. At the limit the kernel ends the process, and the pool starts another
# process.
CPU_SECONDS = 600
# The limits of CPU time of a request, s: LIBRARY_CPU_S for requests about a library, which need at most 0.2 s in
# practice, and REQUEST_CPU_S for all other requests. SIGPROF repeats every _AGAIN_S, because code that catches all
# exceptions would go on after the first signal.
REQUEST_CPU_S = 10.0
LIBRARY_CPU_S = 3.0
_AGAIN_S = 0.1
MAX_PATTERNS = 1_024


def main() -> int:
    """Serves the connection at descriptor 0 until it closes."""
    channel = inherit(_give_up_rights)
    signal.signal(signal.SIGPROF, _too_long)
    serve(channel, _answer, _error_of)
    return 0


def _give_up_rights() -> None:
    limit(MEMORY_BYTES, CPU_SECONDS)
    confine(())


def _error_of(e: Exception) -> ProbingError:
    if isinstance(e, MemoryError):
        return UnsupportedTarget("parsing the file needs more memory than a parser may use")
    return internal_error("a parser", e)


def _answer(request: Message) -> Message:
    op = request.header.get("op")
    if op == "ping":
        return Message({"pid": os.getpid()})
    handler = _handler(str(op))
    with _bounded(LIBRARY_CPU_S if op in ("symbols", "nccl_layout") else REQUEST_CPU_S):
        return Message({}, handler(request))


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Context manager that raises UnsupportedTarget in its body after ``seconds`` of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code is _answer.__code__:
            raise UnsupportedTarget("parsing the file needs more CPU time than a parser may use")
        frame = frame.f_back


def _symbols_answer(request: Message) -> bytes:
    patterns = [str(pattern) for pattern in request.header.get("patterns", ())]
    if len(request.fds) != 1 or len(patterns) > MAX_PATTERNS:
        raise UsageError(f'the request "symbols" takes one descriptor and at most {MAX_PATTERNS} patterns')
    elf = Elf(request.fds[0])
    symbols = [
        [*symbol[:-1], b2a_base64(symbol.head, newline=False).decode()] for symbol in matching_symbols(elf, patterns)
    ]
    return json.dumps({"found": [symbols, elf.first_vaddr, elf.relocated, elf.machine]}).encode()


# A module is imported at the first request that needs it, since each pool of parsers gets only a few types of requests.
_MODULES = {
    "flight_dump": "nccl_uprobes.flight_recorder.dump",
    "interface_addresses": "net.interfaces.addresses",
    "nccl_layout": "nccl_uprobes.layouts.from_dwarf",
    "ras_report": "nccl_uprobes.ras.json_report",
    "rdma_qps": "net.rdma.nldev",
    "unwind": "python_stack.native.unwind",
}


@functools.cache
def _handler(op: str) -> Callable[[Message], bytes]:
    if op == "symbols":
        return _symbols_answer
    if op not in _MODULES:
        raise UsageError(f"a parser has no request {op!r}")
    handlers: dict[str, Callable[[Message], bytes]] = import_module(f"probing.daemon.{_MODULES[op]}").handlers()
    return handlers[op]


if __name__ == "__main__":
    raise SystemExit(main())
