"""The parser: the process that takes files apart which targets made, and has no rights at all.

It gets files as descriptors, and before it reads the first one it limits itself: memory, processor time, no new
privileges, and with Landlock no files but the interpreter's. One request at a time, each bounded in processor time; it
can be killed at any time.

* ``ping``: header ``pid`` of the parser.
* ``symbols`` (``patterns``, and one descriptor): payload, JSON with ``symbols`` [{``name``, ``address``,
  ``file_offset``, ``size``, ``head`` (hex)}] as in ``elf.symbols.Symbol``, ``build_id`` (hex or null), ``machine``,
  ``relocated``, ``first_vaddr``, and ``segments`` [[vaddr, offset, file_size, memory_size, flags], ...].
* ``unwind``: ``python_stack.native.unwind``.
* ``flight_dump``: ``nccl_uprobes.flight_dump``.
* ``ras_report``: ``nccl_uprobes.ras_report``.
* ``nccl_layout``: ``nccl_uprobes.dwarf_layout``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# The maths library behind numpy would keep a stack of address space for each core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from probing.api.errors import ProbingError, UnsupportedTarget, UsageError
from probing.daemon.confined.sandbox import confine, limit
from probing.daemon.confined.serving import inherit, internal_error, serve
from probing.daemon.elf.file import Elf
from probing.daemon.elf.symbols import matching_symbols
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.flight_recorder.dump import handlers as flight_handlers
from probing.daemon.nccl_uprobes.layouts.from_dwarf import handlers as layout_handlers
from probing.daemon.nccl_uprobes.ras.json_report import handlers as ras_handlers
from probing.daemon.python_stack.native.unwind import handlers as native_handlers

__all__ = ("main",)

MEMORY_BYTES = 3 << 30
# For its whole life: whoever needs more is replaced by a fresh one.
CPU_SECONDS = 600
# For one request, and how often it is said again to code that goes on, s. libtorch_cpu takes 0.4 s.
REQUEST_CPU_S = 10.0
SYMBOLS_CPU_S = 3.0
_AGAIN_S = 0.1
MAX_PATTERNS = 1_024


def main() -> int:
    """Serve the connection that is descriptor 0 until it closes."""
    channel = inherit(_give_up_rights)
    signal.signal(signal.SIGPROF, _too_long)
    serve(channel, _answer, _error_of)
    return 0


def _give_up_rights() -> None:
    limit(MEMORY_BYTES, CPU_SECONDS)
    confine(())


def _error_of(e: Exception) -> ProbingError:
    if isinstance(e, MemoryError):
        return UnsupportedTarget("the file asks for more memory than a parser has")
    return internal_error("a parser", e)


def _answer(request: Message) -> Message:
    op = request.header.get("op")
    if op == "ping":
        return Message({"pid": os.getpid()})
    handler = _HANDLERS.get(str(op))
    if handler is None:
        raise UsageError(f"a parser knows no request {op!r}")
    with _bounded(SYMBOLS_CPU_S if op == "symbols" else REQUEST_CPU_S):
        return Message({}, handler(request))


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raises UnsupportedTarget in what has run for ``seconds`` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code is _answer.__code__:
            raise UnsupportedTarget("the file takes more processor time than a parser has for it")
        frame = frame.f_back


def _symbols_answer(request: Message) -> bytes:
    patterns = [str(pattern) for pattern in request.header.get("patterns", ())]
    if len(request.fds) != 1 or len(patterns) > MAX_PATTERNS:
        raise UsageError(f"symbols takes one descriptor and {MAX_PATTERNS} patterns at most")
    return json.dumps(_symbols(Elf(request.fds[0]), patterns)).encode()


def _symbols(elf: Elf, patterns: list[str]) -> dict[str, Any]:
    build_id = elf.build_id()
    return {
        "symbols": [
            {
                "name": symbol.name,
                "address": symbol.address,
                "file_offset": symbol.file_offset,
                "size": symbol.size,
                "head": symbol.head.hex(),
            }
            for symbol in matching_symbols(elf, patterns)
        ],
        "build_id": build_id.hex() if build_id is not None else None,
        "machine": elf.machine,
        "relocated": elf.relocated,
        "first_vaddr": elf.first_vaddr,
        "segments": [list(segment) for segment in elf.segments],
    }


_HANDLERS: dict[str, Callable[[Message], bytes]] = {
    "symbols": _symbols_answer,
    **native_handlers(),
    **flight_handlers(),
    **ras_handlers(),
    **layout_handlers(),
}


if __name__ == "__main__":
    raise SystemExit(main())
