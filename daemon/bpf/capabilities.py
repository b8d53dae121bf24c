"""Tries which BPF features the kernel and our rights allow, and says what each missing feature costs.

``load_guarded`` tries whether a program may call a global function while it disables preemption. Kernels before the
Linux commit "bpf: Summarize sleepable global subprogs" (in v6.15) refuse such a call, even 6.12, which has the
functions that disable preemption. Whether a function is global is in its BTF, so the attempt loads a BTF of its own.

``lockdown_mode`` reads the kernel's lockdown: in the mode confidentiality not even root may load a program that reads
the kernel's memory.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.cpu_clock import open_cpu_clock
from probing.daemon.bpf.libbpf import kernel_types
from probing.daemon.bpf.perf_events import online_cpus

__all__ = (
    "CONFIDENTIALITY",
    "LOCKDOWN",
    "REMEDY",
    "Capability",
    "Features",
    "capabilities",
    "detect",
    "explained",
    "load_guarded",
    "lockdown_mode",
)

_KPROBE = 2
_KIND_INT, _KIND_FUNC, _KIND_FUNC_PROTO = 1, 12, 13
_GLOBAL, _SIGNED, _BITS = 1, 1 << 24, 32
_MAGIC, _HEADER_BYTES = 0xEB9F, 24
_NAMES = b"\0int\0program\0function\0"
_PROGRAM, _FUNCTION = 3, 4
_FUNCTION_AT = 5
_RETURN_0 = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)


def load_guarded(disable: int, enable: int) -> int:
    """Loads a program that calls a global function while preemption is disabled, and returns its descriptor. Raises
    OSError.

    ``disable`` and ``enable``: BTF ids of the kernel's functions for preemption.
    """
    btf = syscalls.load_btf(_types())
    try:
        return syscalls.load_program(_KPROBE, _code(disable, enable), btf=btf, functions=_FUNCTIONS)
    finally:
        os.close(btf)


# struct bpf_func_info: where each function begins, and its type.
_FUNCTIONS = struct.pack("<IIII", 0, _PROGRAM, _FUNCTION_AT, _FUNCTION)


def _types() -> bytes:
    """Returns the BTF of two global functions ``int (void)`` (include/uapi/linux/btf.h)."""
    types = (
        struct.pack("<IIII", _NAMES.index(b"int"), _KIND_INT << 24, 4, _SIGNED | _BITS),
        struct.pack("<III", 0, _KIND_FUNC_PROTO << 24, 1),
        struct.pack("<III", _NAMES.index(b"program"), _KIND_FUNC << 24 | _GLOBAL, 2),
        struct.pack("<III", _NAMES.index(b"function"), _KIND_FUNC << 24 | _GLOBAL, 2),
    )
    body = b"".join(types)
    return struct.pack("<HBBIIIII", _MAGIC, 1, 0, _HEADER_BYTES, 0, len(body), len(body), len(_NAMES)) + body + _NAMES


def _code(disable: int, enable: int) -> bytes:
    def call(source: int, target: int) -> bytes:
        return struct.pack("<BBhi", 0x85, source << 4, 0, target)

    own, of_kernel = 1, 2
    return call(of_kernel, disable) + call(own, _FUNCTION_AT - 2) + call(of_kernel, enable) + _RETURN_0 + _RETURN_0


_MAP_RINGBUF = 27
_PROG_KPROBE, _PROG_RAW_TRACEPOINT, _PROG_TRACING = 2, 17, 26
_TRACE_RAW_TP = 23
_HELPER_ATTACH_COOKIE = 174
_READ_COOKIE = struct.pack("<BBhi", 0x85, 0, 0, _HELPER_ATTACH_COOKIE) + _RETURN_0
_PREEMPT = ("bpf_preempt_disable", "bpf_preempt_enable")
_EXEC_TYPE = "btf_trace_sched_process_exec"
_FIND_VMA = "bpf_find_vma"
_SWITCH_TYPE = "btf_trace_sched_switch"
# This helper came with 5.13. Kernels that have it also have the atomics that return a value.
_FOR_EACH = "bpf_for_each_map_elem"
# This allocator came with 6.1. Without it the kernel warns of maps of tracing programs that are not preallocated.
_ALLOCATOR = "bpf_mem_cache_alloc"


@dataclass(frozen=True, slots=True)
class Features:
    """The features of this kernel. Without ``uprobe_multi``, uprobes need perf events, and perf events need
    CAP_SYS_ADMIN.
    """

    btf: bool
    ringbuf: bool
    uprobe_multi: bool
    attach_cookie: bool
    perf_link: bool
    event_map: bool
    test_run: bool
    tp_btf: bool
    preempt: bool
    real_inode: bool
    cpu_clock: bool
    off_cpu: bool
    growing_maps: bool

    def without(self, *names: str) -> Features:
        """Returns these features without those called ``names``, as an older kernel would have them."""
        return replace(self, **dict.fromkeys(names, False))


class Capability(NamedTuple):
    """A line of ``probingd check``. ``cost``: what is lost without the feature; ``remedy``: how to get it."""

    name: str
    present: bool
    cost: str
    remedy: str
    reason: str = ""
    # True: we lack the right to try the feature.
    untried: bool = False


def _errno(attempt: Callable[[], int]) -> int:
    """Calls ``attempt``. Returns 0 if it succeeds, else its errno."""
    try:
        fd = attempt()
    except OSError as e:
        return e.errno or errno.EIO
    if fd > 0:
        os.close(fd)
    return 0


def _try_link(attach_type: int, link: Callable[[int], int]) -> int:
    try:
        program = syscalls.load_program(_PROG_KPROBE, _RETURN_0, attach_type)
    except OSError as e:
        return e.errno or errno.EIO
    try:
        return _errno(lambda: link(program))
    finally:
        os.close(program)


def _uprobe_multi() -> int:
    # A folder cannot be probed: a kernel with this kind of link returns EBADF, any other kernel EINVAL.
    error = _try_link(syscalls.UPROBE_MULTI, lambda program: syscalls.link_uprobe_multi(program, "/", [0], [0]))
    return 0 if error == errno.EBADF else error


def _perf_link() -> int:
    # No process has a descriptor of this number: a kernel with this kind of link looks the descriptor up first.
    error = _try_link(0, lambda program: syscalls.link_perf_event(program, (1 << 31) - 1, 0))
    return 0 if error == errno.EBADF else error


def _test_run() -> int:
    try:
        program = syscalls.load_program(_PROG_RAW_TRACEPOINT, _RETURN_0)
    except OSError as e:
        return e.errno or errno.EIO
    try:
        return _errno(lambda: syscalls.run_raw_tracepoint(program, bytes(8)))
    finally:
        os.close(program)


def _cpu_clock() -> int:
    return _errno(lambda: open_cpu_clock(online_cpus()[0], 1))


def _tracepoint(types: dict[str, int], name: str) -> int:
    if name not in types:
        return errno.ENOENT
    return _errno(lambda: syscalls.load_program(_PROG_TRACING, _RETURN_0, _TRACE_RAW_TP, types[name]))


def _preempt(types: dict[str, int]) -> int:
    if not all(name in types for name in _PREEMPT):
        return errno.ENOENT
    return _errno(lambda: load_guarded(*(types[name] for name in _PREEMPT)))


def _try_all() -> dict[str, int]:
    """Tries every feature. Returns the errno by field of Features, 0 for a feature that works."""
    types = kernel_types(*_PREEMPT, _EXEC_TYPE, _FIND_VMA, _SWITCH_TYPE, _FOR_EACH, _ALLOCATOR)
    return {
        "btf": 0 if Path("/sys/kernel/btf/vmlinux").exists() else errno.ENOENT,
        "ringbuf": _errno(lambda: syscalls.create_map(_MAP_RINGBUF, 0, 0, os.sysconf("SC_PAGESIZE"))),
        "uprobe_multi": _uprobe_multi(),
        "attach_cookie": _errno(lambda: syscalls.load_program(_PROG_KPROBE, _READ_COOKIE)),
        "perf_link": _perf_link(),
        "event_map": _errno(syscalls.create_event_map),
        "test_run": _test_run(),
        "tp_btf": _tracepoint(types, _EXEC_TYPE),
        "real_inode": 0 if _FIND_VMA in types else errno.ENOENT,
        "preempt": _preempt(types),
        "cpu_clock": _cpu_clock(),
        "off_cpu": _tracepoint(types, _SWITCH_TYPE) if _FOR_EACH in types else errno.ENOENT,
        "growing_maps": 0 if _ALLOCATOR in types else errno.ENOENT,
    }


def detect() -> Features:
    """Returns the features of this kernel. Trying them takes some 30 ms, mostly to read the kernel's BTF."""
    return Features(**{name: error == 0 for name, error in _try_all().items()})


def _newer(release: str) -> str:
    return f"boot Linux {release} or newer"


# For each missing feature: what is lost without it, and the remedy.
_LACKS = {
    "btf": (
        "no process start times in the kernel: nothing can be loaded",
        "boot a kernel with CONFIG_DEBUG_INFO_BTF, as all current distributions have it",
    ),
    "ringbuf": ("no rings: nothing can be loaded", _newer("5.8")),
    "uprobe_multi": (
        "uprobes go through perf events, which need CAP_SYS_ADMIN",
        f"{_newer('6.6')}, or grant the collector CAP_SYS_ADMIN",
    ),
    "attach_cookie": ("one copy of a program for each symbol", _newer("5.15")),
    "perf_link": (
        "where uprobe_multi and event_map are missing too, probes end with the collector: a restart leaves a gap",
        _newer("5.15"),
    ),
    "event_map": (
        "where uprobe_multi and perf_link are missing too, probes end with the collector: a restart leaves a gap",
        _newer("5.10"),
    ),
    "test_run": ("an operation that never ends is closed only when its process exits", _newer("5.10")),
    "tp_btf": (
        "tracepoints are read through relocated structures instead of typed arguments",
        "boot a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_BPF_EVENTS",
    ),
    "preempt": (
        "none before Linux 6.13; on later preemptible kernels without it, uprobe programs may be preempted",
        "none is needed before Linux 6.13; with CONFIG_DEBUG_INFO_BTF, Linux 6.15 and newer have it",
    ),
    "cpu_clock": (
        "Python stacks are read on demand only: no samples of what runs",
        "grant the collector CAP_PERFMON",
    ),
    "off_cpu": ("samples lack the time that Python threads spend off the CPU", _newer("5.13")),
    "growing_maps": ("maps of CUDA's probes are allocated whole, with a sixteenth of their entries", _newer("6.1")),
    "real_inode": ("a library that several containers share is counted once for each of them", _newer("5.17")),
}


def capabilities() -> list[Capability]:
    """Returns the lines of ``probingd check``. Raises nothing for a missing feature."""
    return [
        Capability(name, error == 0, *_LACKS[name], os.strerror(error) if error else "", error == errno.EPERM)
        for name, error in _try_all().items()
    ]


CONFIDENTIALITY = "confidentiality"
REMEDY = "boot with lockdown=integrity, or without Secure Boot"
LOCKDOWN = Path("/sys/kernel/security/lockdown")
_MAX_REASON = 200


def lockdown_mode() -> str:
    """Returns the kernel's lockdown mode: none, integrity or confidentiality; empty where the kernel
    has no lockdown.
    """
    try:
        # The file lists all modes, with the active mode in brackets.
        return LOCKDOWN.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def explained(error: AttachError | PrivilegeError) -> AttachError | PrivilegeError:
    """Returns ``error`` of a program that cannot be loaded, or an error that names the kernel's lockdown as cause."""
    if lockdown_mode() != CONFIDENTIALITY:
        return error
    message = f"the kernel is locked down (confidentiality) and refuses our programs: {error.message[:_MAX_REASON]}"
    return PrivilegeError(message, hint=REMEDY)
