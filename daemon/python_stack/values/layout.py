"""Offsets in CPython's structs that are needed to read values of variables, by version.

The offsets were measured with offsetof and the headers of 3.8 to 3.13 (``Include/cpython/object.h``, ``dictobject.h``,
``Include/internal/pycore_dict.h``, ``pycore_frame.h``, ``pycore_interp.h``), on x86-64, for release builds with a GIL;
they are constant within a minor version. Offsets that CPython 3.13+ declares (``_Py_DebugOffsets``) are read from the
target.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from probing.api.errors import CorruptTarget, UnsupportedTarget
from probing.daemon.python_stack.walk.layouts import Layout

__all__ = ("ObjectLayout", "object_layout")

_MAX_STRUCT = 1 << 14
_MAX_INTERPRETER = 1 << 20


class ObjectLayout(NamedTuple):
    """The layout of objects, as offsets in bytes. ``base``: the layout of frames, threads, codes and texts.

    ``code_names``: the tuples of names, in the order of a frame's slots. ``code_kinds``: the kind of each slot (3.11+).
    ``managed`` says where an instance without a dict pointer in its struct keeps its attributes: ``pointers`` (values
    at -32, dict at -24, 3.11), ``tagged`` (one word at -24, 3.12), ``inline`` (dict at -24, else values behind the
    object, 3.13+). ``values_start``: the first value in a PyDictValues.
    """

    base: Layout
    frame_globals: int
    frame_locals: int
    frame_slots: int
    code_flags: int
    code_names: tuple[int, ...]
    code_kinds: int | None
    interp_modules: int
    type_qualname: int
    type_keys: int
    function_qualname: int
    managed: Literal["none", "pointers", "tagged", "inline"] = "none"
    values_start: int = 0
    # From 3.11 on dicts have dk_kind, and logarithms as sizes; from 3.12 on ints have lv_tag.
    dict_kinds: bool = True
    long_tag: bool = True
    tuple_items: int = 24
    dict_keys: int = 32
    dict_values: int = 40

    @property
    def frame_size(self) -> int:
        """The size of a frame before its slots, in bytes."""
        return self.frame_slots


def _before_311(base: Layout) -> ObjectLayout:
    minor = base.version[1]
    return ObjectLayout(
        base=base,
        frame_globals=48,
        frame_locals=56,
        frame_slots=352 if minor == 10 else 360,
        code_flags=36,
        # co_varnames, co_cellvars, co_freevars
        code_names=(72, 88, 80),
        code_kinds=None,
        interp_modules=56 if minor == 8 else 856,
        type_qualname=856 if minor == 9 else 864,
        type_keys=864 if minor == 9 else 872,
        function_qualname=40 if minor == 10 else 104,
        dict_kinds=False,
        long_tag=False,
    )


def object_layout(base: Layout, runtime: bytes) -> ObjectLayout:
    """Returns the layout of objects that adds to ``base``. ``runtime``: the first bytes of ``_PyRuntime``, which are
    used from 3.13 on.

    Raises CorruptTarget for an impossible declared offset, UnsupportedTarget for a version with unknown objects.
    """
    if base.version < (3, 11):
        return _before_311(base)
    if base.version == (3, 11):
        return ObjectLayout(
            base=base,
            frame_globals=8,
            frame_locals=24,
            frame_slots=72,
            code_flags=48,
            code_names=(96,),
            code_kinds=104,
            interp_modules=888,
            type_qualname=864,
            type_keys=872,
            function_qualname=40,
            managed="pointers",
            long_tag=False,
        )
    if base.version == (3, 12):
        return _since_312(base, modules=944, names=96, kinds=104, slots=72)
    return _declared(base, runtime)


def _since_312(
    base: Layout,
    *,
    modules: int,
    names: int,
    kinds: int,
    slots: int,
    tuple_items: int = 24,
    keys: int = 32,
    values: int = 40,
    type_keys: int = 880,
) -> ObjectLayout:
    return ObjectLayout(
        base=base,
        frame_globals=24,
        frame_locals=40,
        frame_slots=slots,
        code_flags=48,
        code_names=(names,),
        code_kinds=kinds,
        interp_modules=modules,
        # ht_qualname is right before ht_cached_keys.
        type_qualname=type_keys - 8,
        type_keys=type_keys,
        function_qualname=40,
        managed="tagged" if base.version == (3, 12) else "inline",
        values_start=0 if base.version == (3, 12) else 8,
        tuple_items=tuple_items,
        dict_keys=keys,
        dict_values=values,
    )


# Pairs of offsets in _Py_DebugOffsets: the first word is the offset of a field, the second the size of its struct. The
# fields are the interpreter's modules, a frame's slots, a code's names and their kinds, the items of a tuple, and the
# keys and values of a dict.
_FIELDS = {
    (3, 13): {"modules": (88, 48), "slots": (256, 224), "names": (328, 272), "kinds": (336, 272),
              "tuple_items": (408, 400), "keys": (456, 448), "values": (464, 448)},
    (3, 14): {"modules": (96, 48), "slots": (280, 248), "names": (368, 312), "kinds": (376, 312),
              "tuple_items": (456, 448), "keys": (536, 528), "values": (544, 528)},
    (3, 15): {"modules": (96, 48), "slots": (344, 312), "names": (432, 376), "kinds": (440, 376),
              "tuple_items": (552, 544), "keys": (632, 624), "values": (640, 624), "type_keys": (536, 528)},
}  # fmt: skip


def _declared(base: Layout, runtime: bytes) -> ObjectLayout:
    offsets = {}
    if base.version not in _FIELDS:
        raise UnsupportedTarget(
            f"the layout of objects in CPython {base.version[0]}.{base.version[1]} is not known",
            hint="use `probingctl stacks`: stacks of this version can be read, variables cannot",
        )
    for name, (at, size_at) in _FIELDS[base.version].items():
        if at + 8 > len(runtime):
            raise CorruptTarget("the debug offsets of CPython are cut short")
        offset, size = (struct.unpack_from("<Q", runtime, o)[0] for o in (at, size_at))
        limit = min(size, _MAX_INTERPRETER if name == "modules" else _MAX_STRUCT)
        # The items of a tuple or a frame may begin where the fixed part of the struct ends.
        if not 8 <= offset <= limit or offset % 8:
            raise CorruptTarget(f"CPython declares its {name.replace('_', ' ')} at {offset} in {size} bytes")
        offsets[name] = offset
    return _since_312(base, **offsets)
