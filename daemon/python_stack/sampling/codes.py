"""Reads the code objects that samples name by address (the reader's request ``codes``), and caches them in the
collector.

When a code object is freed, other code can take its address. So a sample contains (address, check), and a code object
that is read later belongs to the sample only if it has the same check. This module imports nothing heavy: a reader uses
it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from probing.api.errors import CorruptTarget, InternalError, UsageError
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.python_stack.sampling.thread_states import checked_request
from probing.daemon.python_stack.walk.capture import checked_layout
from probing.daemon.python_stack.walk.codes import read_codes
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.snapshot import Snapshot, is_count, word

__all__ = (
    "MAX_WANTED",
    "NO_LINE",
    "CodeKey",
    "IndexOf",
    "KnownCodes",
    "LineIndex",
    "LineTable",
    "SampledCode",
    "WantedCode",
    "answer_codes",
    "code_check",
    "unpack_codes",
)

MAX_WANTED = 4096
CodeKey = tuple[int, int]
"""(address, check)."""
WantedCode = tuple[int, int | None]
"""(address, check); None: any code."""
# The number of code objects that are read at once: even the largest stay within the bounds of one ProcessMemory.
_CHUNK = 32
_MAX_PAYLOAD = 16 << 20
_MAX_KNOWN = 32_768
_MAX_KNOWN_BYTES = 8 << 20
_MAX_GIVEN_UP = 8_192
_U64 = (1 << 64) - 1
# The offset of PyASCIIObject.hash, in every version.
_STR_HASH = 24


def code_check(filename: int, name: int, linetable: int, firstlineno: int, name_hash: int) -> int:
    """Returns the check that ``code_check`` in bpf/python.bpf.h computes. Arguments: pointers, co_firstlineno as an
    unsigned 32-bit number, and the hash of co_name as an unsigned 64-bit number."""
    mixed = filename * 0x9E3779B97F4A7C15 ^ name * 0xC2B2AE3D27D4EB4F ^ linetable * 0x165667B19E3779F9
    mixed = (mixed ^ firstlineno * 0x27D4EB2F165667C5 ^ name_hash * 0xFF51AFD7ED558CCD) & _U64
    return mixed >> 32 ^ mixed & 0xFFFF_FFFF


def answer_codes(request: Header) -> Message:
    """Answers ``codes`` {pid, start_ns, runtime, wanted (at most 4096 of [address, check or null]), timeout_ms}.

    The header has ``index`` and ``asked``. Only the first ``asked`` of ``wanted`` were read: request the rest again.
    The payload is ``index`` bytes of JSON ``{"files": [...], "codes": [[address, [filename, name, linetable,
    firstlineno, name_hash], func, file, table], ...]}``, followed by the line tables. ``file`` is an index into
    ``files``, ``table`` the length of the line table or -1. A code object is left out if it cannot be read, changed
    meanwhile or has another check.

    Raises ProcessGone, PrivilegeError, UnsupportedTarget, CorruptTarget and UsageError.
    """
    pid, _, runtime, deadline = checked_request(request)
    wanted = request.get("wanted")
    if not isinstance(wanted, list) or len(wanted) > MAX_WANTED:
        raise UsageError(f"a request for codes names at most {MAX_WANTED} code objects")
    layout, _ = checked_layout(pid, runtime, ProcessMemory(pid))
    files: dict[str, int] = {}
    rows: list[list[Any]] = []
    tables: list[bytes] = []
    size = asked = 0
    for start in range(0, len(wanted), _CHUNK):
        # A slow read returns the code read so far; at least one chunk is read.
        if size > _MAX_PAYLOAD or (start and time.monotonic() > deadline):
            break
        chunk = [(int(address), check) for address, check in wanted[start : start + _CHUNK]]
        for row, table in _read_chunk(pid, layout, chunk):
            row[3] = files.setdefault(row[3], len(files))
            rows.append(row)
            tables.append(table)
            size += len(table) + len(row[2])
        asked = start + len(chunk)
    index = json.dumps({"files": list(files), "codes": rows}, separators=(",", ":")).encode()
    return Message({"index": len(index), "asked": asked}, b"".join([index, *tables]))


def _read_chunk(pid: int, layout: Layout, wanted: Sequence[WantedCode]) -> list[tuple[list[Any], bytes]]:
    memory = ProcessMemory(pid)
    snapshot = Snapshot(memory)
    try:
        codes = read_codes(snapshot, layout, _matching(memory, layout, wanted), {})
        # Each code must still be at its address: otherwise the texts may belong to other code.
        proofs = _proofs(memory, layout, list(codes))
    except CorruptTarget:
        return []  # the sizes of the objects are beyond all bounds
    rows = []
    for (address, code), proof in zip(codes.items(), proofs, strict=True):
        head = snapshot.get(address, layout.code_size)
        if head is None or proof is None or proof[:-1] != _fields(layout, head):
            continue
        table = code.table
        rows.append(([address, proof, code.func, code.file, -1 if table is None else len(table)], table or b""))
    return rows


def _matching(memory: ProcessMemory, layout: Layout, wanted: Sequence[WantedCode]) -> list[int]:
    """Returns the addresses that still have the wanted code. Other addresses must not be read: memory that is mistaken
    for a line table may be large.
    """
    proofs = _proofs(memory, layout, [address for address, _ in wanted])
    return [
        address
        for (address, check), proof in zip(wanted, proofs, strict=True)
        if proof is not None and check in (None, code_check(*proof))
    ]


def _proofs(memory: ProcessMemory, layout: Layout, addresses: Sequence[int]) -> list[list[int] | None]:
    """Returns the arguments of ``code_check`` for the code at each address; None if no code is there."""
    heads = memory.read_many([(address, layout.code_size) for address in addresses])
    names = [(word(head, layout.code_short_name) + _STR_HASH, 8) if head else (0, 8) for head in heads]
    return [
        [*_fields(layout, head), word(name_hash, 0)] if head and name_hash and is_count(word(head, 0)) else None
        for head, name_hash in zip(heads, memory.read_many(names), strict=True)
    ]


def _fields(layout: Layout, head: bytes) -> list[int]:
    at = layout.code_firstlineno
    pointers = [word(head, offset) for offset in (layout.code_filename, layout.code_name, layout.code_linetable)]
    return [*pointers, int.from_bytes(head[at : at + 4], "little")]


NO_LINE = -1


class LineIndex(NamedTuple):
    """The lines of a code object. Instructions at offsets from ``ends[i - 1]`` to ``ends[i] - 1`` have the line
    ``lines[i]``; NO_LINE means no line. Instructions from the last end on have no line either.
    """

    ends: array[int]
    lines: array[int]

    def line(self, offset: int) -> int | None:
        """Returns the line of the instruction at ``offset``, at least 0 bytes into the code; None if it has no line."""
        at = bisect_right(self.ends, offset)
        return None if at == len(self.ends) or self.lines[at] == NO_LINE else self.lines[at]

    @property
    def bytes(self) -> int:
        return sum(numbers.itemsize * len(numbers) for numbers in self)


@dataclass(frozen=True)
class SampledCode:
    """A code object as it was read. ``index``: its lines; None if its line table could not be read. Processes that run
    the same code share one ``SampledCode``.
    """

    func: str
    file: str
    first_line: int
    index: LineIndex | None

    def line(self, offset: int) -> int | None:
        """Returns the line of the instruction ``offset`` bytes into the code, or None when it has no line."""
        if self.index is None:
            return None
        # A negative offset means that the frame has not begun. It is at the first line.
        return self.first_line if offset < 0 else self.index.line(offset)


LineTable = Literal["lnotab", "ranges", "locations"]
"""The format of a line table."""
IndexOf = Callable[[LineTable, bytes, int], LineIndex]
"""(format, line table, first line) -> its lines."""
_codes: WeakValueDictionary[tuple[object, ...], SampledCode] = WeakValueDictionary()


def _shared(func: str, file: str, first: int, table: bytes | None, lines: LineTable, index_of: IndexOf) -> SampledCode:
    """Returns the code with these texts and this line table: the object that is already in use, or a new object."""
    # The hash of bytes is keyed, so no target can make two tables with the same hash.
    key = (func, file, first, lines, None if table is None else len(table), hash(table))
    code = _codes.get(key)
    if code is None:
        code = SampledCode(func, file, first, None if table is None else index_of(lines, table, first))
        _codes[key] = code
    return code


def unpack_codes(answer: Message, lines: LineTable, index_of: IndexOf) -> dict[CodeKey, SampledCode]:
    """Decodes the answer of ``answer_codes``. ``lines``: the format of the line tables, which ``index_of`` decodes.
    Raises InternalError if the answer is malformed.
    """
    try:
        end = int(answer.header["index"])
        texts = json.loads(answer.payload[:end])
        files = texts["files"]
        codes = {}
        for address, proof, func, file, length in texts["codes"]:
            table = None if length < 0 else answer.payload[end : end + length]
            end += max(0, length)
            first = proof[3] - (1 << 32) if proof[3] >> 31 else proof[3]
            code = _shared(str(func), str(files[file]), first, table, lines, index_of)
            codes[int(address), code_check(*proof)] = code
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise InternalError("a reader's answer contains no code objects") from e
    return codes


class KnownCodes:
    """The code objects that the samples of one process name, and the keys that were given up. Both are limited in
    number. Thread-safe.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[CodeKey, SampledCode] = OrderedDict()
        self._given_up: OrderedDict[CodeKey, float] = OrderedDict()
        self._bytes = 0
        self._learning = threading.Lock()

    @property
    def bytes(self) -> int:
        """The approximate memory that the code takes, counted as if no other process shared the code."""
        return self._bytes

    def clear(self) -> None:
        """Drops all code. Dropped code counts as missing, and can be read again."""
        with self._learning:
            self._known.clear()
            self._bytes = 0

    def get(self, key: CodeKey) -> SampledCode | None:
        return self._known.get(key)

    def missing(self, keys: Iterable[CodeKey], now: float) -> list[CodeKey]:
        """Returns the keys that have neither been read nor given up at ``now`` (time.monotonic())."""
        return [k for k in keys if k not in self._known and self._given_up.get(k, 0.0) <= now]

    def learn(self, found: dict[CodeKey, SampledCode]) -> None:
        with self._learning:
            for key, code in found.items():
                if key not in self._known:
                    self._known[key] = code
                    self._given_up.pop(key, None)
                    self._bytes += _weight(code)
            while len(self._known) > _MAX_KNOWN or self._bytes > _MAX_KNOWN_BYTES:
                self._bytes -= _weight(self._known.popitem(last=False)[1])

    def give_up(self, keys: Sequence[CodeKey], until: float = math.inf) -> None:
        """Notes that the keys are not to be read before ``until`` (time.monotonic())."""
        with self._learning:
            for key in keys:
                self._given_up[key] = until
                self._given_up.move_to_end(key)
            while len(self._given_up) > _MAX_GIVEN_UP:
                self._given_up.popitem(last=False)


def _weight(code: SampledCode) -> int:
    return 256 + len(code.func) + len(code.file) + (0 if code.index is None else code.index.bytes)
