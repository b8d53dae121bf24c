"""Compiles one probe of a user, in a process under a Python that has bcc; the process ends after its answer.

Only this process loads LLVM. Descriptor 0 is a socket that speaks ``daemon/ipc.py``: one request with the C text, one
answer with the descriptors of the loaded programs and of their maps, or with an error. The process reads no target, and
drops the rights to do so. Only the standard library and bcc are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ("main",)

_FRAME = struct.Struct("!II")
MAX_SOURCE = 1 << 20
MAX_LOG = 256 << 10
MEMORY_BYTES = 4 << 30
CPU_SECONDS = 20
# Capabilities of include/uapi/linux/capability.h: DAC_READ_SEARCH for the formats of tracepoints, SYS_RESOURCE for
# locked memory before 5.11, PERFMON and BPF for loading.
_KEPT = 1 << 2 | 1 << 24 | 1 << 38 | 1 << 39
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _AMBIENT_CLEAR = 1, 38, 47, 4
_BPF, _PROG_LOAD = {"x86_64": 321, "aarch64": 280}, 5
_ARCH = {"x86_64": "x86", "aarch64": "arm64"}


class _Failed(Exception):
    def __init__(self, stage: str, why: str) -> None:
        super().__init__(why)
        self.stage = stage


def main() -> int:
    sock = socket.socket(fileno=os.dup(0))
    _confine()
    header_len, source_len = _FRAME.unpack(_exactly(sock, _FRAME.size))
    if header_len > MAX_SOURCE or source_len > MAX_SOURCE:
        return 1
    request = json.loads(_exactly(sock, header_len))
    source = _exactly(sock, source_len).decode()
    log = os.memfd_create("log")
    # LLVM and the verifier write their messages to the standard streams.
    os.dup2(log, 1)
    os.dup2(log, 2)
    answer: dict[str, object]
    fds: list[int] = []
    try:
        # The object is kept until the answer is sent, since it owns the descriptors.
        loaded, fds = _load(request, source)
        answer = {"ok": True}
    except ModuleNotFoundError:
        loaded, answer = None, {"failed": "bcc"}
    except _Failed as e:
        loaded, answer = None, {"failed": e.stage, "why": str(e)[:500]}
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.fstat(log).st_size
    text = os.pread(log, MAX_LOG, max(0, size - MAX_LOG))
    body = json.dumps(answer).encode()
    socket.send_fds(sock, [_FRAME.pack(len(body), len(text)) + body], fds)
    sock.sendall(text)
    del loaded
    return 0


def _load(request: Mapping[str, Any], source: str) -> tuple[Any, list[int]]:
    bcc: Any = importlib.import_module("bcc")
    with tempfile.TemporaryDirectory(prefix="probing-headers-") as folder:
        if trees := request["headers"]:
            _merge([Path(tree) for tree in trees], Path(folder))
            os.environ["BCC_KERNEL_SOURCE"] = folder
        try:
            program = bcc.BPF(text=source)
        except Exception as e:
            raise _Failed("compile", str(e)) from e
    fds = [_verified(program.dump_func(name.encode()), *kind) for name, *kind in request["entries"]]
    return program, fds + [program[name].map_fd for name in request["maps"]]


def _verified(code: bytes, kind: int, attach_type: int) -> int:
    """Loads the program ``code``, in which bcc has already resolved the maps. bcc itself cannot load it, since bcc has
    no attach types for uprobes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    instructions, text = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(MAX_LOG)
    # The union bpf_attr of BPF_PROG_LOAD, include/uapi/linux/bpf.h.
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        kind,
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(text),
        1,
        len(log),
        ctypes.addressof(log),
        0,
        0,
        b"",
        0,
        attach_type,
    )
    fd = int(libc.syscall(_BPF[platform.machine()], _PROG_LOAD, attributes, len(attributes)))
    if fd < 0:
        number = ctypes.get_errno()
        sys.stderr.write(log.value.decode(errors="replace"))
        raise _Failed("load", os.strerror(number))
    return fd


def _merge(trees: list[Path], into: Path) -> None:
    """Merges trees of kernel headers, since Debian separates the files of a kernel flavour from the common files."""
    for part in ("include", f"arch/{_ARCH[platform.machine()]}/include"):
        target = into / part
        target.mkdir(parents=True)
        for tree in trees:
            if (tree / part).is_dir():
                for entry in (tree / part).iterdir():
                    if not (target / entry.name).is_symlink():
                        (target / entry.name).symlink_to(entry)


def _confine() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    # Two words each for effective, permitted and inheritable: low, then high.
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    low_effective, low_permitted, _, high_effective, high_permitted, _ = struct.unpack("<6I", data.raw)
    effective = (low_effective | high_effective << 32) & _KEPT
    permitted = (low_permitted | high_permitted << 32) & _KEPT
    words = (effective, permitted, 0, effective >> 32, permitted >> 32, 0)
    libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    if libc.capset(header, struct.pack("<6I", *(word & 0xFFFFFFFF for word in words))):
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the collector is gone")
        data += part
    return data


if __name__ == "__main__":
    sys.exit(main())
