"""Executes the instructions of call frame information, and its expressions, which describe PLT entries, signal frames
and realigned stacks.

Format: DWARF 5, 2.5 and 6.4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import CorruptTarget, UnsupportedTarget

__all__ = (
    "Cie",
    "Cursor",
    "Rule",
    "State",
    "evaluate",
    "execute",
)

_MAX_STEPS = 512
_MAX_DEPTH = 64
_MASK = (1 << 64) - 1

_FIXED = {
    0x08: (1, False),
    0x09: (1, True),
    0x0A: (2, False),
    0x0B: (2, True),
    0x0C: (4, False),
    0x0D: (4, True),
    0x0E: (8, False),
    0x0F: (8, True),
    0x03: (8, False),
}


class Cursor:
    """Reads numbers from ``data``, from ``at`` to ``end``. Raises CorruptTarget past the end."""

    def __init__(self, data: bytes, at: int = 0, end: int | None = None) -> None:
        self.data = data
        self.at = at
        self.end = len(data) if end is None else min(end, len(data))

    @property
    def left(self) -> int:
        return self.end - self.at

    def take(self, size: int) -> bytes:
        if size < 0 or size > self.left:
            raise CorruptTarget("call frame information ends too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value & _MASK
            if shift > 70:
                raise CorruptTarget("a number in call frame information has no end")

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = min(64, 7 * (self.at - start))
        value &= (1 << bits) - 1
        return value - (1 << bits) if value >> (bits - 1) else value


def evaluate(
    expression: bytes, registers: Mapping[int, int], read: Callable[[int, int], int | None], first: int | None = None
) -> int | None:
    """Returns the value of an expression, None when it needs an unknown register or unknown memory.

    ``read(address, size)`` returns a number of ``size`` bytes. ``first``: the value on the stack at the start; None:
    the stack is empty. Raises CorruptTarget for a damaged or endless expression.
    """
    cursor = Cursor(expression)
    stack = [] if first is None else [first]
    for _ in range(_MAX_STEPS):
        if not cursor.left:
            if not stack:
                break
            return stack[-1]
        if len(stack) > _MAX_DEPTH:
            break
        op = cursor.number(1)
        try:
            if not _step(op, cursor, stack, registers, read):
                return None
        except (IndexError, ZeroDivisionError) as e:
            raise CorruptTarget("an expression in call frame information is malformed") from e
    raise CorruptTarget("an expression in call frame information has no value")


def _step(
    op: int,
    cursor: Cursor,
    stack: list[int],
    registers: Mapping[int, int],
    read: Callable[[int, int], int | None],
) -> bool:
    """Executes one operation. Returns False for an unknown register or unknown memory."""
    if op in _FIXED:
        stack.append(cursor.number(*_FIXED[op]) & _MASK)
    elif 0x30 <= op <= 0x4F:  # DW_OP_lit0..31
        stack.append(op - 0x30)
    elif op == 0x10:  # DW_OP_constu
        stack.append(cursor.uleb())
    elif op == 0x11:  # DW_OP_consts
        stack.append(cursor.sleb() & _MASK)
    elif 0x70 <= op <= 0x8F or op == 0x92:  # DW_OP_breg0..31, DW_OP_bregx
        value = registers.get(cursor.uleb() if op == 0x92 else op - 0x70)
        offset = cursor.sleb()
        if value is None:
            return False
        stack.append((value + offset) & _MASK)
    elif op in (0x06, 0x94):  # DW_OP_deref, DW_OP_deref_size
        size = cursor.number(1) if op == 0x94 else 8
        value = read(stack.pop(), size) if 0 < size <= 8 else None
        if value is None:
            return False
        stack.append(value)
    elif op in (0x28, 0x2F):  # DW_OP_bra, DW_OP_skip
        jump = cursor.number(2, signed=True)
        if op == 0x2F or stack.pop():
            cursor.at += jump
            if not 0 <= cursor.at <= cursor.end:
                raise IndexError("an expression jumps to a place outside of it")
    else:
        _arithmetic(op, cursor, stack)
    return True


def _arithmetic(op: int, cursor: Cursor, stack: list[int]) -> None:
    if op == 0x12:  # DW_OP_dup
        stack.append(stack[-1])
    elif op == 0x13:  # DW_OP_drop
        stack.pop()
    elif op in (0x14, 0x15):  # DW_OP_over, DW_OP_pick
        stack.append(stack[-1 - (1 if op == 0x14 else cursor.number(1))])
    elif op == 0x16:  # DW_OP_swap
        stack[-1], stack[-2] = stack[-2], stack[-1]
    elif op == 0x23:  # DW_OP_plus_uconst
        stack.append((stack.pop() + cursor.uleb()) & _MASK)
    elif op in (0x19, 0x1F, 0x20):  # DW_OP_abs, DW_OP_neg, DW_OP_not
        value = stack.pop()
        signed = _signed(value)
        stack.append((abs(signed) if op == 0x19 else -signed if op == 0x1F else ~value) & _MASK)
    elif op in _BINARY:
        right, left = stack.pop(), stack.pop()
        stack.append(_BINARY[op](left, right) & _MASK)
    elif op != 0x96:  # DW_OP_nop
        raise IndexError(f"unknown operation {op:#x}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: lambda a, b: a & b,
    0x1B: lambda a, b: int(abs(_signed(a)) // abs(_signed(b))) * (1 if _signed(a) * _signed(b) >= 0 else -1),
    0x1C: lambda a, b: a - b,
    0x1D: lambda a, b: a % b,
    0x1E: lambda a, b: a * b,
    0x21: lambda a, b: a | b,
    0x22: lambda a, b: a + b,
    0x24: lambda a, b: a << b if b < 64 else 0,
    0x25: lambda a, b: a >> b if b < 64 else 0,
    0x26: lambda a, b: _signed(a) >> min(b, 63),
    0x27: lambda a, b: a ^ b,
    0x29: lambda a, b: int(a == b),
    0x2A: lambda a, b: int(_signed(a) >= _signed(b)),
    0x2B: lambda a, b: int(_signed(a) > _signed(b)),
    0x2C: lambda a, b: int(_signed(a) <= _signed(b)),
    0x2D: lambda a, b: int(_signed(a) < _signed(b)),
    0x2E: lambda a, b: int(a != b),
}


_MAX_INSTRUCTIONS = 65_536
_MAX_REMEMBERED = 256
_MAX_REGISTER = 128


class Rule(NamedTuple):
    """Where the caller's value of a register is.

    ``kind``: ``offset`` (saved at CFA + value), ``value`` (is CFA + value), ``register`` (in the register with the
    number value), ``saved`` (at the address that ``expression`` gives), ``computed`` (is what ``expression`` gives),
    ``same``, ``undefined``.
    """

    kind: str
    value: int = 0
    expression: bytes = b""


@dataclass(frozen=True, slots=True)
class Cie:
    """A common information entry. ``encoding`` is DW_EH_PE_*; ``augmented``: entries have augmentation data."""

    code_align: int
    data_align: int
    return_register: int
    encoding: int
    augmented: bool
    signal: bool
    instructions: bytes


@dataclass(slots=True)
class State:
    """The row that the instructions change. ``cfa``: (register, offset, expression). ``remembered``: the stack of saved
    rows.
    """

    location: int
    cfa: tuple[int, int, bytes] = (-1, 0, b"")
    rules: dict[int, Rule] = field(default_factory=dict)
    remembered: list[tuple[tuple[int, int, bytes], dict[int, Rule]]] = field(default_factory=list)


def execute(cursor: Cursor, state: State, cie: Cie, initial: dict[int, Rule], address: int) -> None:
    """Executes instructions up to their end, or to a location after ``address``."""
    for _ in range(_MAX_INSTRUCTIONS):
        if not cursor.left or state.location > address:
            return
        op = cursor.number(1)
        operand = op & 0x3F
        if op >> 6 == 1:  # DW_CFA_advance_loc
            _advance(state, operand * cie.code_align, address)
        elif op >> 6 == 2:  # DW_CFA_offset
            state.rules[operand] = Rule("offset", cursor.uleb() * cie.data_align)
        elif op >> 6 == 3:  # DW_CFA_restore
            _restore(state, operand, initial)
        elif op in (0x02, 0x03, 0x04):  # DW_CFA_advance_loc1, 2, 4
            _advance(state, cursor.number(1 << (op - 2)) * cie.code_align, address)
        elif op == 0x01:  # DW_CFA_set_loc
            raise UnsupportedTarget("call frame information has the unsupported instruction DW_CFA_set_loc")
        else:
            _instruct(op, cursor, state, cie, initial)
    raise CorruptTarget("a program of call frame information has too many instructions")


def _advance(state: State, delta: int, address: int) -> None:
    state.location = min(state.location + delta, address + 1)


def _instruct(op: int, cursor: Cursor, state: State, cie: Cie, initial: dict[int, Rule]) -> None:
    if op in (0x0A, 0x0B):
        _remember(op, state)
    elif op in (0x0C, 0x12):  # DW_CFA_def_cfa, _sf
        register = _register(cursor)
        state.cfa = (register, cursor.uleb() if op == 0x0C else cursor.sleb() * cie.data_align, b"")
    elif op == 0x0D:  # DW_CFA_def_cfa_register
        state.cfa = (_register(cursor), state.cfa[1], b"")
    elif op in (0x0E, 0x13):  # DW_CFA_def_cfa_offset, _sf
        state.cfa = (state.cfa[0], cursor.uleb() if op == 0x0E else cursor.sleb() * cie.data_align, b"")
    elif op == 0x0F:  # DW_CFA_def_cfa_expression
        state.cfa = (-1, 0, cursor.take(cursor.uleb()))
    elif op == 0x2E:  # DW_CFA_GNU_args_size
        cursor.uleb()
    elif op != 0x00:  # DW_CFA_nop
        register = _register(cursor)
        if op == 0x06:  # DW_CFA_restore_extended
            _restore(state, register, initial)
        else:
            state.rules[register] = _rule(op, cursor, cie)


def _rule(op: int, cursor: Cursor, cie: Cie) -> Rule:
    if op == 0x05:  # DW_CFA_offset_extended
        return Rule("offset", cursor.uleb() * cie.data_align)
    if op in (0x07, 0x08):  # DW_CFA_undefined, same_value
        return Rule("undefined" if op == 0x07 else "same")
    if op == 0x09:  # DW_CFA_register
        return Rule("register", _register(cursor))
    if op in (0x10, 0x16):  # DW_CFA_expression, val_expression
        return Rule("saved" if op == 0x10 else "computed", 0, cursor.take(cursor.uleb()))
    if op in (0x11, 0x15):  # DW_CFA_offset_extended_sf, val_offset_sf
        return Rule("offset" if op == 0x11 else "value", cursor.sleb() * cie.data_align)
    if op == 0x14:  # DW_CFA_val_offset
        return Rule("value", cursor.uleb() * cie.data_align)
    if op == 0x2F:  # DW_CFA_GNU_negative_offset_extended
        return Rule("offset", -cursor.uleb() * cie.data_align)
    raise UnsupportedTarget(f"call frame information has the unknown instruction {op:#x}")


def _remember(op: int, state: State) -> None:
    """Executes DW_CFA_remember_state or DW_CFA_restore_state."""
    if op == 0x0A:
        if len(state.remembered) >= _MAX_REMEMBERED:
            raise CorruptTarget("call frame information saves too many rows")
        state.remembered.append((state.cfa, dict(state.rules)))
    elif not state.remembered:
        raise CorruptTarget("call frame information restores a row that was not saved")
    else:
        state.cfa, state.rules = state.remembered.pop()


def _restore(state: State, register: int, initial: dict[int, Rule]) -> None:
    if register in initial:
        state.rules[register] = initial[register]
    else:
        state.rules.pop(register, None)


def _register(cursor: Cursor) -> int:
    register = cursor.uleb()
    if register > _MAX_REGISTER:
        raise CorruptTarget("call frame information names an unknown register")
    return register
