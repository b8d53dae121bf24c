"""Chooses the probe point of a function: the first instruction that the kernel emulates, with arguments intact.

The kernel emulates push, nop, call, jmp and jcc, and steps every other instruction out of line, which traps twice: 0.7
against 9 us a hit (measured on 6.18). The list of emulated instructions: branch_setup_xol_ops and push_setup_xol_ops in
arch/x86/kernel/uprobes.c. An instruction at the entry may be skipped if it changes neither an argument register nor the
stack pointer, and does not jump. This module decodes only the few forms that compilers emit at entries. At any other
instruction the search ends, and the entry is the probe point.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import NamedTuple

from probing.daemon.elf.file import AARCH64, X86_64
from probing.daemon.elf.symbols import Symbol

__all__ = ("CHEAP_NS", "DEAR_NS", "ProbePoint", "point_of", "probe_point")

_OWN_MACHINE = AARCH64 if platform.machine() == "aarch64" else X86_64
CHEAP_NS = 700
DEAR_NS = 9200
# The registers that must not change, by their numbers in instructions: rcx, rdx, rsp, rsi, rdi, r8, r9.
_KEPT = frozenset({1, 2, 4, 6, 7, 8, 9})
_ENDBR64 = b"\xf3\x0f\x1e\xfa"
_NOTHING, _RM, _REGISTER = "nothing", "r/m", "register"
_BY_FIELD, _ONLY_COMPARE, _ONLY_FIRST = "by field", "only compare", "only first"
# Instructions seen at entries of functions, by opcode: the operand that they write, and the bytes of the immediate
# after the operands. "by field": with 7 in the register field the instruction is cmp, else it writes r/m; with byte
# operands only cmp may be skipped, since %ch is a part of %rcx. "only first": only 0 in that field is decoded.
_FORMS = {
    **dict.fromkeys((0x01, 0x09, 0x21, 0x29, 0x31, 0x89), (_RM, 0)),
    **dict.fromkeys((0x03, 0x0B, 0x23, 0x2B, 0x33, 0x8B, 0x8D, 0x63), (_REGISTER, 0)),
    **dict.fromkeys((0x38, 0x39, 0x3A, 0x3B, 0x84, 0x85), (_NOTHING, 0)),
    0x80: (_ONLY_COMPARE, 1),
    0x81: (_BY_FIELD, 4),
    0x83: (_BY_FIELD, 1),
    0xC7: (_ONLY_FIRST, 4),
    0xF6: (_ONLY_FIRST, 1),
    0xF7: (_ONLY_FIRST, 4),
}
_COMPARE, _MOVE = 7, 0xC7
# Opcodes after 0x0f: movzx, movsx, imul, cmov and nop.
_LONG_FORMS = {
    **dict.fromkeys((0xB6, 0xB7, 0xBE, 0xBF, 0xAF, *range(0x40, 0x50)), (_REGISTER, 0)),
    0x1F: (_NOTHING, 0),
}


class ProbePoint(NamedTuple):
    """A place for a probe. ``offset``: the distance from the function's first byte. ``cost``: "cheap" or "dear".
    ``why``: one line to show.
    """

    offset: int
    cost: str
    why: str


def probe_point(head: bytes, machine: int, size: int = 0) -> ProbePoint:
    """Returns the probe point of a function from its first bytes, ``head`` (32 are enough), and its ``size``, 0 if
    unknown.
    """
    if machine != X86_64:
        return ProbePoint(0, "dear", "entry: only x86-64 instructions are decoded")
    at, end = 0, min(len(head), size or len(head))
    while at < end:
        code = head[at:end]
        if name := _emulated(code):
            return ProbePoint(at, "cheap", f"{name} at +{at} is emulated")
        length = _skippable(code)
        if not length or at + length >= end:
            break
        at += length
    return ProbePoint(
        0, "dear", f"entry: no emulated instruction before {head[at : at + 4].hex() or 'the end'} at +{at}"
    )


def point_of(symbol: Symbol) -> ProbePoint:
    """Returns the probe point of a function of this machine's instruction set."""
    return probe_point(symbol.head, _OWN_MACHINE, symbol.size)


def _emulated(code: bytes) -> str:
    """Returns the name of the first instruction if the kernel emulates it, else an empty text."""
    op = code[0]
    second = code[1] if len(code) > 1 else 0
    if 0x50 <= op <= 0x57 or (op == 0x41 and 0x50 <= second <= 0x57):
        return "push"
    if op == 0x90 or (op == 0x66 and second == 0x90):
        return "nop"
    if op == 0xE8:
        return "call"
    if op in (0xE9, 0xEB):
        return "jmp"
    if 0x70 <= op <= 0x7F or (op == 0x0F and 0x80 <= second <= 0x8F):
        return "jcc"
    return ""


def _skippable(code: bytes) -> int:
    """Returns the length of the first instruction if it may be skipped, else 0."""
    if code.startswith(_ENDBR64):
        return 4
    rex, at = 0, 0
    if code[0] & 0xF0 == 0x40:
        rex, at = code[0], 1
    if len(code) <= at:
        return 0
    op = code[at]
    if 0xB8 <= op <= 0xBF:
        register = op - 0xB8 + (8 if rex & 1 else 0)
        return 0 if register in _KEPT else at + 1 + (8 if rex & 8 else 4)
    if op == 0x0F:
        return _with_operands(code, at + 1, rex, _LONG_FORMS)
    return _with_operands(code, at, rex, _FORMS)


def _with_operands(code: bytes, at: int, rex: int, forms: Mapping[int, tuple[str, int]]) -> int:
    """Returns the length of an instruction with a ModRM byte after ``at`` if it may be skipped, else 0."""
    if len(code) <= at + 1 or code[at] not in forms:
        return 0
    writes, immediate = forms[code[at]]
    modrm = code[at + 1]
    mode, field, rm = modrm >> 6, modrm >> 3 & 7, (modrm & 7) + (8 if rex & 1 else 0)
    register = field + (8 if rex & 4 else 0)
    if writes == _BY_FIELD:
        writes = _NOTHING if field == _COMPARE else _RM
    elif writes in (_ONLY_COMPARE, _ONLY_FIRST):
        if field != (_COMPARE if writes == _ONLY_COMPARE else 0):
            return 0
        writes = _RM if code[at] == _MOVE else _NOTHING
    length = at + 2
    if mode != 3:
        # A write to memory could change an argument on the stack.
        if writes == _RM:
            return 0
        length += (modrm & 7 == 4) + {0: 4 if modrm & 7 == 5 else 0, 1: 1, 2: 4}[mode]
        # In mode 0 a SIB byte may come without a base, but with a 4-byte address: not seen at entries of functions.
        if mode == 0 and modrm & 7 == 4:
            return 0
    written = {_RM: rm, _REGISTER: register}.get(writes)
    return 0 if written in _KEPT else length + immediate
