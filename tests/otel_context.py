"""The process context of OpenTelemetry, as an SDK publishes it (OTEP 4719); messages by protobuf's own library."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ("HEADER", "Context", "process_context", "resource")

HEADER = struct.Struct("<8sIIQQ")
_TEXT, _BOOL, _INT, _DOUBLE, _MESSAGE, _UINT = 9, 8, 3, 1, 11, 13
_ONE, _MANY = 1, 3
# opentelemetry-proto: common/v1/common.proto, resource/v1/resource.proto; ProcessContext as in the eBPF profiler.
_MESSAGES: dict[str, tuple[tuple[str, int, int, int, str], ...]] = {
    "ArrayValue": (("values", 1, _MANY, _MESSAGE, "AnyValue"),),
    "AnyValue": (
        ("string_value", 1, _ONE, _TEXT, ""),
        ("bool_value", 2, _ONE, _BOOL, ""),
        ("int_value", 3, _ONE, _INT, ""),
        ("double_value", 4, _ONE, _DOUBLE, ""),
        ("array_value", 5, _ONE, _MESSAGE, "ArrayValue"),
    ),
    "KeyValue": (("key", 1, _ONE, _TEXT, ""), ("value", 2, _ONE, _MESSAGE, "AnyValue")),
    "Resource": (
        ("attributes", 1, _MANY, _MESSAGE, "KeyValue"),
        ("dropped_attributes_count", 2, _ONE, _UINT, ""),
    ),
    "ProcessContext": (
        ("resource", 1, _ONE, _MESSAGE, "Resource"),
        ("extra_attributes", 2, _MANY, _MESSAGE, "KeyValue"),
    ),
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="otel.proto", package="otel", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            message.field.add(
                name=field, number=number, label=label, type=kind, type_name=f".otel.{of}" if of else None
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"otel.{name}")) for name in _MESSAGES}


_CLASSES = _classes()


def _pair(key: str, value: object) -> Any:
    kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    if isinstance(value, list):
        texts = [_CLASSES["AnyValue"](string_value=text) for text in value]
        found = _CLASSES["AnyValue"](array_value=_CLASSES["ArrayValue"](values=texts))
    else:
        found = _CLASSES["AnyValue"](**{kinds[type(value)]: value})
    return _CLASSES["KeyValue"](key=key, value=found)


def resource(attributes: dict[str, object], dropped: int = 3) -> bytes:
    """Returns a message ``Resource``."""
    pairs = [_pair(key, value) for key, value in attributes.items()]
    text: bytes = _CLASSES["Resource"](attributes=pairs, dropped_attributes_count=dropped).SerializeToString()
    return text


def process_context(attributes: dict[str, object], extra: dict[str, object]) -> bytes:
    """Returns a message ``ProcessContext``."""
    pairs = [_pair(key, value) for key, value in attributes.items()]
    message = _CLASSES["ProcessContext"](
        resource=_CLASSES["Resource"](attributes=pairs),
        extra_attributes=[_pair(key, value) for key, value in extra.items()],
    )
    text: bytes = message.SerializeToString()
    return text


class Context:
    """A published context of this process; ``publish`` replaces it as the protocol says."""

    def __init__(self) -> None:
        fd = os.memfd_create("OTEL_CTX")
        os.ftruncate(fd, mmap.PAGESIZE)
        self.memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._payload = ctypes.create_string_buffer(1)

    def publish(self, payload: bytes) -> None:
        struct.pack_into("<Q", self.memory, 16, 0)
        self._payload = ctypes.create_string_buffer(payload, len(payload) or 1)
        head = (b"OTEL_CTX", 2, len(payload), time.time_ns(), ctypes.addressof(self._payload))
        HEADER.pack_into(self.memory, 0, *head)
