"""Compiles and loads a user's probe in a process with bcc. Finds what the compiler needs: the kernel's headers, and the
offsets in task_struct.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from probing.api.errors import AttachError, ConfigError, InternalError, PrivilegeError, ProbingError
from probing.daemon.bpf.library import library
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Message
from probing.daemon.pool import Child
from probing.daemon.user_probes.c_text import MAPS, TaskOffsets, entries, render
from probing.daemon.user_probes.spec import Spec

__all__ = (
    "Loaded",
    "complaint_of",
    "header_trees",
    "load",
)

_KIND_STRUCT = 4
_MAX_MEMBERS = 2048
_MODULES, _SOURCES = Path("/lib/modules"), Path("/usr/src")
_KCONFIG = "include/linux/kconfig.h"


def _task_offsets() -> TaskOffsets:
    """Returns the offsets of the running kernel, from its BTF. Raises PrivilegeError if it has no BTF."""
    offsets = _member_offsets("task_struct", ("group_leader", "start_boottime"))
    return TaskOffsets(offsets["group_leader"], offsets["start_boottime"])


def _member_offsets(structure: str, members: tuple[str, ...]) -> dict[str, int]:
    # Layouts: include/uapi/linux/btf.h, struct btf_type and struct btf_member.
    lib = library().functions
    kernel = lib.btf__load_vmlinux_btf()
    if not kernel:
        raise PrivilegeError("the kernel has no BTF, which describes its types")
    try:
        offsets: dict[str, int] = {}
        index = lib.btf__find_by_name_kind(kernel, structure.encode(), _KIND_STRUCT)
        address = lib.btf__type_by_id(kernel, index) if index > 0 else None
        if address:
            _, info, _ = struct.unpack("<III", ctypes.string_at(address, 12))
            count = min(info & 0xFFFF, _MAX_MEMBERS)
            for name, _, bits in struct.iter_unpack("<III", ctypes.string_at(address + 12, 12 * count)):
                text = (lib.btf__name_by_offset(kernel, name) or b"").decode(errors="replace")
                if text in members:
                    offsets[text] = (bits & 0xFFFFFF if info >> 31 else bits) // 8
    finally:
        lib.btf__free(kernel)
    if missing := [name for name in members if name not in offsets]:
        raise AttachError(f"the kernel's struct {structure} has no field {missing[0]}")
    return offsets


def header_trees(modules: Path = _MODULES, sources: Path = _SOURCES) -> list[str] | None:
    """Returns the trees of kernel headers to merge; None if bcc itself finds the headers of this kernel.

    Headers of another kernel suffice for probes that read no kernel structure. Raises PrivilegeError if there are no
    headers.
    """
    release = os.uname().release
    if any((modules / release / tree / _KCONFIG).is_file() for tree in ("source", "build")):
        return None
    if Path("/sys/kernel/kheaders.tar.xz").exists():
        return None
    machine = {"x86_64": "x86", "aarch64": "arm64"}.get(platform.machine(), "")
    for trees in _candidates(modules, sources, release):
        complete = any((tree / _KCONFIG).is_file() for tree in trees)
        if complete and any((tree / f"arch/{machine}/include/generated").is_dir() for tree in trees):
            return [str(tree.resolve()) for tree in trees if tree.is_dir()]
    hint = "install linux-headers-amd64 (Debian), linux-headers-generic (Ubuntu) or kernel-devel"
    raise PrivilegeError("there are no kernel headers for bcc", hint=hint)


def _candidates(modules: Path, sources: Path, release: str) -> Iterator[list[Path]]:
    """Yields header trees: this kernel's first, then the newest. systemd may hide ``modules`` from a service."""

    def listed(folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir(), key=lambda path: (release in path.name, path.name), reverse=True)
        except OSError:
            return []

    for module in listed(modules):
        yield [module / "build", module / "source"]
    for tree in [*listed(sources), *listed(sources / "kernels")]:
        # Debian separates the files of a flavour from the common files.
        yield [tree, tree.with_name(f"{tree.name.rpartition('-')[0]}-common")]


_PYTHON = "/usr/bin/python3"
"""The Python that distributions install bcc for."""
TIMEOUT_S = 20.0
_log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("child.py")
_NO_BCC = "install python3-bpfcc (Debian, Ubuntu) or python3-bcc, and the kernel's headers"
_ERROR = re.compile(r"^(\S+:\d+:\d+: (?:fatal )?error: .*)$", re.M)
_MAX_COMPLAINT = 300


@dataclass(slots=True)
class Loaded:
    """Descriptors of the programs, one for each attachment of the spec, and of the maps by name."""

    programs: list[int]
    maps: dict[str, int]

    def close(self) -> None:
        for fd in [*self.programs, *self.maps.values()]:
            os.close(fd)
        self.programs, self.maps = [], {}


def load(
    spec: Spec, folder: Path, scratch: Path, *, multi: bool = True, python: str = _PYTHON, timeout: float = TIMEOUT_S
) -> Loaded:
    """Compiles ``spec`` and lets the kernel verify it, in about half a second. ``multi``: whether the programs are for
    uprobe_multi links. Trees of headers are merged in a temporary directory in ``scratch``.

    Raises ConfigError for code that does not compile, AttachError for a program that the kernel refuses, PrivilegeError
    where bcc or headers are missing; the output of compiler and verifier goes to the daemon's log.
    """
    source = render(spec, folder, _task_offsets())
    header = {"entries": entries(spec, multi=multi), "maps": list(MAPS), "headers": header_trees()}
    with _folder(scratch) as private:
        try:
            # With -I neither the environment nor the working directory can change the imports.
            child = Child([python, "-I", str(_CHILD)], {"TMPDIR": private})
        except OSError as e:
            raise PrivilegeError(f"{python} cannot be run: {e.strerror}", hint=_NO_BCC) from e
        with closing(child):
            try:
                child.channel.send(header, source.encode(), timeout=timeout)
                answer = child.channel.receive(timeout)
            except ChannelTimeout as e:
                what = f"{spec.name}.c was not compiled within {timeout:.0f} s"
                raise ConfigError(what, hint="make it smaller") from e
            except ChannelClosed as e:
                hint = "the daemon's log has its output; it may use at most 4 GB of memory"
                raise InternalError(f"the compiler of {spec.name}.c ended without an answer", hint=hint) from e
    return _loaded(spec, answer)


def _folder(scratch: Path) -> TemporaryDirectory[str]:
    """Returns a directory for the files of a compiler, which may be killed before it removes them."""
    try:
        return TemporaryDirectory(prefix="probing-compiler-", dir=scratch, ignore_cleanup_errors=True)
    except OSError as e:
        hint = "make room, or make it writable for the daemon's user"
        raise InternalError(f"no directory can be made in {scratch}: {e.strerror}", hint=hint) from e


def _loaded(spec: Spec, answer: Message) -> Loaded:
    log = answer.payload.decode(errors="replace")
    expected = len(spec.attach) + len(MAPS)
    try:
        if failed := answer.header.get("failed"):
            raise _failure(spec, str(failed), str(answer.header.get("why", "")), log)
        if len(answer.fds) != expected:
            raise InternalError(f"the compiler of {spec.name}.c returned {len(answer.fds)} of {expected} descriptors")
        fds, answer.fds = answer.fds, []
    finally:
        answer.close_fds()
    count = len(spec.attach)
    return Loaded(fds[:count], dict(zip(MAPS, fds[count:], strict=True)))


def _failure(spec: Spec, failed: str, why: str, log: str) -> ProbingError:
    error: ProbingError
    if failed == "bcc":
        return PrivilegeError(f"bcc is not installed for {_PYTHON}", hint=_NO_BCC)
    complaint = complaint_of(log)
    if failed == "compile":
        hint = "correct the C file; it is compiled again when it has changed"
        error = ConfigError(f"{spec.name}.c does not compile: {complaint or why}", hint=hint)
    else:
        hint = "the daemon's log has the whole output of the kernel's verifier"
        error = AttachError(f"the kernel refuses {spec.name}.c: {complaint or why}", hint=hint)
    _log.warning("%s\n%s", error.message, log)
    return error


def complaint_of(log: str) -> str:
    """Returns the line with the error from the log of the compiler or the verifier; empty if there is none."""
    if found := _ERROR.search(log):
        return found[1][:_MAX_COMPLAINT]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # The verifier's error is the last line before its statistics and the lines that bcc adds.
    ends = [i for i, line in enumerate(lines) if line.startswith("processed ")]
    if ends and ends[-1]:
        return lines[ends[-1] - 1][:_MAX_COMPLAINT]
    return ""
