"""Keeps open the ELF files with which a parser unwinds stacks, and finds the file of each instruction of a process.

``readable`` demangles names of C++ functions with the C++ library. Names may come from hostile files, and demanglers
have had bugs. So only a parser, which has no privileges, calls this function.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import functools
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from probing.api.errors import TargetError, UnsupportedTarget
from probing.daemon.elf.cfi import FrameTable, Row
from probing.daemon.elf.file import X86_64, Elf
from probing.daemon.elf.functions import Functions
from probing.daemon.processes.procfs import clean_text
from probing.daemon.python_stack.native.payload import CodeMapping

__all__ = (
    "CodeSpace",
    "FileNeeded",
    "Modules",
    "Place",
    "readable",
)

MAX_NAME = 512
_MAX_MANGLED = 4096
_MAX_DEMANGLED = 1 << 20
# The maximum CPU time for demangling one name, s. The longest names of torch take a thousandth of this time.
_DEMANGLE_S = 0.25


@functools.lru_cache(maxsize=16_384)
def readable(name: bytes) -> str:
    """Returns a symbol's name as at most 512 printable characters, demangled if it is a C++ name.

    A longer name loses the arguments of its templates, the innermost first. If a name takes more than a quarter of a
    second of CPU time, the kernel ends this process.
    """
    return clean_text(_shortened(_demangled(name).decode("utf-8", "backslashreplace")), MAX_NAME)


def _demangled(name: bytes) -> bytes:
    library = _library()
    # GCC marks a split-off part of a function by a suffix after a dot. The C++ library shows the suffix in brackets.
    if library is None or not name.startswith((b"_Z", b"__Z")) or len(name) > _MAX_MANGLED:
        return name
    status = ctypes.c_int(-1)
    # Each substitution can double the text, so a short name may take forever, and a signal handler in Python cannot
    # interrupt the library. So there is no handler: when the timer expires, the kernel ends this process.
    signal.setitimer(signal.ITIMER_VIRTUAL, _DEMANGLE_S)
    try:
        text = library.__cxa_demangle(name, None, None, ctypes.byref(status))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if not text:
        return name
    try:
        return ctypes.string_at(text)[:_MAX_DEMANGLED] if status.value == 0 else name
    finally:
        _libc.free(text)


def _shortened(name: str) -> str:
    for depth in (3, 2, 1):
        if len(name) <= MAX_NAME:
            break
        name = _without_arguments(name, depth)
    return name


def _without_arguments(name: str, keep: int) -> str:
    """Returns ``name`` with an ellipsis for all text that is nested ``keep`` deep in <>."""
    kept, depth = [], 0
    operator = name.find("operator")
    for at, character in enumerate(name):
        arrow = character == ">" and name[at - 1 : at] == "-"
        named = operator >= 0 and operator + 8 <= at < operator + 11
        if character == "<" and not named:
            depth += 1
            if depth == keep:
                kept.append("<\u2026>")
        elif character == ">" and depth and not arrow and not named:
            if depth < keep:
                kept.append(character)
            depth -= 1
            continue
        if depth < keep:
            kept.append(character)
    return "".join(kept)


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return library


_libc = ctypes.CDLL(None)
_libc.free.restype = None
_libc.free.argtypes = [ctypes.c_void_p]


_MAX_FILES = 512
_MAX_SYMBOLS = 16 << 20
_MAX_ALIASES = 16_384
_MAX_KEPT = 8192
_MAX_PART = 1 << 20

_T = TypeVar("_T")
# Device (major, minor) and inode in a process's maps, and the process (pid, start_ns). The process is (0, 0) if all
# processes see the same device and inode.
_Alias = tuple[int, int, int, tuple[int, int]]
_FileId = tuple[int, int, int, int]


class FileNeeded(Exception):
    """Raised to request the file of ``mapping``. It is not an error: ``Unwinder`` catches the exception."""

    def __init__(self, mapping: CodeMapping) -> None:
        super().__init__(mapping.path)
        self.mapping = mapping


class _Module:
    """An ELF file, open as ``fd``, which this object closes. Damaged parts of the file count as missing."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rows: dict[int, Row | None] = {}
        self._origins: dict[int, bytes | None] = {}
        self._named: dict[int, tuple[str, int] | None] = {}
        self._elf = _or_none(lambda: _x86_64(fd))
        elf = self._elf
        self._frames = _or_none(lambda: FrameTable(elf)) if elf else None
        self._functions: Functions | None = None
        self._indexed = elf is None

    def close(self) -> None:
        os.close(self._fd)

    @property
    def symbols(self) -> int:
        return len(self._functions) if self._functions else 0

    def address(self, offset: int) -> int | None:
        """Returns the address before relocation of the instruction at ``offset`` in the file; None if the file has no
        instruction at ``offset``.
        """
        return self._elf.code_address(offset) if self._elf else None

    def row(self, address: int) -> Row | None:
        """Returns the call frame information of ``address`` (before relocation), None if the file lacks it."""
        if address not in self._rows:
            frames = self._frames
            row = _or_none(lambda: frames.row(address)) if frames else None
            _keep(self._rows, address, row)
            return row
        return self._rows[address]

    def function(self, address: int) -> tuple[str, int] | None:
        """Returns (readable name, start) of the function at ``address``."""
        if address not in self._named:
            _keep(self._named, address, self._find(address))
        return self._named[address]

    def code(self, offset: int, size: int) -> bytes:
        elf = self._elf
        return (_or_none(lambda: elf.read(offset, size)) if elf and offset >= 0 else None) or b""

    def _find(self, address: int) -> tuple[str, int] | None:
        elf = self._elf
        if not self._indexed and elf:
            self._indexed = True
            self._functions = _or_none(lambda: Functions(elf))
        functions = self._functions
        if functions is None or elf is None:
            return None
        row = self.row(address)
        if symbol := _or_none(lambda: functions.find(address, row.start if row else None)):
            return readable(symbol[0]), symbol[1]
        if row is None:
            return None
        if row.start not in self._origins:
            _keep(self._origins, row.start, _or_none(lambda: self._origin(functions, elf, row)))
        name = self._origins[row.start]
        return (readable(name + b".cold"), row.start) if name else None

    def _origin(self, functions: Functions, elf: Elf, row: Row) -> bytes | None:
        offset = elf.file_offset(row.start)
        return functions.origin(row.start, elf.read(offset, min(row.size, _MAX_PART))) if offset is not None else None


class Modules:
    """The open ELF files, by device and inode. An open descriptor keeps the inode from being reused for
    another file.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[_FileId, _Module] = OrderedDict()
        self._aliases: OrderedDict[_Alias, _FileId] = OrderedDict()
        self._fds: dict[_FileId, int] = {}

    def add(self, mapping: CodeMapping, process: tuple[int, int], fd: int) -> None:
        """Registers the file of ``mapping`` of a process (pid, start_ns). The caller keeps ``fd``."""
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if file not in self._files:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
            self._files[file] = _Module(own)
            self._fds[file] = own
        # On overlayfs, maps and the file show different devices, so the match is valid only for this process.
        exact = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) == mapping[3:6]
        self._aliases[(*mapping[3:6], (0, 0) if exact else process)] = file
        while len(self._aliases) > _MAX_ALIASES:
            self._aliases.popitem(last=False)
        self._files.move_to_end(file)
        while len(self._files) > _MAX_FILES or (len(self._files) > 1 and self._too_many()):
            self._drop(next(iter(self._files)))

    def get(self, mapping: CodeMapping, process: tuple[int, int]) -> _Module | None:
        for scope in ((0, 0), process):
            file = self._aliases.get((*mapping[3:6], scope))
            if file is None or file not in self._files:
                continue
            status = os.fstat(self._fds[file])
            if (status.st_size, status.st_mtime_ns) != file[2:]:
                self._drop(file)  # the file's content was replaced
                continue
            self._files.move_to_end(file)
            return self._files[file]
        return None

    def close(self) -> None:
        while self._files:
            self._drop(next(iter(self._files)))

    def _too_many(self) -> bool:
        return sum(module.symbols for module in self._files.values()) > _MAX_SYMBOLS

    def _drop(self, file: _FileId) -> None:
        self._files.pop(file).close()
        del self._fds[file]


class Place(NamedTuple):
    """The place of an instruction: ``offset`` in the file of ``mapping``, ``address`` before relocation. ``module`` is
    None if the mapping has no file that can be opened.
    """

    mapping: CodeMapping
    offset: int
    module: _Module | None
    address: int | None


class CodeSpace:
    """The executable mappings of one process. ``absent``: starts of mappings whose file cannot be opened."""

    def __init__(
        self, mappings: Sequence[CodeMapping], modules: Modules, process: tuple[int, int], absent: frozenset[int]
    ) -> None:
        self._mappings = sorted(mappings)
        self._starts = [m.start for m in self._mappings]
        self._modules = modules
        self._process = process
        self._absent = absent
        self._held: dict[CodeMapping, _Module] = {}

    def holds(self, ip: int) -> CodeMapping | None:
        """Returns the executable mapping that contains an address."""
        index = bisect.bisect_right(self._starts, ip) - 1
        if index >= 0 and ip < self._mappings[index].end:
            return self._mappings[index]
        return None

    def place(self, ip: int) -> Place | None:
        """Returns the place of an instruction. Raises FileNeeded when the parser lacks the file."""
        mapping = self.holds(ip)
        if mapping is None:
            return None
        offset = ip - mapping.start + mapping.offset
        module = self._held.get(mapping)
        if module is None and mapping.inode and mapping.start not in self._absent:
            module = self._modules.get(mapping, self._process)
            if module is None:
                raise FileNeeded(mapping)
            self._held[mapping] = module
        return Place(mapping, offset, module, module.address(offset) if module else None)


def _x86_64(fd: int) -> Elf:
    elf = Elf(fd)
    if elf.machine != X86_64:
        raise UnsupportedTarget("the file is not an ELF file for x86-64")
    return elf


def _or_none(make: Callable[[], _T]) -> _T | None:
    try:
        return make()
    except (TargetError, MemoryError):
        return None  # MemoryError: the file needs more memory than a parser has


def _keep(kept: dict[int, _T], key: int, value: _T) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = value
