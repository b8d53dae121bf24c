"""Finds what the compiler needs from the kernel: offsets in task_struct, and headers."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf.library import library
from probing.daemon.user_probes.c_text import TaskOffsets

__all__ = ("header_trees", "task_offsets")

_KIND_STRUCT = 4
_MAX_MEMBERS = 2048
_MODULES, _SOURCES = Path("/lib/modules"), Path("/usr/src")
_KCONFIG = "include/linux/kconfig.h"


def task_offsets() -> TaskOffsets:
    """Returns the offsets of the running kernel, from its BTF. Raises PrivilegeError where it has none."""
    offsets = _member_offsets("task_struct", ("group_leader", "start_boottime"))
    return TaskOffsets(offsets["group_leader"], offsets["start_boottime"])


def _member_offsets(structure: str, wanted: tuple[str, ...]) -> dict[str, int]:
    # Layouts: include/uapi/linux/btf.h, struct btf_type and struct btf_member.
    lib = library().functions
    kernel = lib.btf__load_vmlinux_btf()
    if not kernel:
        raise PrivilegeError("the kernel says nothing of its types: it has no BTF")
    try:
        found: dict[str, int] = {}
        index = lib.btf__find_by_name_kind(kernel, structure.encode(), _KIND_STRUCT)
        address = lib.btf__type_by_id(kernel, index) if index > 0 else None
        if address:
            _, info, _ = struct.unpack("<III", ctypes.string_at(address, 12))
            count = min(info & 0xFFFF, _MAX_MEMBERS)
            for name, _, bits in struct.iter_unpack("<III", ctypes.string_at(address + 12, 12 * count)):
                text = (lib.btf__name_by_offset(kernel, name) or b"").decode(errors="replace")
                if text in wanted:
                    found[text] = (bits & 0xFFFFFF if info >> 31 else bits) // 8
    finally:
        lib.btf__free(kernel)
    if missing := [name for name in wanted if name not in found]:
        raise AttachError(f"the kernel's struct {structure} has no field {missing[0]}")
    return found


def header_trees(modules: Path = _MODULES, sources: Path = _SOURCES) -> list[str] | None:
    """Returns trees of kernel headers to be merged; None where bcc finds those of this kernel by itself.

    Headers of another kernel suffice for probes that read no kernel structure. Raises PrivilegeError without any.
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
    """Yields trees of this kernel first, then the newest. systemd may hide ``modules`` from a service."""

    def listed(folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir(), key=lambda path: (release in path.name, path.name), reverse=True)
        except OSError:
            return []

    for module in listed(modules):
        yield [module / "build", module / "source"]
    for tree in [*listed(sources), *listed(sources / "kernels")]:
        # Debian separates the files of a flavour from the common ones.
        yield [tree, tree.with_name(f"{tree.name.rpartition('-')[0]}-common")]
