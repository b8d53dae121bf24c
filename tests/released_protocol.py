"""The protocol as older clients know it, and the changes that would break them: rules of buf's category WIRE_JSON.

``make protocol-release`` writes released_protocol.json anew: what is in it may not change any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = ("breaks", "described", "released")

FILE = Path(__file__).with_suffix(".json")
# For each service and message, by name, its calls or fields by name, in words.
_Protocol = Mapping[str, Mapping[str, str]]
_KINDS = {value: name[len("TYPE_") :].lower() for name, value in vars(FieldDescriptor).items() if name[:5] == "TYPE_"}


def described() -> dict[str, dict[str, str]]:
    """Returns the protocol of this checkout."""
    found = {
        service.full_name: {
            call.name: f"{'stream ' * call.client_streaming}{call.input_type.name} -> "
            f"{'stream ' * call.server_streaming}{call.output_type.name}"
            for call in service.methods
        }
        for service in pb.DESCRIPTOR.services_by_name.values()
    }
    for top in pb.DESCRIPTOR.message_types_by_name.values():
        for message in _with_nested(top):
            found[message.full_name] = {field.name: _words(field) for field in message.fields}
    return found


def released() -> dict[str, dict[str, str]]:
    """Returns the protocol of the last release."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def breaks(old: _Protocol, new: _Protocol) -> list[str]:
    """Returns what clients of ``old`` would miss in ``new``, a line for each. What is added breaks nobody."""
    found = []
    for name, parts in old.items():
        now = new.get(name)
        if now is None:
            found.append(f"{name} is gone")
            continue
        for part, words in parts.items():
            if part not in now:
                found.append(f"{name}.{part} is gone")
            elif now[part] != words:
                found.append(f"{name}.{part} was {words!r} and is {now[part]!r}")
        taken = {words.partition(" ")[0]: part for part, words in parts.items() if words[:1].isdigit()}
        for part, words in now.items():
            number = words.partition(" ")[0]
            if taken.get(number, part) != part:
                found.append(f"{name}.{part} takes the number {number} of {taken[number]}")
    return found


def _with_nested(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for nested in message.nested_types:
        yield from _with_nested(nested)


def _words(field: FieldDescriptor) -> str:
    kind = field.message_type.full_name if field.message_type else _KINDS[field.type]
    repeated = "repeated " if field.is_repeated else ""
    choice = field.containing_oneof
    return f"{field.number} {repeated}{kind}{f' of {choice.name}' if choice else ''}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(described(), indent=1, sort_keys=True) + "\n")
