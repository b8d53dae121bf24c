"""Loads a libbpf with all functions that the daemon calls: the host's, or else the copy in the wheel.

The host's libbpf comes first, since the distribution updates it. It is used if it has all these functions, whatever its
version.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probing.api.errors import PrivilegeError

__all__ = ("OWN", "SONAME", "Library", "Printer", "find", "library")

SONAME = "libbpf.so.1"
# Only wheels contain this file (packaging/wheel.sh).
OWN = Path(__file__).with_name("bundled") / SONAME
Printer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_SIZE, _INTEGER, _WORD = ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
# Function -> (result, argument types), as in bpf/libbpf.h and bpf/btf.h of libbpf 1.x.
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "bpf_object__open_mem": (_POINTER, [_POINTER, _SIZE, _POINTER]),
    "bpf_object__load": (_INTEGER, [_POINTER]),
    "bpf_object__close": (None, [_POINTER]),
    "bpf_object__next_map": (_POINTER, [_POINTER, _POINTER]),
    "bpf_object__next_program": (_POINTER, [_POINTER, _POINTER]),
    "bpf_map__name": (_TEXT, [_POINTER]),
    "bpf_map__fd": (_INTEGER, [_POINTER]),
    "bpf_map__type": (_INTEGER, [_POINTER]),
    "bpf_map__is_internal": (ctypes.c_bool, [_POINTER]),
    "bpf_map__set_pin_path": (_INTEGER, [_POINTER, _TEXT]),
    "bpf_map__map_flags": (_WORD, [_POINTER]),
    "bpf_map__set_map_flags": (_INTEGER, [_POINTER, _WORD]),
    "bpf_map__max_entries": (_WORD, [_POINTER]),
    "bpf_map__set_max_entries": (_INTEGER, [_POINTER, _WORD]),
    "bpf_map__initial_value": (_POINTER, [_POINTER, ctypes.POINTER(_SIZE)]),
    "bpf_program__name": (_TEXT, [_POINTER]),
    "bpf_program__fd": (_INTEGER, [_POINTER]),
    "bpf_program__insns": (_POINTER, [_POINTER]),
    "bpf_program__insn_cnt": (_SIZE, [_POINTER]),
    "bpf_program__section_name": (_TEXT, [_POINTER]),
    "bpf_program__set_autoload": (_INTEGER, [_POINTER, ctypes.c_bool]),
    "bpf_program__set_expected_attach_type": (_INTEGER, [_POINTER, _INTEGER]),
    "bpf_program__set_log_buf": (_INTEGER, [_POINTER, _POINTER, _SIZE]),
    "bpf_program__set_log_level": (_INTEGER, [_POINTER, _WORD]),
    "bpf_object__btf": (_POINTER, [_POINTER]),
    "btf__raw_data": (_POINTER, [_POINTER, ctypes.POINTER(_WORD)]),
    "btf__load_vmlinux_btf": (_POINTER, []),
    "btf__find_by_name_kind": (ctypes.c_int32, [_POINTER, _TEXT, _WORD]),
    "btf__type_by_id": (_POINTER, [_POINTER, _WORD]),
    "btf__name_by_offset": (_TEXT, [_POINTER, _WORD]),
    "btf__free": (None, [_POINTER]),
    "libbpf_set_print": (_POINTER, [Printer]),
    "libbpf_version_string": (_TEXT, []),
}


@dataclass(frozen=True)
class Library:
    """A loaded libbpf. ``instead``: why the host's libbpf is not used; empty where it is used."""

    functions: Any
    instead: str = ""

    @property
    def version(self) -> str:
        text: bytes = self.functions.libbpf_version_string()
        return text.decode(errors="replace").removeprefix("v")

    def __str__(self) -> str:
        return f"{self.version}, {f'own: {self.instead}' if self.instead else 'of the host'}"


@functools.cache
def library() -> Library:
    """Returns the libbpf of this process, loaded once. Raises PrivilegeError if there is none."""
    return find(SONAME, OWN)


def find(host: str, own: Path) -> Library:
    """Returns the library ``host``, or ``own`` where ``host`` is missing or lacks a function. Raises PrivilegeError."""
    try:
        return Library(_loaded(host))
    except OSError as e:
        # The dynamic linker gives its reason only as text.
        refused = f"the host has no {host} that can be loaded ({e})"
    except AttributeError as e:
        refused = f"the host's {host} is too old ({e})"
    hint = "install libbpf 1.x (libbpf1 on Debian and Ubuntu, libbpf on others), or a wheel, which contains it"
    if not own.exists():
        raise PrivilegeError(f"there is no usable libbpf: {refused}", hint=hint)
    try:
        return Library(_loaded(str(own)), refused)
    except (OSError, AttributeError) as e:
        raise PrivilegeError(f"there is no usable libbpf: {refused}, and {e}", hint=hint) from e


def _loaded(name: str) -> Any:
    """Loads the library ``name`` and sets its prototypes. Raises OSError if it cannot be loaded, AttributeError if it
    lacks a function.
    """
    functions = ctypes.CDLL(name, use_errno=True)
    for function, (result, arguments) in _PROTOTYPES.items():
        entry = getattr(functions, function)
        entry.restype, entry.argtypes = result, arguments
    return functions
