"""Reads the offsets that CPython 3.13+ declares: ``_PyRuntime`` begins with ``_Py_DebugOffsets``.

Format: CPython 3.13 ``Include/internal/pycore_runtime.h``, from 3.14 on ``pycore_debug_offsets.h``. Every offset is
checked, because the target may have written any bytes there.
"""

from __future__ import annotations

import struct

from probing.api.errors import CorruptTarget, NotPython, UnsupportedTarget

__all__ = ("COOKIE", "DEBUG_OFFSETS_SIZE", "read_debug_offsets", "unsupported")

COOKIE = b"xdebugpy"
DEBUG_OFFSETS_SIZE = 1024
_OLDEST = (3, 8)
# The levels alpha and beta in PY_VERSION_HEX. Offsets of such releases may still change.
_UNSETTLED = (0xA, 0xB)
_MAX_INTERPRETER = 1 << 20
_MAX_STRUCT = 1 << 14
_OBJECT_HEAD = 16

# The fields of _Py_DebugOffsets that are used, by block: the name of a field, and the index of its word in the block.
_INTERPRETER = {"next": 2, "threads_head": 3, "ceval_gil": 8, "gil": 9, "gil_locked": 11, "gil_holder": 12}
_THREAD = {"next": 2, "interp": 3, "current_frame": 4, "thread_id": 5, "native_thread_id": 6}
_FRAME = {"previous": 1, "executable": 2, "instr_ptr": 3, "owner": 5}
# The last words are locals, owner, and the pointer to the top of the frame's values, which 3.13 does not declare.
_FRAME_314 = {**_FRAME, "stackpointer": 6}
_CODE = {"filename": 1, "name": 2, "qualname": 3, "linetable": 4, "firstlineno": 5, "co_code_adaptive": 9}
_BYTES = {"ob_size": 1, "ob_sval": 2}
_UNICODE = {"state": 1, "length": 2, "asciiobject_size": 3}
# From 3.14 on threads_main follows threads_head.
_INTERPRETER_314 = {name: index + (index > 3) for name, index in _INTERPRETER.items()}
# From 3.15 on base_frame, last_profiled_frame and last_profiled_frame_seq follow current_frame.
_THREAD_315 = {name: index + 3 * (index > 4) for name, index in _THREAD.items()}
_HALF_WORDS = ("owner", "firstlineno", "state", "gil_locked")
_BLOCKS: dict[tuple[int, int], dict[str, tuple[int, dict[str, int]]]] = {
    (3, 13): {
        "runtime": (24, {"interpreters_head": 2}),
        "interpreter": (48, _INTERPRETER),
        "thread": (152, _THREAD),
        "frame": (224, _FRAME),
        "code": (272, _CODE),
        "bytes": (512, _BYTES),
        "unicode": (536, _UNICODE),
    },
    (3, 14): {
        "runtime": (24, {"interpreters_head": 2}),
        "interpreter": (48, _INTERPRETER_314),
        "thread": (176, _THREAD),
        "frame": (248, _FRAME_314),
        "code": (312, _CODE),
        "bytes": (592, _BYTES),
        "unicode": (616, _UNICODE),
    },
    (3, 15): {
        "runtime": (24, {"interpreters_head": 2}),
        "interpreter": (48, _INTERPRETER_314),
        "thread": (176, _THREAD_315),
        "frame": (312, _FRAME_314),
        "code": (376, _CODE),
        "bytes": (688, _BYTES),
        "unicode": (712, _UNICODE),
    },
}


def read_debug_offsets(runtime: bytes) -> tuple[tuple[int, int], dict[str, dict[str, int]]]:
    """Returns the version of a CPython 3.13 or later, and the offsets that it declares, by block.

    ``runtime``: the first DEBUG_OFFSETS_SIZE bytes of its ``_PyRuntime``. Raises NotPython without the cookie,
    UnsupportedTarget for an unknown version or build, CorruptTarget for an impossible offset.
    """
    if not runtime.startswith(COOKIE) or len(runtime) < 24:
        raise NotPython("there are no debug offsets of CPython at this address")
    hexversion, free_threaded = struct.unpack_from("<QQ", runtime, 8)
    version = (hexversion >> 24 & 0xFF, hexversion >> 16 & 0xFF)
    if hexversion >> 32 or version not in _BLOCKS:
        raise unsupported(version)
    name = ".".join(map(str, version))
    if hexversion >> 4 & 0xF in _UNSETTLED:
        raise UnsupportedTarget(
            f"CPython {name} is a pre-release, whose memory is not laid out as the release's",
            hint="run the job with a release, or a release candidate",
        )
    if free_threaded:
        raise UnsupportedTarget(
            f"CPython {name} is a free-threaded build",
            hint="run the job with a build that has the GIL: only its stacks can be read",
        )
    return version, {name: _block(runtime, name, *where) for name, where in _BLOCKS[version].items()}


def unsupported(version: tuple[int, int]) -> UnsupportedTarget:
    """Returns the error for a version whose stacks cannot be read. The hint names the versions that can be read."""
    oldest, asked, newest = (".".join(map(str, v)) for v in (_OLDEST, version, max(_BLOCKS)))
    return UnsupportedTarget(f"CPython {asked} is not known", hint=f"stacks are read of CPython {oldest} to {newest}")


def _block(runtime: bytes, name: str, start: int, fields: dict[str, int]) -> dict[str, int]:
    end = start + 8 * (max(fields.values()) + 1)
    if end > len(runtime):
        raise CorruptTarget("the debug offsets of CPython are cut short")
    words = struct.unpack_from(f"<{(end - start) // 8}Q", runtime, start)
    size = words[0]
    limit = min(size, _MAX_INTERPRETER if name in ("interpreter", "runtime") else _MAX_STRUCT)
    found = {field: words[index] for field, index in fields.items()}
    least = _OBJECT_HEAD if name in ("code", "bytes", "unicode") else 0
    for field, offset in found.items():
        # asciiobject_size is the size of the whole struct, after which the characters begin.
        past = offset > limit or (offset == limit and field != "asciiobject_size")
        if past or offset < least or (offset % 8 and field not in (*_HALF_WORDS, "ob_sval")):
            raise CorruptTarget(f"CPython declares {name}.{field} at {offset} in {size} bytes")
    if len(set(found.values())) < len(found):
        raise CorruptTarget(f"CPython declares two fields of a {name} at the same place")
    return found
