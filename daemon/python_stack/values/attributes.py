"""Resolves one step of a dotted name (attribute, item or key) without running code of the target.

The search has the order of ``object.__getattribute__``: slots of the type, then the instance's dict, then the class.
"""

from __future__ import annotations

import struct

from probing.api.errors import CorruptTarget
from probing.daemon.processes.redaction import takes_secret
from probing.daemon.python_stack.values.objects import ENUM_TYPES, Objects, Type

__all__ = ("step", "walk")

MAX_BASES = 128
# The maximum number of characters of an argument that are read to decide whether it is a secret.
MAX_ARGUMENT = 128
# T_OBJECT and T_OBJECT_EX of Include/structmember.h.
_OBJECT_MEMBERS = (6, 16)
# torch.nn.Module looks up attributes in these dicts (torch/nn/modules/module.py, __getattr__).
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
# Properties of enumerations (Lib/enum.py), and the attributes that they return.
_OF_ENUMS = {"name": "_name_", "value": "_value_"}
_CODE_WANTED = {
    "property": "a property: its value is computed, and no code is run in the process",
    "getset": "its type computes the value, and no code is run in the process",
}


def walk(objects: Objects, address: int, parts: tuple[str | int, ...]) -> int:
    """Returns the object that ``parts`` lead to from ``address``. Raises CorruptTarget, which names the
    missing part.
    """
    for part in parts:
        address = step(objects, address, part)
    return address


def step(objects: Objects, address: int, part: str | int) -> int:
    """Returns the object that an attribute, index or key leads to. Raises CorruptTarget with the reason if there is
    no such object.
    """
    of = objects.type_of(address)
    found = None
    if isinstance(part, int):
        if of.kind in ("list", "tuple"):
            return _item(objects, address, of.kind, part)
        if of.kind == "dict":
            found = objects.find(objects.entries(address), part)
    if found is None:
        # Keys that look like numbers are texts: "0" is the name of a layer of torch.nn.Sequential.
        found = _attribute(objects, address, of, str(part))
    if found is None and of.kind == "dict":
        found = objects.find(objects.entries(address), str(part))
    if found is None:
        raise CorruptTarget(f"{of.short} has no {part!r}")
    return found


def _item(objects: Objects, address: int, kind: str, index: int) -> int:
    _, length = objects.items(address, kind, 0)
    at = index + length if index < 0 else index
    before = 1 if at > 0 else 0
    items, now = objects.items(address, kind, 1 + before, at - before) if 0 <= at < length else ([], length)
    if now != length or len(items) <= before:
        raise CorruptTarget(f"its length is {length}")
    if before and takes_secret(_argument(objects, items[0]), _argument(objects, items[1])):
        raise CorruptTarget("the option before it names a secret")
    return items[before]


def _argument(objects: Objects, address: int) -> str:
    """Returns the first characters of the text or bytes at ``address``; an empty text for another object."""
    kind = objects.type_of(address).kind
    if kind == "bytes":
        return objects.bytes_of(address, MAX_ARGUMENT)[0].decode("latin-1")
    return objects.text(address, MAX_ARGUMENT)[0] if kind == "str" else ""


def _attribute(objects: Objects, address: int, of: Type, name: str) -> int | None:
    if of.kind == "type":
        return _in_classes(objects, objects.type_at(address), name)
    in_class = _in_classes(objects, of, name)
    kind = objects.type_of(in_class).kind if in_class else ""
    if in_class and kind == "member":
        return _slot(objects, address, of, in_class)
    if in_class and of.kind == "tuple" and objects.type_of(in_class).short == "_tuplegetter":
        # A field of a named tuple (Modules/_collectionsmodule.c). The field's index is at offset 16.
        return _item(objects, address, "tuple", objects.heap.word(in_class + 16))
    if name in _OF_ENUMS and of.is_heap and objects.type_at(of.metatype).short in ENUM_TYPES:
        return objects.find(objects.instance_entries(address, of), _OF_ENUMS[name])
    if kind in _CODE_WANTED and of.kind != "module":
        raise CorruptTarget(_CODE_WANTED[kind])
    found = objects.find(objects.instance_entries(address, of), name)
    if found is None and in_class:
        descriptor = objects.type_of(in_class)
        if descriptor.is_heap and descriptor.kind == "object" and _in_classes(objects, descriptor, "__get__"):
            raise CorruptTarget(_CODE_WANTED["property"])
        return in_class
    return found or _of_torch_module(objects, address, of, name)


def _in_classes(objects: Objects, of: Type, name: str) -> int | None:
    """Returns ``name`` from the dicts of a class and its bases. Built-in types of 3.12+, which keep their dicts
    elsewhere, are skipped.
    """
    classes, count = objects.items(of.order, "tuple", MAX_BASES) if of.order else ([of.address], 1)
    if count > MAX_BASES:
        raise CorruptTarget("its class has too many bases")
    for class_address in classes:
        base = objects.type_at(class_address)
        if not base.attributes or (not base.is_heap and base.name == "object"):
            continue
        found = objects.find(objects.entries(base.attributes), name)
        if found is not None:
            return found
    return None


def _slot(objects: Objects, address: int, of: Type, descriptor: int) -> int:
    # PyMemberDescrObject: d_type at 16, d_member at 40; PyMemberDef: type at 8, offset at 16.
    heap = objects.heap
    owner, member = heap.word(descriptor + 16), heap.word(descriptor + 40)
    kind, offset = struct.unpack("<8xi4xq", heap.read(member, 24))
    if kind not in _OBJECT_MEMBERS:
        raise CorruptTarget("its value is a C number, which is not read")
    limit = objects.type_at(owner).basicsize
    if not 16 <= offset <= limit - 8 or limit > of.basicsize:
        raise CorruptTarget("its slot is not in the object")
    found = heap.word(address + offset)
    if not found:
        raise CorruptTarget("its slot is empty")
    return found


def _of_torch_module(objects: Objects, address: int, of: Type, name: str) -> int | None:
    if not of.is_heap or of.kind != "object":
        return None
    for where in _MODULE_DICTS:
        inner = objects.find(objects.instance_entries(address, of), where)
        if inner and objects.type_of(inner).kind == "dict":
            found = objects.find(objects.entries(inner), name)
            if found is not None:
                return found
    return None
