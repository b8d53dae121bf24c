"""Reads code objects of a target: names, files and line tables.

Texts and lines are cached by the bytes that were read, not by addresses: when an object is freed, another object can
get its address.

``line_of`` finds the source line of an instruction in a line table. There are three formats: ``lnotab`` (up to 3.9,
CPython ``Objects/lnotab_notes.txt`` of 3.9), ``ranges`` (3.10, PEP 626) and ``locations`` (3.11+,
``Objects/locations.md``, later ``InternalDocs/code_objects.md``). A target's table may hold anything, so every loop
moves forward through the bytes of the table and ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from probing.daemon.processes.memory import PAGE
from probing.daemon.processes.procfs import clean_text
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.snapshot import Snapshot, word
from probing.daemon.python_stack.walk.walker import RawFrame

__all__ = (
    "Code",
    "line_of",
    "read_codes",
    "same_code",
)

_CACHED_TABLE = 4096


def line_of(kind: Literal["lnotab", "ranges", "locations"], table: bytes, first_line: int, offset: int) -> int | None:
    """Returns the source line of the instruction at byte ``offset`` of its code, or None if it has no line.

    An ``offset`` below 0 means that the frame has not begun. Its line is ``first_line``.
    """
    if offset < 0:
        return first_line
    # Long tables are not cached: the cache must stay small, whatever tables a target has.
    line = _cached(kind, table, offset) if len(table) <= _CACHED_TABLE else _decode(kind, table, offset)
    if line is None:
        return None
    line += first_line
    return line if 0 <= line < 1 << 31 else None


def _decode(kind: str, table: bytes, offset: int) -> int | None:
    if kind == "locations":
        return _locations(table, offset)
    return _ranges(table, offset) if kind == "ranges" else _lnotab(table, offset)


_cached = lru_cache(maxsize=2048)(_decode)


def _lnotab(table: bytes, offset: int) -> int:
    address = line = 0
    for i in range(0, len(table) - 1, 2):
        address += table[i]
        if address > offset:
            break
        line += _signed(table[i + 1])
    return line


def _ranges(table: bytes, offset: int) -> int | None:
    end = line = 0
    for i in range(0, len(table) - 1, 2):
        end += table[i]
        delta = table[i + 1]
        if delta != 0x80:
            line += _signed(delta)
        if end > offset:
            return None if delta == 0x80 else line
    return None


def _locations(table: bytes, offset: int) -> int | None:
    end = line = at = 0
    size = len(table)
    while at < size:
        head = table[at]
        code = head >> 3 & 15
        end += 2 * ((head & 7) + 1)
        at += 1
        if code in (13, 14):
            line += _signed_varint(table, at)
        elif 10 <= code <= 12:
            line += code - 10
        if end > offset:
            return None if code == 15 else line
        # Only the first byte of an entry has its highest bit set.
        while at < size and not table[at] & 0x80:
            at += 1
    return None


def _signed_varint(table: bytes, at: int) -> int:
    value = shift = 0
    # A line difference fits into 32 bits, so into six groups of six bits.
    for byte in table[at : at + 6]:
        value |= (byte & 0x3F) << shift
        shift += 6
        if not byte & 0x40:
            break
    return -(value >> 1) if value & 1 else value >> 1


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


MAX_CHARACTERS = 4096
MAX_TABLE = 1 << 20
# The maximum bytes of all texts and tables of a dump.
_MAX_CODE_BYTES = 16 << 20
_GUESS = 256
# The minimum bytes of a useful str or bytes object. Objects begin at multiples of 16.
_SHORTEST = 48
_HEAD = 16


class Code(NamedTuple):
    """A code object. ``func`` is the qualified name from 3.11 on. Texts are clean. ``cut``: a text or the table is
    incomplete.
    """

    address: int
    func: str
    file: str
    first_line: int
    table: bytes | None
    cut: bool

    def line(self, layout: Layout, frame: RawFrame) -> int | None:
        """Returns the line that ``frame`` executes, or None if the instruction has no line."""
        if self.table is None:
            return None
        return line_of(layout.lines, self.table, self.first_line, self._offset(layout, frame))

    def _offset(self, layout: Layout, frame: RawFrame) -> int:
        if layout.code_adaptive is not None:
            return frame.instr - (self.address + layout.code_adaptive)
        return frame.instr * 2 if layout.instr == "lasti_units" else frame.instr


def read_codes(snapshot: Snapshot, layout: Layout, addresses: Iterable[int], sizes: dict[int, int]) -> dict[int, Code]:
    """Returns the code objects at ``addresses`` that can be read.

    ``sizes`` keeps the length of the object at an address, so that the next dump reads it at once.
    """
    wanted = list(dict.fromkeys(addresses))
    snapshot.load([(a, layout.code_size) for a in wanted])
    heads = {a: h for a in wanted if (h := snapshot.get(a, layout.code_size))}
    texts = {word(h, o) for h in heads.values() for o in (layout.code_filename, layout.code_name)}
    tables = {word(h, layout.code_linetable) for h in heads.values()}
    snapshot.load([(a, sizes.get(a) or _guess(a)) for a in sorted(texts | tables)])
    text_sizes = {a: _text_size(snapshot, layout, a, sizes.get(a) or _guess(a)) for a in texts}
    table_sizes = {a: _table_size(snapshot, layout, a, sizes.get(a) or _guess(a)) for a in tables}
    sizes.clear()
    left = _MAX_CODE_BYTES
    for address, size in (*text_sizes.items(), *table_sizes.items()):
        sizes[address] = size if size <= left else 0
        left -= sizes[address]
    snapshot.load([(a, s) for a, s in sizes.items() if s])
    return {a: _code(snapshot, layout, a, head, sizes) for a, head in heads.items()}


def same_code(one: Snapshot, other: Snapshot, layout: Layout, address: int, sizes: dict[int, int]) -> bool:
    """Returns whether an earlier and a later snapshot have equal code objects at ``address``. Equal objects mean that
    the object was not replaced in between.

    From 3.12 on, two code objects that are equal in all else still differ in ``co_version``.
    """
    first, second = one.get(address, layout.code_size), other.get(address, layout.code_size)
    if first is None or second is None or _lasting(first, layout) != _lasting(second, layout):
        return False
    for at in (layout.code_filename, layout.code_name, layout.code_linetable):
        held = word(first, at), sizes.get(word(first, at), 0)
        before, after = (s.get(*held) if held[1] else b"" for s in (one, other))
        # Reference count and hash are before the length.
        if before is None or after is None or before[layout.str_length :] != after[layout.str_length :]:
            return False
    return True


def _lasting(head: bytes, layout: Layout) -> bytes:
    """Returns the fields of a code object that never change: all but the head and the warm-up counter."""
    if (at := layout.code_warmup) is None:
        return head[_HEAD:]
    return head[_HEAD:at] + head[at + 2 :]


def _guess(address: int) -> int:
    # The read stops at the end of a page, because the next page may not be mapped.
    left = PAGE - address % PAGE
    return left if _SHORTEST <= left < _GUESS else _GUESS


def _text_size(snapshot: Snapshot, layout: Layout, address: int, guess: int) -> int:
    """Returns how many bytes of the str at ``address`` are to be read; 0 if there is no str."""
    data = snapshot.get(address, guess)
    if data is None or len(data) < layout.str_ascii:
        return 0
    length, kind, start = _text_shape(layout, data)
    return start + min(length, MAX_CHARACTERS) * kind if kind in (1, 2, 4) and length < 1 << 40 else 0


def _text_shape(layout: Layout, data: bytes) -> tuple[int, int, int]:
    state = int.from_bytes(data[layout.str_state : layout.str_state + 4], "little")
    kind, compact, ascii_only = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
    start = layout.str_ascii if ascii_only else layout.str_compact
    return word(data, layout.str_length), kind if compact else 0, start


def _table_size(snapshot: Snapshot, layout: Layout, address: int, guess: int) -> int:
    data = snapshot.get(address, guess)
    if data is None or len(data) < layout.bytes_data:
        return 0
    return layout.bytes_data + min(word(data, layout.bytes_length), MAX_TABLE - layout.bytes_data)


def _code(snapshot: Snapshot, layout: Layout, address: int, head: bytes, sizes: dict[int, int]) -> Code:
    func, func_cut = _text(snapshot, layout, word(head, layout.code_name), sizes)
    file, file_cut = _text(snapshot, layout, word(head, layout.code_filename), sizes)
    table, table_cut = _table(snapshot, layout, word(head, layout.code_linetable), sizes)
    at = layout.code_firstlineno
    first = int.from_bytes(head[at : at + 4], "little", signed=True)
    return Code(address, func, file, first, table, func_cut or file_cut or table_cut)


def _text(snapshot: Snapshot, layout: Layout, address: int, sizes: dict[int, int]) -> tuple[str, bool]:
    data = snapshot.get(address, sizes[address]) if sizes.get(address) else None
    if data is None or len(data) < layout.str_ascii:
        return "?", True
    length, kind, start = _text_shape(layout, data)
    coding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}.get(kind)
    if coding is None:
        return "?", True
    raw = data[start : start + min(length, MAX_CHARACTERS) * kind]
    return _decoded(raw, coding), length > MAX_CHARACTERS


@lru_cache(maxsize=2048)
def _decoded(raw: bytes, coding: str) -> str:
    try:
        text = raw.decode(coding, "replace" if coding == "latin-1" else "surrogatepass")
    except UnicodeDecodeError:
        text = raw.decode(coding, "replace")
    # This replaces lone surrogates in file names, too: neither Arrow nor protobuf accepts them.
    return clean_text(text, MAX_CHARACTERS)


def _table(snapshot: Snapshot, layout: Layout, address: int, sizes: dict[int, int]) -> tuple[bytes | None, bool]:
    size = sizes.get(address, 0)
    data = snapshot.get(address, size) if size else None
    if data is None:
        return None, True
    length = word(data, layout.bytes_length)
    return data[layout.bytes_data :], length > size - layout.bytes_data
