"""Attributes of OpenTelemetry's process context, in messages that protobuf's own library wrote; and hostile bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from otel_context import HEADER, process_context, resource

from probing.api.errors import CorruptTarget
from probing.daemon.labels.process_context import MAX_PAYLOAD, attributes_of, read_context
from probing.daemon.processes.memory import FakeMemory

PLAIN: dict[str, object] = {
    "service.name": "pretrain",
    "phase": "eval",
    "rank": 3,
    "below": -7,
    "sharded": True,
    "lr": 0.25,
    "empty": "",
    "name": "größe",
}
TEXTS = {**PLAIN, "rank": "3", "below": "-7", "sharded": "true", "lr": "0.25"}
AT, PAYLOAD_AT, PUBLISHED = 0x7000_0000, 0x7100_0000, 23


def test_attributes_of_a_resource_and_of_a_process_context() -> None:
    assert attributes_of(resource(PLAIN)) == TEXTS
    assert attributes_of(process_context(PLAIN, {"extra": "7"})) == {**TEXTS, "extra": "7"}
    assert attributes_of(process_context({}, {"extra": "7"})) == {"extra": "7"}
    assert attributes_of(b"") == {}


def test_values_of_other_types_are_left_out() -> None:
    assert attributes_of(resource({"tags": ["a", "b"], "phase": "eval"})) == {"phase": "eval"}
    assert attributes_of(process_context({"tags": ["a"]}, {"hosts": ["b"], "x": "y"})) == {"x": "y"}


def memory(payload: bytes, **changed: object) -> FakeMemory:
    head = {"signature": b"OTEL_CTX", "version": 2, "size": len(payload), "published": PUBLISHED, "at": PAYLOAD_AT}
    return FakeMemory({AT: HEADER.pack(*{**head, **changed}.values()), PAYLOAD_AT: payload})


def test_the_header_decides() -> None:
    payload = resource({"phase": "eval"})
    assert read_context(memory(payload), AT) == (PUBLISHED, {"phase": "eval"})
    # The same context is not read again, and one that is being replaced, or moved away, later.
    assert read_context(memory(payload), AT, PUBLISHED) == (PUBLISHED, None)
    assert read_context(memory(payload, published=0), AT, 7) == (7, None)
    assert read_context(memory(payload, at=0x1000), AT) == (0, None)
    assert read_context(memory(payload, version=1), AT) == (0, {})
    assert read_context(memory(payload, signature=b"OTEL_CTY"), AT) == (0, {})
    assert read_context(FakeMemory({}), AT) == (0, {})
    assert read_context(memory(b""), AT) == (PUBLISHED, {})
    with pytest.raises(CorruptTarget, match="16,385 bytes"):
        read_context(memory(payload, size=MAX_PAYLOAD + 1), AT)


@given(st.binary(max_size=200))
def test_any_bytes_are_attributes_or_an_error(data: bytes) -> None:
    try:
        found = attributes_of(data)
    except CorruptTarget:
        return
    assert len(found) <= 64
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in found.items())


@given(st.data())
def test_any_damage_of_a_message_is_attributes_or_an_error(data: st.DataObject) -> None:
    message = bytearray(process_context(PLAIN, {"x": "y"}))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        attributes_of(bytes(message[: data.draw(st.integers(0, len(message)))]))
    except CorruptTarget:
        return
