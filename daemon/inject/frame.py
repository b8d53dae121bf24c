"""Builds the signal frame by which a stopped thread calls one function and then goes on by itself.

The thread is resumed at the function, on a stack that looks as if the kernel had delivered a signal: the function
returns into the C library's restorer, and rt_sigreturn loads every register again. So the thread needs no tracer to get
back to where it was, and the death of the tracer, at any moment, changes nothing for it.

Layout: struct rt_sigframe and struct ucontext (arch/x86/include/asm/sigframe.h, arch/x86/include/uapi/asm/ucontext.h),
struct sigcontext and struct _fpx_sw_bytes (arch/x86/include/uapi/asm/sigcontext.h) of Linux 5.10 to 6.18; x86-64 only.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget

__all__ = ("Frame", "Registers", "signal_frame")


_NAMES = """
r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs
"""
_IN_CONTEXT = """
r8 r9 r10 r11 r12 r13 r14 r15 rdi rsi rbp rbx rdx rax rcx rsp rip eflags
"""


class Registers(ctypes.Structure):
    """struct user_regs_struct (arch/x86/include/asm/user_64.h)."""

    _fields_ = [(name, ctypes.c_uint64) for name in _NAMES.split()]

    @property
    def in_system_call(self) -> bool:
        """Whether the thread was in a system call. In a system call orig_rax is the call's number; after an interrupt
        it is negative.
        """
        return not int(self.orig_rax) >> 63


class Frame(NamedTuple):
    """A signal frame: its bytes, and the address on the stack at which the called function finds it."""

    address: int
    data: bytes


_RED_ZONE = 128
_CODE_SEGMENT = 0x33
# The fields in order: pretcode; uc_flags, uc_link, uc_stack; the registers and segments of struct sigcontext; err,
# trapno, oldmask, cr2, fpstate; reserved1; uc_sigmask; struct siginfo.
_FRAME = struct.Struct("<Q QQ QiiQ 18Q 4H 5Q 64x Q 128x")
# UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS.
_FLAGS = 1 | 2 | 4
# sigreturn sets the alternate stack from the frame and ignores EINVAL, so invalid flags leave this stack as it is.
_NO_SUCH_FLAGS = 0x40
_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
# Offsets in the XSAVE area: the mask of features, as PTRACE_GETREGSET writes it (xstate_fx_sw_bytes), and XSTATE_BV.
_SOFTWARE, _FEATURES_IN_USE = 464, 512
_LEAST_XSTATE = 576
# AMX's tiles (TILEDATA) are at the end of the XSAVE area. A frame must not contain tiles if the thread has no
# permission for them, which is the case for most threads.
_TILES, _TILES_AT = 1 << 18, 2816


def signal_frame(registers: Registers, blocked: int, xstate: bytes, restorer: int) -> Frame:
    """Returns the frame from which rt_sigreturn restores ``registers``, the signal mask ``blocked`` and ``xstate``.

    ``xstate``: the bytes that PTRACE_GETREGSET returns for NT_X86_XSTATE. ``restorer``: address of the C library's code
    that calls rt_sigreturn. Raises UnsupportedTarget if a frame cannot hold the thread's registers.
    """
    if registers.cs != _CODE_SEGMENT:
        raise UnsupportedTarget(
            "the main thread runs 32-bit code", hint="only 64-bit processes can run code on request"
        )
    state = _saved_state(xstate)
    state_at = (int(registers.rsp) - _RED_ZONE - len(state)) & -64
    # At the first instruction of a function the stack pointer is 8 below a multiple of 16.
    address = ((state_at - _FRAME.size) & -16) - 8
    head = _FRAME.pack(
        restorer,
        _FLAGS,
        0,
        0,
        _NO_SUCH_FLAGS,
        0,
        0,
        *(getattr(registers, name) for name in _IN_CONTEXT.split()),
        *(registers.cs, registers.gs & 0xFFFF, registers.fs & 0xFFFF, registers.ss),
        *(0, 0, 0, 0, state_at),
        blocked,
    )
    return Frame(address, head.ljust(state_at - address, b"\0") + state)


def _saved_state(xstate: bytes) -> bytes:
    """Returns the XSAVE area with the magic numbers that the kernel puts into frames. Without these numbers, the kernel
    would not restore the whole area.
    """
    if len(xstate) < _LEAST_XSTATE:
        raise UnsupportedTarget(
            "the vector registers of the main thread cannot be read", hint="CPU and kernel must support XSAVE"
        )
    (features,) = struct.unpack_from("<Q", xstate, _SOFTWARE)
    (in_use,) = struct.unpack_from("<Q", xstate, _FEATURES_IN_USE)
    if features & _TILES:
        if in_use & _TILES:
            raise UnsupportedTarget("the main thread uses the tiles of AMX", hint="ask again when it uses no tiles")
        features &= ~_TILES
        xstate = xstate[:_TILES_AT]
    area = bytearray(xstate)
    struct.pack_into("<IIQI28x", area, _SOFTWARE, _MAGIC1, len(area) + 4, features, len(area))
    return bytes(area) + struct.pack("<I", _MAGIC2)
