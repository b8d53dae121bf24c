"""Executes the instructions of call frame information. Format: DWARF 5, 6.4.2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import CorruptTarget, UnsupportedTarget
from probing.daemon.elf.cfi_expressions import Cursor

__all__ = ("Cie", "Rule", "State", "execute")

_MAX_INSTRUCTIONS = 65_536
_MAX_REMEMBERED = 256
_MAX_REGISTER = 128


class Rule(NamedTuple):
    """The place of the caller's value of a register.

    ``kind``: ``offset`` (saved at CFA + value), ``value`` (is CFA + value), ``register`` (in register value), ``saved``
    and ``computed`` (an expression gives the address, or the value), ``same``, ``undefined``.
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
    """The row that instructions change. ``cfa``: (register, offset, expression); ``remembered``: a stack of rows."""

    location: int
    cfa: tuple[int, int, bytes] = (-1, 0, b"")
    rules: dict[int, Rule] = field(default_factory=dict)
    remembered: list[tuple[tuple[int, int, bytes], dict[int, Rule]]] = field(default_factory=list)


def execute(cursor: Cursor, state: State, cie: Cie, initial: dict[int, Rule], address: int) -> None:
    """Executes instructions up to their end, or to a location behind ``address``."""
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
            raise UnsupportedTarget("call frame information jumps to an address")
        else:
            _instruct(op, cursor, state, cie, initial)
    raise CorruptTarget("call frame information has no end")


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
    raise UnsupportedTarget(f"call frame information with the unknown instruction {op:#x}")


def _remember(op: int, state: State) -> None:
    """DW_CFA_remember_state and DW_CFA_restore_state."""
    if op == 0x0A:
        if len(state.remembered) >= _MAX_REMEMBERED:
            raise CorruptTarget("call frame information remembers too much")
        state.remembered.append((state.cfa, dict(state.rules)))
    elif not state.remembered:
        raise CorruptTarget("call frame information restores what it never had")
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
        raise CorruptTarget("call frame information speaks of an unknown register")
    return register
