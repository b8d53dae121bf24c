"""Looks up the call frame information of an address.

``.eh_frame_hdr`` has a sorted table of all functions, so a lookup parses only one of hundreds of thousands of entries.
Formats: Linux Standard Base 5.0, 10.5 to 10.6 (.eh_frame, pointer encodings).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probing.api.errors import CorruptTarget, UnsupportedTarget
from probing.daemon.elf.cfi_programs import Cie, Cursor, Rule, State, execute
from probing.daemon.elf.file import PT_GNU_EH_FRAME, Elf

__all__ = ("FrameTable", "Row", "Rule")

_MAX_FUNCTIONS = 8 << 20
_MAX_ENTRY = 1 << 20
_MAX_AUGMENTATION = 16
_MAX_CIES = 1024
_MASK = (1 << 64) - 1
# Pointer encodings (DW_EH_PE_*): the low half is the format, the high half says what the value is relative to.
_PCREL, _DATAREL, _INDIRECT, _OMIT = 0x10, 0x30, 0x80, 0xFF
_FORMATS = {
    0x00: (8, False),
    0x02: (2, False),
    0x03: (4, False),
    0x04: (8, False),
    0x0A: (2, True),
    0x0B: (4, True),
    0x0C: (8, True),
}


@dataclass(frozen=True, slots=True)
class Row:
    """The frame layout at one instruction of the function of ``size`` bytes at ``start``, an address before relocation.

    The CFA is ``cfa_register`` + ``cfa_offset``, or the value of ``cfa_expression``. ``signal``: the kernel made the
    frame to deliver a signal, so its caller is at the interrupted instruction, not at a return address.
    """

    start: int
    size: int
    cfa_register: int
    cfa_offset: int
    cfa_expression: bytes
    rules: dict[int, Rule]
    return_register: int
    signal: bool


class FrameTable:
    """The call frame information of ``elf``. Raises UnsupportedTarget if ``elf`` has no usable .eh_frame_hdr."""

    def __init__(self, elf: Elf) -> None:
        header = elf.segment(PT_GNU_EH_FRAME)
        if header is None or header.file_size < 12:
            raise UnsupportedTarget("the file has no .eh_frame_hdr, the index of its call frame information")
        self._elf = elf
        self._base = header.vaddr
        cursor = Cursor(elf.read_upto(header.offset, min(header.file_size, 32)))
        version, frame_encoding, count_encoding, table_encoding = cursor.take(4)
        if version != 1 or count_encoding != 0x03 or table_encoding != _DATAREL | 0x0B:
            raise UnsupportedTarget("the index of call frame information is in a format that no linker writes today")
        cursor.take(_FORMATS.get(frame_encoding & 0x0F, (8, False))[0])
        count = min(cursor.number(4), (header.file_size - cursor.at) // 8, _MAX_FUNCTIONS)
        data = elf.read_upto(header.offset + cursor.at, count * 8)
        table = np.frombuffer(data[: len(data) & -8], "<i4").reshape(-1, 2)
        self._starts = np.ascontiguousarray(table[:, 0])
        self._entries = np.ascontiguousarray(table[:, 1])
        self._cies: dict[int, Cie] = {}

    def row(self, address: int) -> Row | None:
        """Returns the frame layout at ``address`` (before relocation); None if no entry covers the address.

        Raises CorruptTarget or UnsupportedTarget for a damaged entry.
        """
        relative = address - self._base
        if not -(1 << 31) <= relative < 1 << 31:
            return None
        index = int(np.searchsorted(self._starts, np.int32(relative), side="right")) - 1
        if index < 0:
            return None
        return self._row(self._base + int(self._entries[index]), address)

    def _row(self, entry: int, address: int) -> Row | None:
        data, body = self._entry(entry)
        cursor = Cursor(data)
        cie_offset = cursor.number(4)
        if not cie_offset:
            raise CorruptTarget("an entry in the index of call frame information does not describe a function")
        cie = self._cie(body - cie_offset)
        start = self._pointer(cursor, cie.encoding, body)
        size = cursor.number(*_format(cie.encoding & 0x07)) & _MASK
        if not start <= address < start + size:
            return None
        if cie.augmented:
            cursor.take(cursor.uleb())
        state = State(start)
        execute(Cursor(cie.instructions), state, cie, {}, _MASK)
        initial = dict(state.rules)
        state.location = start
        execute(Cursor(data, cursor.at), state, cie, initial, address)
        register, offset, expression = state.cfa
        if register < 0 and not expression:
            raise CorruptTarget("call frame information does not describe the frame")
        return Row(start, size, register, offset, expression, state.rules, cie.return_register, cie.signal)

    def _entry(self, address: int) -> tuple[bytes, int]:
        """Returns the content of an entry after its length, and the address of the content."""
        offset = self._elf.file_offset(address)
        if offset is None:
            raise CorruptTarget("call frame information lies outside of the file")
        head = Cursor(self._elf.read_upto(offset, 12))
        size, skip = head.number(4), 4
        if size == 0xFFFF_FFFF:
            size, skip = head.number(8), 12
        if not 4 < size <= _MAX_ENTRY:
            raise CorruptTarget("an entry of call frame information has an invalid size")
        return self._elf.read(offset + skip, size), address + skip

    def _cie(self, address: int) -> Cie:
        if cached := self._cies.get(address):
            return cached
        data, _ = self._entry(address)
        cursor = Cursor(data)
        if cursor.number(4):
            raise CorruptTarget("an entry of call frame information refers to an entry that is not a common entry")
        version = cursor.number(1)
        if version not in (1, 3, 4):
            raise UnsupportedTarget(f"call frame information has the unsupported version {version}")
        end = data.find(b"\0", cursor.at, cursor.at + _MAX_AUGMENTATION)
        if end < 0:
            raise CorruptTarget("call frame information has an augmentation that is too long")
        augmentation = cursor.take(end + 1 - cursor.at)[:-1]
        if version == 4 and cursor.take(2) != b"\x08\0":
            raise UnsupportedTarget("call frame information is not for 64-bit addresses")
        code_align, data_align = cursor.uleb(), cursor.sleb()
        register = cursor.number(1) if version == 1 else cursor.uleb()
        cie = _augmented(cursor, augmentation, code_align, data_align, register)
        if len(self._cies) < _MAX_CIES:
            self._cies[address] = cie
        return cie

    def _pointer(self, cursor: Cursor, encoding: int, body: int) -> int:
        if encoding & _INDIRECT:
            raise UnsupportedTarget("call frame information refers to functions indirectly")
        base = {0x00: 0, _PCREL: body + cursor.at, _DATAREL: self._base}.get(encoding & 0x70)
        if base is None:
            raise UnsupportedTarget("call frame information has addresses of an unknown kind")
        return (base + cursor.number(*_format(encoding))) & _MASK


def _format(encoding: int) -> tuple[int, bool]:
    if encoding & 0x0F not in _FORMATS:
        raise UnsupportedTarget("call frame information has addresses in an unknown format")
    return _FORMATS[encoding & 0x0F]


def _augmented(cursor: Cursor, augmentation: bytes, code_align: int, data_align: int, register: int) -> Cie:
    encoding, signal = 0, False
    if augmentation.startswith(b"z"):
        size = cursor.uleb()
        if size > cursor.left:
            raise CorruptTarget("call frame information has an augmentation that extends past the end of its entry")
        inner = Cursor(cursor.data, cursor.at, cursor.at + size)
        cursor.take(size)
        for letter in augmentation[1:]:
            if letter == ord("R"):
                encoding = inner.number(1)
            elif letter == ord("P"):
                inner.take(_format(inner.number(1))[0])
            elif letter == ord("L"):
                inner.take(1)
            elif letter == ord("S"):
                signal = True
            else:
                break  # ``take`` has skipped the augmentation as a whole, with its unknown rest
    elif augmentation:
        raise UnsupportedTarget("call frame information has an unknown augmentation")
    rest = cursor.take(cursor.left)
    return Cie(code_align, data_align, register, encoding, augmentation.startswith(b"z"), signal, rest)
