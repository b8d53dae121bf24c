"""Searches memory for the CPython runtime, if its file is deleted, stripped or without section headers.

The search tries the loaded dynamic symbols first, and then memory that has the form of the runtime. From 3.13 on the
runtime begins with ``xdebugpy``. Older runtimes contain two equal pointers (``interpreters.head`` and ``.main``) to an
interpreter whose first thread points back at the interpreter. The offsets of each older version are tried in turn, and
count only if ``sys.hexversion`` is of the same version.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

from probing.api.errors import CorruptTarget, NotPython, ProbingError, UnsupportedTarget
from probing.daemon.processes.loaded_file import Loaded, Read, Segment
from probing.daemon.processes.memory import PAGE
from probing.daemon.processes.procfs import Mapping
from probing.daemon.python_stack.walk.debug_offsets import COOKIE, DEBUG_OFFSETS_SIZE
from probing.daemon.python_stack.walk.layouts import TABLE, Layout, layout_from_debug_offsets
from probing.daemon.python_stack.walk.locate import (
    SYMBOLS,
    RuntimeInfo,
    RuntimeSymbols,
    candidates,
    locate,
    mapped_name,
    named_python,
    release_of,
    sys_hexversion,
)

__all__ = ("find_runtime",)

# The maximum bytes of a file's data that are searched. CPython's data takes 1 to 3 MB; a program with CPython may have
# more.
_MAX_DATA = 8 << 20
_PART = 1 << 16
_MAX_COOKIES = 64
_MAX_PAIRS = 2048
_MAX_SHAPES = 16
_LOWEST, _TOP = 1 << 16, 1 << 47


def find_runtime(read: Read, mappings: Sequence[Mapping]) -> RuntimeInfo:
    """Returns the runtime of the CPython among ``mappings``. Only memory is searched, at most 24 MiB of data.

    ``read`` returns the bytes of each (address, size), or None. Its errors other than NotPython and UnsupportedTarget
    are raised. Raises NotPython if nothing looks like a CPython, UnsupportedTarget for an unknown CPython.
    """
    reason: ProbingError | None = None
    for mapping in candidates(mappings):
        try:
            return _in_file(read, mapping)
        except UnsupportedTarget as e:
            reason = reason or e
        except NotPython:
            continue
    raise reason or NotPython("nothing in the memory of the process looks like a CPython")


def _in_file(read: Read, mapping: Mapping) -> RuntimeInfo:
    loaded = Loaded.at(read, mapping.start)
    addresses = loaded.symbols(read, SYMBOLS)
    if "_PyRuntime" in addresses:
        return _by_symbols(read, mapping, RuntimeSymbols(addresses, loaded.first_address, loaded.relocated))
    data = list(_written(read, loaded.segments))
    if found := _by_cookie(read, mapping, data):
        return found
    # Every program has pairs of equal pointers, so these candidates are followed only if the file is named like
    # CPython.
    if named_python(mapping):
        if found := _by_shape(read, mapping, data):
            return found
        raise UnsupportedTarget(
            f"the CPython in {mapped_name(mapping)} shows neither its symbols nor its runtime",
            hint="stacks are read of CPython 3.8 to 3.15; a build that keeps its dynamic symbols is always found",
        )
    raise NotPython("no CPython is loaded from this file")


def _by_symbols(read: Read, mapping: Mapping, symbols: RuntimeSymbols) -> RuntimeInfo:
    version_at = symbols.address("Py_Version", mapping)
    if not version_at:
        runtime = locate(mapping, symbols)
        hexversion = sys_hexversion(read, runtime.runtime, runtime.version)
        return runtime._replace(python=release_of(hexversion)) if hexversion else runtime
    head = read([(version_at, 4)])[0]
    if head is None:
        raise CorruptTarget("there is no CPython at the addresses that the symbols in memory show")
    return locate(mapping, symbols, int.from_bytes(head, "little"))


def _written(read: Read, segments: Sequence[Segment]) -> Iterator[tuple[int, bytes]]:
    """Yields address and bytes of each writable segment, at most _MAX_DATA bytes in total."""
    left = _MAX_DATA
    for segment in segments:
        start = (segment.start + 7) & -8
        size = min(segment.start + segment.size - start, left) & -8
        if not segment.writable or size <= 0:
            continue
        left -= size
        # The first part ends at a page boundary, so that an unmapped page costs as few other bytes as possible.
        edge = min(size, PAGE - start % PAGE)
        parts = [(start, edge), *((a, min(_PART, start + size - a)) for a in range(start + edge, start + size, _PART))]
        wanted = [part for part in parts if part[1]]
        yield start, b"".join(d or bytes(n) for d, (_, n) in zip(read(wanted), wanted, strict=True))


def _by_cookie(read: Read, mapping: Mapping, data: Sequence[tuple[int, bytes]]) -> RuntimeInfo | None:
    """Returns the first known runtime that begins with the cookie, or None. Raises UnsupportedTarget if there are only
    unknown runtimes.
    """
    refused: UnsupportedTarget | None = None
    for start, held in data:
        at = held.find(COOKIE)
        for _ in range(_MAX_COOKIES):
            if at < 0:
                break
            head = held[at : at + DEBUG_OFFSETS_SIZE]
            try:
                layout = layout_from_debug_offsets(head)
            except UnsupportedTarget as e:
                refused = e
            except (CorruptTarget, NotPython):
                pass
            else:
                if _alive(read, start + at, layout):
                    return _info(mapping, start + at, int.from_bytes(head[8:12], "little"))
            at = held.find(COOKIE, at + 1)
    if refused is not None:
        raise refused
    return None


def _by_shape(read: Read, mapping: Mapping, data: Sequence[tuple[int, bytes]]) -> RuntimeInfo | None:
    for start, held in data:
        words = array("Q", held)
        pairs = [
            (start + 8 * i, a)
            for i, (a, b) in enumerate(pairwise(words))
            if a == b and _LOWEST <= a < _TOP and not a & 7
        ]
        for version, layout in TABLE.items():
            for at, _ in _with_pthreads(read, layout, _with_threads(read, layout, pairs[:_MAX_PAIRS]))[:_MAX_SHAPES]:
                runtime = at - layout.interpreters_head
                if hexversion := sys_hexversion(read, runtime, version):
                    return _info(mapping, runtime, hexversion)
    return None


def _with_threads(read: Read, layout: Layout, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ``pairs`` whose second address is an interpreter with a thread that points back at it."""
    tops = [_word(d) for d in read([(a + layout.interp_threads, 8) for _, a in pairs])]
    backs = [_word(d) for d in read([(t + layout.thread_interp, 8) for t in tops])]
    return [pair for pair, top, back in zip(pairs, tops, backs, strict=True) if top and back == pair[1]]


def _with_pthreads(read: Read, layout: Layout, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    # On x86-64, in glibc and musl, the word at the address pthread_self() contains this address.
    tops = [_word(d) for d in read([(a + layout.interp_threads, 8) for _, a in pairs])]
    ids = [_word(d) for d in read([(t + layout.thread_id, 8) for t in tops])]
    selves = [_word(d) for d in read([(i, 8) for i in ids])]
    return [pair for pair, number, at_it in zip(pairs, ids, selves, strict=True) if number and at_it == number]


def _alive(read: Read, runtime: int, layout: Layout) -> bool:
    interpreter = _word(read([(runtime + layout.interpreters_head, 8)])[0])
    return bool(interpreter and _with_threads(read, layout, [(runtime, interpreter)]))


def _info(mapping: Mapping, runtime: int, hexversion: int) -> RuntimeInfo:
    version = (hexversion >> 24 & 0xFF, hexversion >> 16 & 0xFF)
    return RuntimeInfo(runtime, 0, hexversion, version, release_of(hexversion), mapped_name(mapping))


def _word(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "little")
