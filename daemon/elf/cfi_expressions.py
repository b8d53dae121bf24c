"""Evaluates DWARF expressions of call frame information: PLT entries, signal frames, realigned stacks.

DWARF 5, 2.5. Steps and stack depth are bounded, and memory is read only from the copied stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from probing.api.errors import CorruptTarget

__all__ = ("Cursor", "evaluate")

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
    """Reads numbers from ``data`` up to ``end``. Raises CorruptTarget past the end."""

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

    ``read(address, size)`` returns a number of ``size`` bytes; ``first`` is the initial stack. Raises CorruptTarget
    for a damaged or endless expression.
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
            raise CorruptTarget("an expression in call frame information makes no sense") from e
    raise CorruptTarget("an expression in call frame information has no value")


def _step(
    op: int,
    cursor: Cursor,
    stack: list[int],
    registers: Mapping[int, int],
    read: Callable[[int, int], int | None],
) -> bool:
    """Executes one operation; False for an unknown register or unknown memory."""
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
                raise IndexError("a jump out of the expression")
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
