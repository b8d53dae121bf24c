"""Unwinds a C stack from a copy of its memory with call frame information, without stopping the thread.

Only the stack and instruction pointers of a blocked thread are known at first. Callee-saved registers become known with
the frames that restore them. The CFA (canonical frame address) of a frame may depend on a register that is still
unknown: rbp, in functions that keep a frame pointer. In this case the CFA is computed from the function's first
instructions; the result counts if a return address lies directly below it. If this fails, as in functions with stacks
of variable size, the CFA is searched among the return addresses further out. A stack with a searched CFA is never
reported as whole, because an old return address can look like the current one.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import CorruptTarget
from probing.daemon.elf.cfi import Row, Rule
from probing.daemon.elf.cfi_programs import evaluate
from probing.daemon.python_stack.native.modules import CodeSpace, Place
from probing.daemon.python_stack.native.payload import StackCopy

__all__ = ("MAX_FRAMES", "CFrame", "CStack", "walk")

MAX_FRAMES = 256
# DWARF numbers of x86-64 registers: System V ABI, figure 3.36.
_RBP, _RSP, _RIP = 6, 7, 16
_SAVED = (3, 6, 12, 13, 14, 15)
_MAX_SEARCH = 16 << 10
_MAX_CANDIDATES = 16
_MASK = (1 << 64) - 1

# call through a register or memory: FF /2 with all its operands, at the end of the matched bytes.
_INDIRECT_CALL = re.compile(
    rb"\xff(?:[\xd0-\xd7]|[\x10-\x13\x16\x17]|\x14.|\x15.{4}|[\x50-\x53\x55-\x57].|\x54.."
    rb"|[\x90-\x93\x95-\x97].{4}|\x94.{5})\Z",
    re.DOTALL,
)
_PLT = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?(?:\xf2)?\xff\x25", re.DOTALL)
_ANYWHERE = -1
# sub imm8, %rsp and sub imm32, %rsp, among the first bytes of a function.
_TAKES_STACK = re.compile(rb"\x48(?:\x83\xec([\x00-\x7f])|\x81\xec(.{3}\x00))", re.DOTALL)
_PROLOGUE = 96
# Signs of a stack of variable or aligned size: sub from and mov to %rsp (except from %rbp), and `and imm, %rsp`.
_MOVES_STACK = re.compile(
    rb"[\x48\x4c](?:\x29[\xc4\xcc\xd4\xdc\xec\xf4\xfc]|\x89[\xc4\xcc\xd4\xdc\xf4\xfc])"
    rb"|[\x48\x49](?:\x2b[\xe0-\xe7]|\x8b[\xe0-\xe3\xe6\xe7])|\x49\x8b\xe5|\x4c\x89\xec|\x48[\x81\x83]\xe4"
)
_MAX_FUNCTION = 64 << 10

_Registers = dict[int, int]


class CFrame(NamedTuple):
    """A frame of a C stack. ``ip``: the return address, or the next instruction of the innermost function. ``place``:
    the place of the call before ``ip``; None if it is outside of all mappings.
    """

    ip: int
    place: Place | None


@dataclass(slots=True)
class CStack:
    """The frames of a C stack, innermost first. ``reason``: why outer frames are missing; empty for a whole stack."""

    frames: list[CFrame] = field(default_factory=list)
    reason: str = ""


class _End(Exception):
    pass


def walk(copy: StackCopy, space: CodeSpace, deadline: float = math.inf) -> CStack:
    """Returns the frames of a thread that are found until ``deadline``, a time of time.monotonic(). Raises
    ``modules.FileNeeded`` while a file of ``space`` is missing.
    """
    way = _Walk(copy, space, deadline)
    stack = way.follow({_RSP: copy.sp, _RIP: copy.pc}, exact=True, guesses=True)
    if way.searched and not stack.reason:
        stack.reason = "the position of a frame was guessed"
    return stack


class _Walk:
    def __init__(self, copy: StackCopy, space: CodeSpace, deadline: float) -> None:
        self._low = copy.low
        self._data = copy.data
        self._space = space
        self._deadline = deadline
        self.searched = False

    def follow(self, registers: _Registers, *, exact: bool, guesses: bool) -> CStack:
        """Unwinds from a frame outwards. ``exact``: the frame's instruction is the next to run, not a return
        address.
        """
        stack = CStack()
        try:
            while registers[_RIP]:
                if len(stack.frames) >= MAX_FRAMES:
                    raise _End(f"there are more than {MAX_FRAMES} frames")
                if time.monotonic() > self._deadline:
                    raise _End("there was no time left")
                ip = registers[_RIP]
                place = self._space.place(ip if exact else ip - 1)
                if place is None and stack.frames:
                    raise _End("a return address does not point to code")
                stack.frames.append(CFrame(ip, place))
                row = place.module.row(place.address) if place and place.module and place.address is not None else None
                registers = self._caller(place, row, registers, guesses)
                exact = row is not None and row.signal
        except _End as e:
            stack.reason = str(e)
        return stack

    def _caller(self, place: Place | None, row: Row | None, registers: _Registers, guesses: bool) -> _Registers:
        if row is None:
            return self._by_frame_pointer(place, registers)
        if row.rules.get(row.return_register, Rule("same")).kind == "undefined":
            return {_RIP: 0}  # a return address of 0 marks the outermost function
        try:
            cfa = self._cfa(row, registers)
            if cfa is None and row.cfa_register == _RBP and guesses and place is not None:
                cfa = self._expected(place, row, registers[_RSP])
                if cfa is None:
                    cfa = self._search(place, row, registers)
                    self.searched = self.searched or cfa is not None
            if cfa is None:
                raise _End("the position of a frame depends on an unknown register")
            if cfa <= registers[_RSP] and not row.signal:
                raise _End("the stack does not grow")
            return self._restored(row, cfa, registers)
        except CorruptTarget as e:
            raise _End(e.message) from e

    def _cfa(self, row: Row, registers: _Registers) -> int | None:
        if row.cfa_expression:
            return evaluate(row.cfa_expression, registers, self._read)
        base = registers.get(row.cfa_register)
        return None if base is None else (base + row.cfa_offset) & _MASK

    def _restored(self, row: Row, cfa: int, registers: _Registers) -> _Registers:
        """Returns the caller's registers that are known after this frame."""
        restored: _Registers = {_RSP: cfa}
        for register in _SAVED:
            if register not in row.rules and register in registers:
                restored[register] = registers[register]
        for register, rule in row.rules.items():
            value = self._by_rule(register, rule, cfa, registers)
            if value is not None:
                restored[_RIP if register == row.return_register else register] = value
            elif register == _RSP:
                raise _End("the stack continues outside of the copy")
        if _RIP not in restored:
            raise _End("the copy of the stack ends")
        return restored

    def _by_rule(self, register: int, rule: Rule, cfa: int, registers: _Registers) -> int | None:
        if rule.kind == "offset":
            return self._read(cfa + rule.value, 8)
        if rule.kind == "same":
            return registers.get(register)
        if rule.kind == "value":
            return (cfa + rule.value) & _MASK
        if rule.kind == "register":
            return registers.get(rule.value)
        if rule.kind in ("saved", "computed"):
            value = evaluate(rule.expression, registers, self._read, cfa)
            return self._read(value, 8) if value is not None and rule.kind == "saved" else value
        return None

    def _by_frame_pointer(self, place: Place | None, registers: _Registers) -> _Registers:
        """Returns the registers of the caller of a function without call frame information, if it keeps a frame
        pointer.
        """
        base = registers.get(_RBP, 0)
        above, back = self._read(base, 8), self._read(base + 8, 8)
        if base >= registers[_RSP] and above is not None and back and above > base and self._call(back) is not None:
            return {_RBP: above, _RSP: base + 16, _RIP: back}
        name = place.mapping.path.rpartition("/")[2] if place else ""
        raise _End(f"{name or 'the code'} has no call frame information")

    def _expected(self, place: Place, row: Row, sp: int) -> int | None:
        """Returns the CFA of a function that keeps rbp and allocates a stack of fixed size in its prologue."""
        if place.module is None or place.address is None:
            return None
        code = place.module.code(place.offset - (place.address - row.start), min(row.size, _MAX_FUNCTION))
        if row.cfa_offset != 16 or not code or _MOVES_STACK.search(code):
            return None
        sizes = {0, *(int.from_bytes(m[1] or m[2], "little") for m in _TAKES_STACK.finditer(code, 0, _PROLOGUE))}
        pushed = sum(1 for register, rule in row.rules.items() if register in _SAVED and rule.kind == "offset")
        for size in sorted(sizes):
            cfa = sp + size + 8 * pushed + 8
            if self._call(self._word(cfa - 8)) is not None:
                return cfa
        return None

    def _search(self, place: Place, row: Row, registers: _Registers) -> int | None:
        """Returns the CFA of a function whose rbp is unknown, or None if the search fails."""
        here = place.mapping.start + row.start - (place.address or 0) + place.offset - place.mapping.offset
        likely = None
        for candidate in self._candidates(row, registers[_RSP]):
            target = self._call(self._word(candidate - 8))
            if target == here:
                return candidate
            if target == _ANYWHERE and likely is None:
                rest = self.follow(self._restored(row, candidate, registers), exact=False, guesses=False)
                # If the same function comes again, the candidate is an old frame of an earlier recursive call.
                if not rest.reason and not any(self._within(frame, place, row) for frame in rest.frames):
                    likely = candidate
        return likely

    def _within(self, frame: CFrame, place: Place, row: Row) -> bool:
        if frame.place is None or frame.place.module is not place.module or frame.place.address is None:
            return False
        other = place.module.row(frame.place.address) if place.module else None
        return other is not None and other.start == row.start

    def _candidates(self, row: Row, sp: int) -> Iterator[int]:
        """Yields possible CFAs. Below a possible CFA lie a return address and a plausible rbp."""
        count = 0
        rule = row.rules.get(_RBP)
        for slot in range(-(-sp // 8) * 8, sp + _MAX_SEARCH, 8):
            value = self._read(slot, 8)
            if value is None or count >= _MAX_CANDIDATES:
                return
            if self._space.holds(value - 1) is None or self._call(value) is None:
                continue
            saved = self._read(slot + 8 + rule.value, 8) if rule and rule.kind == "offset" else None
            # If the caller's rbp is a frame pointer, it points further out than this slot.
            if saved is None or not self._low <= saved <= slot:
                count += 1
                yield slot + 8

    def _call(self, ip: int) -> int | None:
        """Returns the target of the call before ``ip``; _ANYWHERE for an indirect call, None if there is no call."""
        place = self._space.place(ip - 1)
        if place is None or place.module is None or place.offset < 7:
            return None
        code = place.module.code(place.offset - 6, 7)
        if len(code) == 7 and code[2] == 0xE8:  # call rel32
            target = ip + int.from_bytes(code[3:], "little", signed=True)
            leads = self._space.place(target)
            begin = leads.module.code(leads.offset, 8) if leads and leads.module else b""
            # The start of a PLT entry: an indirect jump, with or without endbr64.
            return _ANYWHERE if _PLT.match(begin) else target
        return _ANYWHERE if _INDIRECT_CALL.search(code) else None

    def _word(self, address: int) -> int:
        return self._read(address, 8) or 0

    def _read(self, address: int, size: int) -> int | None:
        at = address - self._low
        if at < 0 or at + size > len(self._data):
            return None
        return int.from_bytes(self._data[at : at + size], "little")
