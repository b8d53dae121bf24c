"""Reads the process context of OpenTelemetry: the attributes that an SDK publishes in the memory of its process.

A mapping named OTEL_CTX begins with a header: signature, version, size of the payload in bytes, time of the publication
in UTC ns (0 while the payload is replaced) and address of the payload. The payload is a protobuf message: a
``Resource``, or a ``ProcessContext`` whose first field is a ``Resource``. Source: OpenTelemetry's OTEP 4719. All of it
is hostile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

from probing.api.errors import CorruptTarget
from probing.daemon.ipc import Header
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.processes.target import MAX_MAPS, Target

__all__ = ("HEADER", "MAX_PAYLOAD", "SIGNATURE", "VERSION", "answer_context", "attributes_of", "read_context")

HEADER = struct.Struct("<8sIIQQ")
SIGNATURE, VERSION = b"OTEL_CTX", 2
MAX_PAYLOAD = 16 << 10
# The maximum numbers of fields of a message, and of attributes of a process, that are read.
_MAX_FIELDS, _MAX_ATTRIBUTES = 256, 64
_NAMES = (b"/memfd:OTEL_CTX", b"[anon_shmem:OTEL_CTX]", b"[anon:OTEL_CTX]")
# Wire types of protobuf: varint, 64 bits, bytes, 32 bits.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TRIES = 3


def answer_context(target: Target, request: Header) -> Header:
    """Returns a reader's answer: ``address`` of the context's header (0: no context), ``published_ns`` and
    ``attributes``.

    The request repeats ``address`` and ``published_ns`` of the previous answer. If the context is still the same,
    ``attributes`` is None. Without an address the mappings of the process are searched.
    """
    memory = ProcessMemory(target.pid)
    known, published_ns = int(request.get("address", 0)), int(request.get("published_ns", 0))
    for address in [known] if known else _addresses(target.read("maps", MAX_MAPS)):
        published, attributes = read_context(memory, address, published_ns if known else 0)
        if published:
            return {"address": address, "published_ns": published, "attributes": attributes}
    return {"address": 0, "published_ns": 0, "attributes": {}}


def _addresses(maps: bytes) -> Iterator[int]:
    """Yields the start addresses of mappings that are named OTEL_CTX."""
    for line in maps.splitlines():
        if line.endswith(b"OTEL_CTX]") or b"OTEL_CTX" in line[-24:]:
            words = line.split(None, 5)
            if len(words) == 6 and words[5].startswith(_NAMES):
                yield int(words[0].partition(b"-")[0], 16)


def read_context(memory: Memory, address: int, published_ns: int = 0) -> tuple[int, dict[str, str] | None]:
    """Returns when the context at ``address`` was published, UTC ns, and its attributes.

    The time is 0 if there is no context of VERSION at ``address``. The attributes are None if the context is still the
    one that was published at ``published_ns``, or if the process replaced it during each of _TRIES reads. Raises
    CorruptTarget for a payload that is too large or not a message.
    """
    for _ in range(_TRIES):
        (head,) = memory.read_many([(address, HEADER.size)])
        signature, version, size, published, payload = HEADER.unpack(head or bytes(HEADER.size))
        if (signature, version) != (SIGNATURE, VERSION):
            return 0, {}
        if published and published == published_ns:
            return published, None
        if size > MAX_PAYLOAD:
            raise CorruptTarget(f"the process context has {size:,} bytes; {MAX_PAYLOAD:,} are read")
        data, again = memory.read_many([(payload, size), (address, HEADER.size)]) if size else (b"", head)
        if published and again == head and data is not None:
            return published, attributes_of(data)
    return published_ns, None


def attributes_of(payload: bytes) -> dict[str, str]:
    """Returns the attributes in a message ``Resource`` or ``ProcessContext``. Strings, numbers and booleans are
    returned as text; attributes of other types are left out. Raises CorruptTarget for bytes that are not a message.
    """
    return dict(islice(_attributes(payload, depth=0), _MAX_ATTRIBUTES))


def _attributes(message: bytes, depth: int) -> Iterator[tuple[str, str]]:
    for number, value in _fields(message):
        if number not in (1, 2) or not isinstance(value, bytes):
            continue
        attribute = _attribute(value)
        if attribute is not None:
            yield attribute
        elif number == 1 and depth == 0 and value[:1] == b"\n" and _is_message(value):
            # The field ``resource`` of a ProcessContext. A message KeyValue would begin with its key.
            yield from _attributes(value, depth=1)


def _attribute(message: bytes) -> tuple[str, str] | None:
    """Returns key and value of a message ``KeyValue``; None for another message, or a value of another type."""
    try:
        fields = dict(_fields(message))
        key, value = fields.get(1), fields.get(2)
        if not isinstance(key, bytes) or not isinstance(value, bytes) or not key.isascii() or b"\n" in key:
            return None
        text = _text_of(dict(_fields(value)))
        return (key.decode(), text) if text is not None else None
    except CorruptTarget:
        return None


def _text_of(value: dict[int, int | bytes]) -> str | None:
    """Returns a message ``AnyValue`` (string_value 1, bool_value 2, int_value 3, double_value 4) as text; None for
    values of other types.
    """
    match value:
        case {1: bytes(text)}:
            return text.decode(errors="replace")
        case {2: int(number)}:
            return "true" if number else "false"
        case {3: int(number)}:
            return str(number - (1 << 64) if number >> 63 else number)
        case {4: int(bits)}:
            return repr(struct.unpack("<d", bits.to_bytes(8, "little"))[0])
    return None


def _is_message(data: bytes) -> bool:
    try:
        return bool(list(_fields(data)))
    except CorruptTarget:
        return False


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field. Fixed fields of 32 and 64 bits are yielded as integers. Raises
    CorruptTarget.
    """
    at = 0
    for _ in range(_MAX_FIELDS):
        if at == len(message):
            return
        tag, at = _varint(message, at)
        value: int | bytes
        if tag & 7 == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value & ((1 << 64) - 1)
            continue
        if tag & 7 == _BYTES:
            size, at = _varint(message, at)
        elif tag & 7 in (_FIXED32, _FIXED64):
            size = 4 if tag & 7 == _FIXED32 else 8
        else:
            raise CorruptTarget("the process context is not a protobuf message")
        data = message[at : at + size]
        at += size
        if at > len(message):
            raise CorruptTarget("the process context ends within a field")
        yield tag >> 3, data if tag & 7 == _BYTES else int.from_bytes(data, "little")
    raise CorruptTarget(f"a message of the process context has more than {_MAX_FIELDS} fields")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the varint at ``at`` and the position after it. Raises CorruptTarget."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise CorruptTarget("a number of the process context does not end")
