"""Finds the functions by which code is run: a reader opens the files of CPython and of the C library, a parser reads
their symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probing.api.errors import NotPython, UnsupportedTarget
from probing.daemon.elf.symbols import FileSymbols
from probing.daemon.inject.places import EMPTY_SET, SYMBOLS, Functions, in_c_library, no_c_library
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.procfs import Mapping, parse_maps
from probing.daemon.processes.reader_pool import GRACE_S, ReaderPool, seconds_left
from probing.daemon.python_stack.walk.locate import RuntimeSymbols, candidates

__all__ = ("find_functions",)

_X86_64 = 62


def find_functions(readers: ReaderPool, parsers: ParserPool, pid: int, start_ns: int, deadline: float) -> Functions:
    """Returns the addresses of the functions in process ``pid``. ``deadline`` is a time of time.monotonic().

    Raises NotPython if no file of the process has the functions of CPython, UnsupportedTarget if the process is not an
    x86-64 program or has no C library, and the errors of ``ReaderPool.call``.
    """

    def call(op: str, **arguments: Any) -> Any:
        seconds = seconds_left(deadline) + GRACE_S
        return readers.call(op, pid=pid, start_ns=start_ns, timeout=seconds, **arguments)

    def read(mapping: Mapping, names: Sequence[str]) -> FileSymbols | None:
        opened = call("open", start=mapping.start)
        try:
            return parsers.symbols(opened.fds[0], names, timeout=max(seconds_left(deadline), 0.1))
        except UnsupportedTarget:
            return None
        finally:
            opened.close_fds()

    maps = parse_maps(call("maps", files=True).payload)
    for mapping in candidates(maps):
        answer = read(mapping, SYMBOLS)
        symbols = _addresses(answer)
        if answer is None or not symbols.addresses.keys() >= set(SYMBOLS):
            continue
        if answer.machine != _X86_64:
            raise UnsupportedTarget(
                f"process {pid} is not an x86-64 program", hint="use `probingctl vars` or `stacks`; eval needs x86-64"
            )
        add, run, loop, runtime = (symbols.address(name, mapping) for name in SYMBOLS)
        sizes = {symbol.name: symbol.size for symbol in answer.symbols}
        libraries = (library for library in maps if library.offset == 0 and in_c_library(library))
        found = (_addresses(read(library, (EMPTY_SET,))).address(EMPTY_SET, library) for library in libraries)
        empty_set = next((address for address in found if address), 0)
        if not empty_set:
            raise no_c_library()
        return Functions(add, run, empty_set, loop, loop + sizes[SYMBOLS[2]], runtime, sizes[SYMBOLS[3]])
    raise NotPython(f"no file of process {pid} exports the functions of CPython that run code")


def _addresses(answer: FileSymbols | None) -> RuntimeSymbols:
    """Returns the addresses of the symbols of a file; none if the file could not be parsed."""
    if answer is None:
        return RuntimeSymbols({}, 0, relocated=False)
    by_name = {symbol.name: symbol.address for symbol in answer.symbols}
    return RuntimeSymbols(by_name, answer.first_vaddr, answer.relocated)
