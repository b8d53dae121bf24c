"""The signal frame by which a thread calls a function: where it lies, and what it restores."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import UnsupportedTarget
from probing.daemon.inject.frame import Registers, signal_frame

RESTORER = 0x7F0000001234
AVX = 0x7


def xstate(size: int = 2696, features: int = 0x2E7, in_use: int = AVX) -> bytes:
    area = bytearray(size)
    struct.pack_into("<Q", area, 464, features)
    struct.pack_into("<Q", area, 512, in_use)
    area[160:168] = b"register"
    return bytes(area)


# More than a frame takes with all registers of AVX-512.
FRAME_BYTES = 8 << 10


def registers(rsp: int = 0x7FFC12345678) -> Registers:
    found = Registers(cs=0x33, ss=0x2B, rsp=rsp, rip=0x401000, rax=7, eflags=0x246, orig_rax=(1 << 64) - 1)
    assert not found.in_system_call
    return found


@given(st.integers(1 << 20, (1 << 47) - 1))
def test_the_frame_lies_below_the_red_zone_and_is_aligned(rsp: int) -> None:
    frame = signal_frame(registers(rsp), 0, xstate(), RESTORER)
    assert frame.address % 16 == 8
    assert frame.address + len(frame.data) <= rsp - 128
    assert frame.address > rsp - FRAME_BYTES
    (state_at,) = struct.unpack_from("<Q", frame.data, 8 + 40 + 184)
    assert state_at % 64 == 0
    assert frame.data[state_at - frame.address :][160:168] == b"register"


def test_the_frame_restores_what_was_there() -> None:
    frame = signal_frame(registers(), 0b1010, xstate(), RESTORER).data
    assert struct.unpack_from("<Q", frame)[0] == RESTORER
    *_, rax, _, rsp, rip, eflags = struct.unpack_from("<18Q", frame, 48)
    assert (rax, rsp, rip, eflags) == (7, 0x7FFC12345678, 0x401000, 0x246)
    assert struct.unpack_from("<4H", frame, 48 + 144) == (0x33, 0, 0, 0x2B)
    # The mask of signals follows struct sigcontext.
    assert struct.unpack_from("<Q", frame, 48 + 256) == (0b1010,)
    # Flags of an alternate stack that no kernel knows: it stays as it is.
    assert struct.unpack_from("<i", frame, 32) == (0x40,)


def test_the_kernel_restores_all_vector_registers() -> None:
    frame = signal_frame(registers(), 0, xstate(2696, 0x2E7), RESTORER)
    state = frame.data[-(2696 + 4) :]
    assert struct.unpack_from("<IIQI", state, 464) == (0x46505853, 2700, 0x2E7, 2696)
    assert state[-4:] == struct.pack("<I", 0x46505845)


def test_tiles_are_left_out_unless_they_are_in_use() -> None:
    tiles = 1 << 18
    frame = signal_frame(registers(), 0, xstate(11008, 0x2E7 | tiles), RESTORER)
    state = frame.data[-(2816 + 4) :]
    assert struct.unpack_from("<IIQI", state, 464) == (0x46505853, 2820, 0x2E7, 2816)
    with pytest.raises(UnsupportedTarget, match="AMX"):
        signal_frame(registers(), 0, xstate(11008, 0x2E7 | tiles, AVX | tiles), RESTORER)


def test_other_threads_are_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="32-bit"):
        signal_frame(Registers(cs=0x23, rsp=1 << 30), 0, xstate(), RESTORER)
    with pytest.raises(UnsupportedTarget, match="vector registers"):
        signal_frame(registers(), 0, bytes(512), RESTORER)
    assert Registers(orig_rax=232).in_system_call
