"""Stops a thread for about 200 us with ptrace, and makes it call one function when it is resumed.

If the tracer dies, the thread goes on as it is at that moment. So the changes are made in an order in which the thread
is unharmed after each change: first unused memory is written, then all registers are set at once (``frame``), then the
thread is detached.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from probing.api.errors import PrivilegeError, ProcessGone, TargetError
from probing.daemon.inject.frame import Registers, signal_frame
from probing.daemon.processes.memory import ProcessMemory

__all__ = ("Stop", "is_traced", "thread_stopped", "write_memory")

# include/uapi/linux/ptrace.h, include/uapi/linux/elf.h, include/uapi/linux/wait.h.
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_GETREGS, _SETREGS, _GETREGSET, _GETSIGMASK, _GET_RSEQ = 12, 13, 0x4204, 0x420A, 0x420F
_NT_X86_XSTATE, _EVENT_STOP, _WALL = 0x202, 128, 0x40000000
_SIGTRAP = 5
# A thread stops within microseconds, unless it waits for a CPU, or is in an uninterruptible wait.
_STOP_S, _LOOK_S = 2.0, 20e-6
_MAX_XSTATE = 16 << 10
_SEIZURES = 3
# System calls that the kernel does not restart after a stop (signal(7)). We restart them, or else they would fail with
# EINTR.
_NOT_RESTARTED = frozenset((232, 281, 441, 65, 220, 128, 208, 333))
_EINTR, _RESTART = -errno.EINTR & (1 << 64) - 1, -513 & (1 << 64) - 1
_RSEQ = struct.Struct("<QII")
# struct rseq_cs: version, flags, start_ip, post_commit_offset.
_CRITICAL = struct.Struct("<IIQQ")

_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_writev = _libc.process_vm_writev
_writev.restype = ctypes.c_ssize_t
_writev.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Range),
    ctypes.c_ulong,
    ctypes.POINTER(_Range),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Writes ``data`` at ``address`` of the process. Raises ProcessGone, PrivilegeError or TargetError."""
    buffer = ctypes.create_string_buffer(data, len(data))
    local, remote = _Range(ctypes.addressof(buffer), len(data)), _Range(address, len(data))
    count = _writev(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if count != len(data):
        raise _error(pid, ctypes.get_errno() if count < 0 else errno.EFAULT, "has memory that cannot be written")


class Stop:
    """The stopped thread ``tid``, which is not in a system call.

    Times of time.monotonic(): ``since`` is the last moment at which the thread had not yet stopped, and ``until`` is
    the moment at which it was resumed.
    """

    def __init__(self, tid: int, registers: Registers, since: float) -> None:
        self.tid = tid
        self.registers = registers
        self.since = self.until = since

    def is_restartable_sequence(self) -> bool:
        """Returns whether the thread is in a restartable sequence (rseq(2)), which the kernel aborts on resumption."""
        configuration = ctypes.create_string_buffer(32)
        if _ptrace(_GET_RSEQ, self.tid, 32, ctypes.addressof(configuration)) < 0:
            return False  # a kernel before 5.13, or without rseq
        area, size, _ = _RSEQ.unpack_from(configuration.raw)
        if not area or not size:
            return False
        memory = ProcessMemory(self.tid)
        (at,) = struct.unpack("<Q", memory.read_many([(area + 8, 8)])[0] or bytes(8))
        if not at:
            return False
        critical = memory.read_many([(at, _CRITICAL.size)])[0] or bytes(_CRITICAL.size)
        _, _, start, length = _CRITICAL.unpack(critical)
        return bool(start <= self.registers.rip < start + length)

    def call(self, function: int, arguments: Sequence[int], restorer: int, *, result: int = 0) -> None:
        """Makes the thread call ``function`` when it is resumed, and then continue where it was stopped. If this method
        is called again, the thread makes the later call first.

        ``arguments`` go into the registers of a C function. The fourth also goes into R10, for system calls.
        ``result``: the value of RAX at the call, which is the number of a system call. Raises TargetError if the
        thread's stack has no room.
        """
        blocked = ctypes.c_uint64()
        self._ask(_GETSIGMASK, 8, ctypes.addressof(blocked))
        frame = signal_frame(self.registers, blocked.value, self._xstate(), restorer)
        try:
            write_memory(self.tid, frame.address, frame.data)
        except ProcessGone:
            raise
        except TargetError as e:
            raise TargetError(f"the stack of thread {self.tid} has no room for a signal frame", hint="ask again") from e
        changed = Registers.from_buffer_copy(self.registers)
        first = (*arguments, *[0] * (6 - len(arguments)))
        changed.rdi, changed.rsi, changed.rdx, changed.r10, changed.r8, changed.r9 = first
        changed.rcx, changed.rax = first[3], result
        changed.rip, changed.rsp, changed.orig_rax = function, frame.address, (1 << 64) - 1
        # The direction flag is clear at a call.
        changed.eflags &= ~0x400
        self._ask(_SETREGS, 0, ctypes.addressof(changed))
        self.registers = changed

    def _xstate(self) -> bytes:
        buffer = ctypes.create_string_buffer(_MAX_XSTATE)
        into = _Range(ctypes.addressof(buffer), _MAX_XSTATE)
        self._ask(_GETREGSET, _NT_X86_XSTATE, ctypes.addressof(into))
        return buffer.raw[: into.size]

    def _ask(self, request: int, address: int, data: int) -> None:
        if _ptrace(request, self.tid, address, data) < 0:
            raise _error(self.tid, ctypes.get_errno(), "cannot be examined")


@contextmanager
def thread_stopped(tid: int) -> Iterator[Stop | None]:
    """Context manager that stops the thread while its body runs. Yields None if the thread is in a system call, gets a
    signal, is stopped by job control, or is traced by another process, such as another injector.

    Raises ProcessGone, PrivilegeError, or TargetError if the thread does not stop.
    """
    with _urgency():
        yield from _stopped(tid)


@contextmanager
def _urgency() -> Iterator[None]:
    """Context manager that runs its body with real-time priority, where RLIMIT_RTPRIO allows this.

    With ordinary priority on busy CPUs, the thread would stay stopped until its tracer gets a CPU. That takes
    milliseconds, because the kernel preempts ordinary threads only at the next tick (CONFIG_PREEMPT_LAZY).
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def _stopped(tid: int) -> Iterator[Stop | None]:
    if not _seized(tid):
        yield None
        return
    signal, stop = 0, None
    try:
        if _ptrace(_INTERRUPT, tid, 0, 0) < 0:
            raise _error(tid, ctypes.get_errno(), "cannot be stopped")
        status, since = _wait(tid)
        if status >> 16 != _EVENT_STOP:
            # The thread stopped for a signal first. PTRACE_DETACH delivers this signal.
            signal = os.WSTOPSIG(status)
            yield None
            return
        registers = Registers()
        if _ptrace(_GETREGS, tid, 0, ctypes.addressof(registers)) < 0:
            raise _error(tid, ctypes.get_errno(), "cannot be examined")
        if registers.in_system_call:
            _restart(tid, registers)
            yield None
        elif os.WSTOPSIG(status) != _SIGTRAP:
            yield None  # it is stopped by job control
        else:
            stop = Stop(tid, registers, since)
            yield stop
    finally:
        # A thread that has not stopped cannot be detached now. The kernel detaches it when this process ends.
        _ptrace(_DETACH, tid, 0, signal)
        if stop is not None:
            stop.until = time.monotonic()


def _seized(tid: int) -> bool:
    """Returns whether the calling thread now traces ``tid``. False: another process traces it."""
    for _ in range(_SEIZURES):
        if _ptrace(_SEIZE, tid, 0, 0) == 0:
            return True
        if (code := ctypes.get_errno()) != errno.EPERM:
            raise _error(tid, code, "cannot be traced")
        if is_traced(tid):
            return False
        # The other tracer may have ended in the meantime, so the attempt is repeated.
    raise _error(tid, errno.EPERM, "cannot be traced")


def is_traced(tid: int) -> bool:
    """Returns whether a process traces the thread."""
    try:
        with open(f"/proc/{tid}/status", "rb") as file:
            return not re.search(rb"^TracerPid:\t0$", file.read(), re.MULTILINE)
    except OSError:
        return False


def _wait(tid: int) -> tuple[int, float]:
    """Returns the status of waitpid(2) once the thread has stopped, and the last time at which it had not stopped."""
    since = time.monotonic()
    deadline = since + _STOP_S
    while True:
        try:
            changed, status = os.waitpid(tid, os.WNOHANG | _WALL)
        except ChildProcessError:
            raise ProcessGone(f"thread {tid} exited") from None
        if changed:
            if not os.WIFSTOPPED(status):
                raise ProcessGone(f"thread {tid} exited")
            return status, since
        if time.monotonic() > deadline:
            raise TargetError(
                f"thread {tid} does not stop: it is in an uninterruptible wait, as in vfork",
                hint="ask again; `probingctl stacks` shows what it waits for",
            )
        since = time.monotonic()
        time.sleep(_LOOK_S)


def _restart(tid: int, registers: Registers) -> None:
    """Restarts a system call that the stop interrupted, if the kernel itself would not restart it."""
    if registers.orig_rax in _NOT_RESTARTED and registers.rax == _EINTR and not _signals_pend(tid):
        registers.rax = _RESTART  # ERESTARTNOINTR: again, with the same arguments
        _ptrace(_SETREGS, tid, 0, ctypes.addressof(registers))


def _signals_pend(tid: int) -> bool:
    try:
        with open(f"/proc/{tid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        pending = int(lines[b"SigPnd"], 16) | int(lines[b"ShdPnd"], 16)
        return bool(pending & ~int(lines[b"SigBlk"], 16))
    except (OSError, KeyError, ValueError):
        return True


def _error(tid: int, code: int, what: str) -> TargetError | PrivilegeError:
    if code == errno.ESRCH:
        return ProcessGone(f"thread {tid} exited")
    if code == errno.EPERM:
        return PrivilegeError(
            f"thread {tid} {what}: {os.strerror(code)}",
            hint="this needs CAP_SYS_PTRACE, kernel.yama.ptrace_scope below 3 and no other tracer",
        )
    return TargetError(f"thread {tid} {what}: {os.strerror(code)}", hint="ask again")
