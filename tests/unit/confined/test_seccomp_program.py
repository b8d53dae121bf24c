"""The filter of system calls: its answers on both machines, by a small interpreter, and the kernel's on this one."""

from __future__ import annotations

import errno
import json
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from probing.daemon.confined.seccomp import (
    COLLECTOR,
    INJECTOR,
    READER,
    SERVICE,
    SYSTEM_CALLS,
    calls_can_be_refused,
    program,
)

PID = 4242
ALLOWED = 0x7FFF0000
ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def answer(
    machine: str, call: str | int, *args: int, arch: int | None = None, kept: frozenset[str] = frozenset()
) -> int:
    """0 when the filter allows the call, else the errno."""
    own, column = ARCHES[machine]
    number = call if isinstance(call, int) else SYSTEM_CALLS[call][column]
    assert number is not None
    data = struct.pack("<IIQ6Q", number, own if arch is None else arch, 0, *(*args, *[0] * (6 - len(args))))
    steps = list(struct.iter_unpack("=HBBI", program(machine, PID, kept)))
    at = accumulator = 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:  # BPF_RET | BPF_K
            return 0 if value == ALLOWED else value & 0xFFFF
        else:  # BPF_JMP with BPF_JEQ, BPF_JGT or BPF_JSET, and BPF_K
            met = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[code]
            at += yes if met else no


@pytest.mark.parametrize("machine", ARCHES)
def test_calls_are_refused_by_number_and_by_what_they_are_called_with(machine: str) -> None:
    read_at = {"x86_64": 0, "aarch64": 63}[machine]
    assert answer(machine, read_at) == 0
    for call in ("socket", "connect", "ptrace", "execve", "mount", "bpf", "kill", "unlinkat", "fchmodat"):
        assert answer(machine, call) == errno.EPERM, call
    assert answer(machine, "clone3") == answer(machine, "openat2") == answer(machine, 463) == errno.ENOSYS
    assert answer(machine, 0x40000000 + read_at) == errno.ENOSYS
    assert answer(machine, read_at, arch=0x40000003) == errno.EPERM
    assert answer(machine, "clone", 0x10000 | 0x100) == 0
    assert answer(machine, "clone", 0x100) == errno.EPERM
    assert answer(machine, "openat", 0, 0, 0o2000000) == 0
    for flags in (0o1, 0o2, 0o100, 0o1000):
        assert answer(machine, "openat", 0, 0, flags) == errno.EACCES
    assert answer(machine, "tgkill", PID) == answer(machine, "prlimit64", PID) == answer(machine, "prlimit64", 0) == 0
    assert answer(machine, "tgkill", 1) == answer(machine, "prlimit64", 1) == errno.EPERM


def test_all_calls_are_refused_on_both_machines_where_they_exist() -> None:
    looked_at = {"clone", "open", "openat", "tgkill", "prlimit64"}
    for name, numbers in SYSTEM_CALLS.items():
        for machine, (_, column) in ARCHES.items():
            if numbers[column] is not None and name not in looked_at:
                assert answer(machine, name) in (errno.EPERM, errno.ENOSYS), name


@pytest.mark.parametrize("machine", ARCHES)
def test_what_readers_the_service_and_the_collector_keep(machine: str) -> None:
    numbers = ARCHES[machine][1]
    there = {name for name, found in SYSTEM_CALLS.items() if found[numbers] is not None}
    for kept in (READER, INJECTOR, SERVICE, COLLECTOR):
        assert kept <= SYSTEM_CALLS.keys()
        for call in there & kept:
            assert answer(machine, call, kept=kept) == 0, call
        for call in there - kept - {"clone", "open", "openat", "tgkill", "prlimit64"}:
            assert answer(machine, call, kept=kept) in (errno.EPERM, errno.ENOSYS), call
        for call in ("ptrace", "process_vm_writev", "mount", "init_module", "open_by_handle_at", "setuid", "unshare"):
            assert answer(machine, call, kept=kept) == (0 if call in kept else errno.EPERM)
        assert kept is INJECTOR or not kept & {"ptrace", "process_vm_writev"}
    for kept in (READER, INJECTOR, SERVICE):
        assert answer(machine, "openat", 0, 0, 1, kept=kept) == errno.EACCES
        assert answer(machine, "execve", kept=kept) == answer(machine, "kill", kept=kept) == errno.EPERM
        assert answer(machine, "clone", 0x100, kept=kept) == errno.EPERM
    assert answer(machine, "socket", kept=READER) == errno.EPERM
    assert answer(machine, "bpf", kept=SERVICE) == answer(machine, "process_vm_readv", kept=SERVICE) == errno.EPERM


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_numbers_are_those_of_the_kernels_headers(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header} on this machine")
    known = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())}
    ours = {name: numbers[column] for name, numbers in SYSTEM_CALLS.items() if name in known}
    assert len(ours) > 90
    assert ours == {name: known[name] for name in ours}


@pytest.mark.skipif(not calls_can_be_refused(), reason=f"no filters on this kernel and {platform.machine()}")
def test_the_kernel_refuses_them() -> None:
    script = """
import json, os, socket, subprocess, threading
from probing.daemon.confined.sandbox import confine
confine(["/"])
out = {}
def attempt(name, action):
    try:
        action()
        out[name] = "done"
    except OSError as e:
        out[name] = e.strerror
def everything():
    attempt("read", lambda: open("/etc/hostname").read())
    attempt("socket", socket.socket)
    attempt("program", lambda: subprocess.run(["/bin/true"]))
    attempt("fork", os.fork)
    attempt("kill", lambda: os.kill(1, 0))
    attempt("mode", lambda: os.chmod("/tmp", 0o1777))
    attempt("write", lambda: open("/dev/null", "w"))
thread = threading.Thread(target=everything); thread.start(); thread.join()
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    out = json.loads(done.stdout)
    assert out.pop("read") == "done"
    assert set(out.values()) <= {"Operation not permitted", "Permission denied"}
