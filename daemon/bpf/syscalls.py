"""Makes the bpf(2) calls that do not go through libbpf, because a host's libbpf may be older than its kernel.

Command numbers and attribute layouts: include/uapi/linux/bpf.h. Each function raises OSError; callers turn it into a
ProbingError. "(from 5.14)" means Linux 5.14 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = (
    "UPROBE_MULTI",
    "Info",
    "create_event_map",
    "create_map",
    "ids",
    "link_info",
    "link_perf_event",
    "link_uprobe_multi",
    "load_btf",
    "load_program",
    "map_delete",
    "map_info",
    "map_lookup",
    "map_lookup_batch",
    "map_next_key",
    "map_update",
    "object_get",
    "object_pin",
    "open_by_id",
    "open_raw_tracepoint",
    "possible_cpus",
    "program_info",
    "run_raw_tracepoint",
)

_NUMBER = {"x86_64": 321, "aarch64": 280}
_libc = ctypes.CDLL(None, use_errno=True)

(MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT_KEY, PROG_LOAD, OBJ_PIN, OBJ_GET) = range(8)
PROG_TEST_RUN, PROG_NEXT_ID, MAP_NEXT_ID, PROG_BY_ID, MAP_BY_ID, INFO_BY_FD = 10, 11, 12, 13, 14, 15
RAW_TRACEPOINT_OPEN, BTF_LOAD, MAP_LOOKUP_AND_DELETE, MAP_FREEZE, MAP_LOOKUP_BATCH, LINK_CREATE = 17, 18, 21, 22, 24, 28
LINK_BY_ID, LINK_NEXT_ID = 30, 31
UPROBE_MULTI = 48
_NOEXIST = 1
_PERF_EVENT = 41
_MAP_PERF_EVENT_ARRAY, _PRESERVE_ELEMS = 4, 1 << 11
_UPROBE_MULTI_RETURN = 1
_MAX_ATTR = 256


class Info(NamedTuple):
    """The kernel's description of a program or map."""

    type: int
    id: int
    key_size: int = 0
    value_size: int = 0
    max_entries: int = 0
    name: str = ""


def _bpf(command: int, attributes: bytes | ctypes.Array[ctypes.c_char]) -> int:
    if isinstance(attributes, bytes):
        attributes = ctypes.create_string_buffer(attributes.ljust(_MAX_ATTR, b"\0"), _MAX_ATTR)
    # The kernel refuses nonzero bytes after the fields that it knows; all our fields lie in the first 128 bytes.
    result = int(_libc.syscall(_NUMBER[platform.machine()], command, attributes, 128))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _address(buffer: ctypes.Array[ctypes.c_char] | None) -> int:
    return ctypes.addressof(buffer) if buffer is not None else 0


def create_map(kind: int, key_size: int, value_size: int, entries: int, name: str = "", flags: int = 0) -> int:
    """Returns the descriptor of a new map."""
    sizes = (kind, key_size, value_size, entries)
    return _bpf(MAP_CREATE, struct.pack("<IIIIIII16s", *sizes, flags, 0, 0, name.encode()[:15]))


def create_event_map(name: str = "") -> int:
    """Returns the descriptor of a new map for one perf event, which stays open while the map exists (from 5.10).

    Without BPF_F_PRESERVE_ELEMS the kernel would remove the event when the descriptor by which it was added is closed.
    """
    return create_map(_MAP_PERF_EVENT_ARRAY, 4, 4, 1, name, _PRESERVE_ELEMS)


def load_program(
    kind: int, code: bytes, attach_type: int = 0, attach_btf: int = 0, *, btf: int = 0, functions: bytes = b""
) -> int:
    """Loads a small hand-made program that tests for a feature. Returns its descriptor.

    ``functions`` are struct bpf_func_info with types of ``btf``, for code with more than one function.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    text = ctypes.create_string_buffer(b"GPL")
    places = ctypes.create_string_buffer(functions, len(functions)) if functions else None
    head = struct.pack("<IIQQIIQII", kind, len(code) // 8, _address(instructions), _address(text), 0, 0, 0, 0, 0)
    name_and_types = struct.pack("<16sIIIIQI", b"", 0, attach_type, btf, 8, _address(places), len(functions) // 8)
    return _bpf(PROG_LOAD, head + name_and_types + struct.pack("<16xI", attach_btf))


def load_btf(data: bytes) -> int:
    """Loads types in the BTF format. Returns their descriptor."""
    types = ctypes.create_string_buffer(data, len(data))
    return _bpf(BTF_LOAD, struct.pack("<QQIII", _address(types), 0, len(data), 0, 0))


def object_pin(path: Path, fd: int) -> None:
    name = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(OBJ_PIN, struct.pack("<QII", _address(name), fd, 0))


def object_get(path: Path) -> int:
    """Returns the descriptor of the pinned program, map or link."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _bpf(OBJ_GET, struct.pack("<QII", _address(name), 0, 0))


def map_lookup(fd: int, key: bytes, value_size: int, *, delete: bool = False) -> bytes | None:
    """Returns the value of ``key``, or None; ``delete`` removes the entry in the same step (hash maps, from 5.14)."""
    k = ctypes.create_string_buffer(key, len(key))
    v = ctypes.create_string_buffer(value_size)
    command = MAP_LOOKUP_AND_DELETE if delete else MAP_LOOKUP
    try:
        _bpf(command, struct.pack("<IxxxxQQQ", fd, _address(k), _address(v), 0))
    except FileNotFoundError:
        return None
    return v.raw


def map_update(fd: int, key: bytes, value: bytes, *, new: bool = False) -> None:
    """Sets a value; with ``new`` raises FileExistsError when the key exists."""
    k = ctypes.create_string_buffer(key, len(key))
    v = ctypes.create_string_buffer(value, len(value))
    _bpf(MAP_UPDATE, struct.pack("<IxxxxQQQ", fd, _address(k), _address(v), _NOEXIST if new else 0))


def map_delete(fd: int, key: bytes) -> bool:
    """Deletes an entry. Returns whether the key existed."""
    k = ctypes.create_string_buffer(key, len(key))
    try:
        _bpf(MAP_DELETE, struct.pack("<IxxxxQQQ", fd, _address(k), 0, 0))
    except FileNotFoundError:
        return False
    return True


def map_next_key(fd: int, key: bytes | None, key_size: int) -> bytes | None:
    """Returns the key that follows ``key`` (None: the first key), or None at the end."""
    k = ctypes.create_string_buffer(key, len(key)) if key is not None else None
    following = ctypes.create_string_buffer(key_size)
    try:
        _bpf(MAP_NEXT_KEY, struct.pack("<IxxxxQQQ", fd, _address(k), _address(following), 0))
    except FileNotFoundError:
        return None
    return following.raw


def map_lookup_batch(fd: int, key_size: int, value_size: int, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields (keys, values) of a hash or array, ``count`` entries at a time, each joined as bytes (from 5.6)."""
    keys, values = ctypes.create_string_buffer(key_size * count), ctypes.create_string_buffer(value_size * count)
    # The position is a bucket number (hash) or a key (array), both of 4 bytes, also for maps with larger keys.
    position, following = (ctypes.create_string_buffer(max(key_size, 4)) for _ in range(2))
    at = 0
    while True:
        attributes = ctypes.create_string_buffer(_MAX_ATTR)
        pack = struct.Struct("<QQQQIIQQ")
        pack.pack_into(attributes, 0, at, _address(following), _address(keys), _address(values), count, fd, 0, 0)
        last = False
        try:
            _bpf(MAP_LOOKUP_BATCH, attributes)
        except FileNotFoundError:
            last = True
        got = pack.unpack_from(attributes)[4]
        if got:
            yield keys.raw[: got * key_size], values.raw[: got * value_size]
        if last:
            return
        ctypes.memmove(position, following, len(following))
        at = _address(position)


def open_raw_tracepoint(program: int, name: str | None) -> int:
    """Returns the link of a raw tracepoint program. ``name`` is None for a tp_btf program, which names its own
    tracepoint.
    """
    text = ctypes.create_string_buffer(name.encode()) if name is not None else None
    return _bpf(RAW_TRACEPOINT_OPEN, struct.pack("<QIxxxxQ", _address(text), program, 0))


def link_uprobe_multi(
    program: int, path: str, offsets: Sequence[int], cookies: Sequence[int], *, on_return: bool = False, pid: int = 0
) -> int:
    """Returns one link for all file ``offsets`` at ``path``, for all processes or for ``pid`` (from 6.6)."""
    name = ctypes.create_string_buffer(path.encode())
    places = ctypes.create_string_buffer(struct.pack(f"<{len(offsets)}Q", *offsets), 8 * len(offsets))
    values = ctypes.create_string_buffer(struct.pack(f"<{len(cookies)}Q", *cookies), 8 * len(cookies))
    head = struct.pack("<IIII", program, 0, UPROBE_MULTI, 0)
    flags = _UPROBE_MULTI_RETURN if on_return else 0
    body = struct.pack("<QQQQIII", _address(name), _address(places), 0, _address(values), len(offsets), flags, pid)
    return _bpf(LINK_CREATE, head + body)


def link_perf_event(program: int, event: int, cookie: int) -> int:
    """Returns a link of a program to a perf event. The link can be pinned (from 5.15)."""
    return _bpf(LINK_CREATE, struct.pack("<IIIIQ", program, event, _PERF_EVENT, 0, cookie))


def run_raw_tracepoint(program: int, context: bytes) -> int:
    """Runs a raw tracepoint program once, with the u64 words of ``context`` as its arguments. Returns the program's
    result (from 5.10).
    """
    arguments = ctypes.create_string_buffer(context, len(context))
    attributes = ctypes.create_string_buffer(_MAX_ATTR)
    pack = struct.Struct("<IIIIQQIIIIQQ")
    given = (program, 0, 0, 0, 0, 0, 0, 0, len(context), 0, _address(arguments) if context else 0, 0)
    pack.pack_into(attributes, 0, *given)
    _bpf(PROG_TEST_RUN, attributes)
    return int(pack.unpack_from(attributes)[1])


def _info(fd: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    _bpf(INFO_BY_FD, struct.pack("<IIQ", fd, size, _address(data)))
    return data.raw


def map_info(fd: int) -> Info:
    kind, identity, key, value, entries, _, name = struct.unpack_from("<IIIIII16s", _info(fd, 80))
    return Info(kind, identity, key, value, entries, name.rstrip(b"\0").decode())


def program_info(fd: int) -> Info:
    data = _info(fd, 192)
    kind, identity = struct.unpack_from("<II", data)
    return Info(kind, identity, name=data[64:80].rstrip(b"\0").decode())


def link_info(fd: int) -> tuple[int, int, int]:
    """Returns (type, id, id of the program) of a link."""
    kind, identity, program = struct.unpack_from("<III", _info(fd, 64))
    return kind, identity, program


def ids(kind: str) -> list[int]:
    """Returns the ids of all programs, maps or links of this machine. ``kind``: program, map or link. Needs
    CAP_SYS_ADMIN.
    """
    command = {"program": PROG_NEXT_ID, "map": MAP_NEXT_ID, "link": LINK_NEXT_ID}[kind]
    found: list[int] = []
    attributes = ctypes.create_string_buffer(_MAX_ATTR)
    while True:
        struct.pack_into("<III", attributes, 0, found[-1] if found else 0, 0, 0)
        try:
            _bpf(command, attributes)
        except FileNotFoundError:
            return found
        found.append(struct.unpack_from("<II", attributes)[1])


def open_by_id(kind: str, identity: int) -> int | None:
    """Returns a descriptor of the object with this id, None if it is gone. Needs CAP_SYS_ADMIN."""
    command = {"program": PROG_BY_ID, "map": MAP_BY_ID, "link": LINK_BY_ID}[kind]
    try:
        return _bpf(command, struct.pack("<III", identity, 0, 0))
    except OSError as e:
        if e.errno != errno.ENOENT:
            raise
        return None


def possible_cpus() -> int:
    """Returns the number of values that a per-CPU map holds for each key."""
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(text.replace(",", "-").split("-")[-1]) + 1
