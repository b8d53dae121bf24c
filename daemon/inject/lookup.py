"""Finds the functions of CPython that run code: a reader opens the interpreter's file, a parser reads its symbols."""

from __future__ import annotations

from typing import Any

from probing.api.errors import NotPython, UnsupportedTarget
from probing.daemon.inject.places import SYMBOLS, Functions
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.processes.reader_pool import GRACE_S, ReaderPool, seconds_left
from probing.daemon.python_stack.walk.locate import RuntimeSymbols, candidates

__all__ = ("find_functions",)

_X86_64 = 62


def find_functions(readers: ReaderPool, parsers: ParserPool, pid: int, start_ns: int, deadline: float) -> Functions:
    """Returns the addresses of the functions in process ``pid``. ``deadline`` is a time of time.monotonic().

    Raises NotPython if no file of the process has these functions, UnsupportedTarget if the process is not an x86-64
    program, and the errors of ``ReaderPool.call``.
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
        by_name = {symbol.name: symbol for symbol in answer.symbols}
        addresses = {name: symbol.address for name, symbol in by_name.items()}
        symbols = RuntimeSymbols(addresses, answer.first_vaddr, answer.relocated)
        if not symbols.addresses.keys() >= set(SYMBOLS):
            continue
        if answer.machine != _X86_64:
            raise UnsupportedTarget(
                f"process {pid} is not an x86-64 program", hint="use `probingctl vars` or `stacks`; eval needs x86-64"
            )
        add, run, loop, runtime = (symbols.address(name, mapping) for name in SYMBOLS)
        return Functions(add, run, loop, loop + by_name[SYMBOLS[2]].size, runtime, by_name[SYMBOLS[3]].size)
    raise NotPython(f"no file of process {pid} exports the functions of CPython that run code")
