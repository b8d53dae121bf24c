"""Loads BPF objects by libbpf, called through ctypes: relocates them, makes maps, loads programs. ``session`` attaches
them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf.btf import Btf
from probing.daemon.bpf.library import Printer, library

__all__ = ("Object", "kernel_types")

_LOG_BYTES = 1 << 20
# BPF_LOG_STATS of linux/bpf_verifier.h: the verifier prints only its counts, at the end.
_LOG_STATISTICS, _STATISTICS_BYTES = 4, 1 << 16
_INSTRUCTION_BYTES = 8
_MESSAGES = 40
# BPF_F_NO_PREALLOC of include/uapi/linux/bpf.h. A map that is preallocated gets fewer entries, by the factor _LESS.
_NO_PREALLOC, _LESS = 1, 16
_BTF_KIND_TYPEDEF, _BTF_KIND_FUNC = 8, 12
_MAP_TYPE_RINGBUF = 27
_messages: list[str] = []


def _remember(level: int, text: int, arguments: int) -> int:
    # On x86-64 and arm64 a va_list is passed as a pointer, so this pointer can be passed on as a va_list.
    if level > 1:
        return 0
    line = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).vsnprintf(line, ctypes.c_size_t(len(line)), ctypes.c_void_p(text), ctypes.c_void_p(arguments))
    _messages.append(line.value.decode(errors="replace").strip())
    del _messages[:-_MESSAGES]
    return 0


# libbpf may call the printer at any time, so this name keeps it alive.
_printer = Printer(_remember)


@functools.cache
def _library() -> Any:
    functions = library().functions
    functions.libbpf_set_print(_printer)
    return functions


@functools.lru_cache(64)
def _types(raw: bytes) -> Btf:
    """Returns the parsed BTF of an object, cached: without attach cookies an object is opened again for each probe."""
    return Btf(raw)


class _OpenOptions(ctypes.Structure):
    """The first fields of struct bpf_object_open_opts of bpf/libbpf.h; ``sz`` tells libbpf that the other fields are
    missing.
    """

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("object_name", ctypes.c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", ctypes.c_char_p),
        ("unused", ctypes.c_uint32),
        ("kconfig", ctypes.c_char_p),
        ("btf_custom_path", ctypes.c_char_p),
    )


class Object:
    """A BPF object, from its bytes to its loaded programs. Close it once its descriptors are pinned or copied.

    ``types``: a file with BTF; programs are relocated to the types of this file instead of the kernel's.
    """

    def __init__(self, name: str, data: bytes, types: Path | None = None) -> None:
        self.name = name
        self._lib = _library()
        options = _OpenOptions(ctypes.sizeof(_OpenOptions), btf_custom_path=os.fsencode(types) if types else None)
        self._handle = self._lib.bpf_object__open_mem(data, len(data), ctypes.byref(options))
        if not self._handle:
            raise AttachError(f"{name} is not a BPF object: {_last_message()}", hint="build the package again")
        size = ctypes.c_uint32()
        raw = self._lib.btf__raw_data(self._lib.bpf_object__btf(self._handle), ctypes.byref(size))
        self.btf = _types(ctypes.string_at(raw, size.value))
        self._programs = self._walk(self._lib.bpf_object__next_program, self._lib.bpf_program__name)
        self._maps = self._walk(self._lib.bpf_object__next_map, self._lib.bpf_map__name)
        self._log = ctypes.create_string_buffer(_LOG_BYTES)

    def __enter__(self) -> Object:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._handle:
            self._lib.bpf_object__close(self._handle)
            self._handle = None

    @property
    def sections(self) -> dict[str, str]:
        """Returns program name -> section, which names the attach point."""
        return {n: self._lib.bpf_program__section_name(p).decode() for n, p in self._programs.items()}

    @property
    def maps(self) -> list[str]:
        """Returns the names of the maps that the object defines, without the maps of its constants."""
        return [name for name, m in self._maps.items() if not self._lib.bpf_map__is_internal(m)]

    @property
    def rings(self) -> list[str]:
        return [name for name in self.maps if self._lib.bpf_map__type(self._maps[name]) == _MAP_TYPE_RINGBUF]

    def set_constants(self, values: Mapping[str, int]) -> None:
        """Sets ``const volatile`` variables before loading; ignores names that the object lacks."""
        variables = self.btf.variables(".rodata")
        handle = next((m for name, m in self._maps.items() if name.endswith(".rodata")), None)
        if handle is None:
            return
        size = ctypes.c_size_t()
        memory = self._lib.bpf_map__initial_value(handle, ctypes.byref(size))
        for name, value in values.items():
            if name in variables:
                offset, dtype = variables[name]
                raw = int(value).to_bytes(dtype.itemsize, "little")
                if offset + len(raw) > size.value:
                    raise AttachError(f"{self.name}: constant {name} lies outside its section")
                ctypes.memmove(memory + offset, raw, len(raw))

    def set_attach_type(self, program: str, attach_type: int) -> None:
        self._lib.bpf_program__set_expected_attach_type(self._programs[program], attach_type)

    def skip(self, program: str) -> None:
        """Excludes a program from loading."""
        self._lib.bpf_program__set_autoload(self._programs[program], False)

    def pin_map(self, name: str, path: Path) -> None:
        """Tells ``load`` to use the map that is pinned at ``path``, or to create it and pin it there."""
        if self._lib.bpf_map__set_pin_path(self._maps[name], os.fsencode(path)):
            raise AttachError(f"{self.name}: map {name} cannot be pinned at {path}")

    def resize(self, name: str, entries: int) -> None:
        """Sets max_entries of a map before loading; for a ring: its bytes, a power of two and a multiple of a page."""
        if self._lib.bpf_map__set_max_entries(self._maps[name], entries):
            raise AttachError(f"{self.name}: libbpf refuses size {entries} for map {name}")

    def preallocate(self, name: str) -> None:
        """Preallocates a map that would grow with its entries, with fewer entries. Call it before ``load``."""
        flags = self._lib.bpf_map__map_flags(self._maps[name])
        if flags & _NO_PREALLOC:
            self._lib.bpf_map__set_map_flags(self._maps[name], flags & ~_NO_PREALLOC)
            self.resize(name, self._lib.bpf_map__max_entries(self._maps[name]) // _LESS)

    def load(self) -> None:
        """Loads the object. Raises AttachError with the last lines of the verifier's log, PrivilegeError for a missing
        right.
        """
        for program in self._programs.values():
            self._lib.bpf_program__set_log_buf(program, self._log, len(self._log))
        _messages.clear()
        error = -self._lib.bpf_object__load(self._handle)
        if not error:
            return
        lines = self._log.value.decode(errors="replace").strip().splitlines()[-6:]
        text, cause = " | ".join(lines) or _last_message(), OSError(error, os.strerror(error))
        if error in (1, 13):
            raise PrivilegeError(f"{self.name}: the kernel refuses to load it ({cause.strerror}): {text}") from cause
        raise AttachError(f"{self.name} does not load ({cause.strerror}): {text}") from cause

    def load_with_statistics(self) -> dict[str, str]:
        """Loads without pins and returns the verifier's counts of each program. Raises AttachError."""
        logs = {name: ctypes.create_string_buffer(_STATISTICS_BYTES) for name in self._programs}
        for name, program in self._programs.items():
            self._lib.bpf_program__set_log_buf(program, logs[name], _STATISTICS_BYTES)
            self._lib.bpf_program__set_log_level(program, _LOG_STATISTICS)
        if error := -self._lib.bpf_object__load(self._handle):
            written = {name: log.value.decode(errors="replace").strip() for name, log in logs.items() if log.value}
            # Programs load in turn, and the last with a log was refused.
            refused, text = list(written.items())[-1] if written else ("", _last_message())
            name = f"{self.name}.{refused}" if refused else self.name
            raise AttachError(f"{name} does not load ({os.strerror(error)}): {text.replace(chr(10), ' | ')}")
        return {name: log.value.decode(errors="replace") for name, log in logs.items()}

    def instructions(self, program: str) -> bytes:
        """Returns a loaded program and, behind it, the functions that it calls, as struct bpf_insn of 8 bytes each."""
        handle = self._programs[program]
        count = self._lib.bpf_program__insn_cnt(handle)
        return ctypes.string_at(self._lib.bpf_program__insns(handle), count * _INSTRUCTION_BYTES)

    def program_fd(self, name: str) -> int:
        """Returns a new descriptor of a program, which outlives this object."""
        return os.dup(self._lib.bpf_program__fd(self._programs[name]))

    def map_fd(self, name: str) -> int:
        return os.dup(self._lib.bpf_map__fd(self._maps[name]))

    def _walk(self, following: Any, name_of: Any) -> dict[str, int]:
        found: dict[str, int] = {}
        item = following(self._handle, None)
        while item:
            found[name_of(item).decode()] = item
            item = following(self._handle, item)
        return found


def kernel_types(*names: str) -> dict[str, int]:
    """Returns the kernel's BTF ids of functions and typedefs, by name. Leaves out names that the kernel lacks."""
    lib = _library()
    kernel = lib.btf__load_vmlinux_btf()
    if not kernel:
        return {}
    found = {}
    try:
        for name in names:
            for kind in (_BTF_KIND_FUNC, _BTF_KIND_TYPEDEF):
                index = lib.btf__find_by_name_kind(kernel, name.encode(), kind)
                if index > 0:
                    found[name] = index
    finally:
        lib.btf__free(kernel)
    return found


def _last_message() -> str:
    return _messages[-1] if _messages else "no message"
