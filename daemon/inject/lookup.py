"""Finds the functions of CPython by which code is run: a reader opens the file, a parser reads its symbols."""

from __future__ import annotations

from typing import Any

from probing.api.errors import NotPython, UnsupportedTarget
from probing.daemon.inject.places import SYMBOLS, Functions
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.processes.reader_pool import GRACE_S, seconds_left
from probing.daemon.processes.readers import Parsers, Readers
from probing.daemon.python_stack.walk.locate import RuntimeSymbols, candidates

__all__ = ("find_functions",)

_X86_64 = 62


def find_functions(readers: Readers, parsers: Parsers, pid: int, start_ns: int, deadline: float) -> Functions:
    """Returns the functions of process ``pid``; ``deadline`` on time.monotonic().

    Raises NotPython for a process whose files have none of them, UnsupportedTarget, and as ``Readers.call``.
    """

    def call(op: str, **arguments: Any) -> Any:
        seconds = seconds_left(deadline) + GRACE_S
        return readers.call(op, pid=pid, start_ns=start_ns, timeout=seconds, **arguments)

    for mapping in candidates(parse_maps(call("maps", files=True).payload)):
        opened = call("open", start=mapping.start)
        try:
            answer = parsers.symbols(opened.fds[0], SYMBOLS, timeout=max(seconds_left(deadline), 0.1))
        except UnsupportedTarget:
            continue
        finally:
            opened.close_fds()
        symbols = RuntimeSymbols.from_parser(answer)
        if not symbols.addresses.keys() >= set(SYMBOLS):
            continue
        if answer.get("machine") != _X86_64:
            raise UnsupportedTarget(
                f"process {pid} is no x86-64 program", hint="code is run on x86-64 alone; `vars` and `stacks` work"
            )
        add, run, loop, runtime = (symbols.address(name, mapping) for name in SYMBOLS)
        sizes = {s["name"]: int(s["size"]) for s in answer["symbols"]}
        return Functions(add, run, loop, loop + sizes[SYMBOLS[2]], runtime, sizes[SYMBOLS[3]])
    raise NotPython(f"no file of process {pid} exports the functions of CPython that code is run by")
