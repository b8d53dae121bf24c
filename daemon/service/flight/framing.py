"""Cuts Arrow IPC streams into messages of Flight.

A message of an IPC stream is a header (a flatbuffer) and a body; Flight sends both as fields of a FlightData. Rows are
decoded only if a batch is larger than the usual limit of a gRPC message.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import pyarrow as pa

from probing.api.errors import QueryError
from probing.api.proto.arrow.flight import Flight_pb2 as pb
from probing.api.text import size
from probing.daemon.query.answer import End, Item

__all__ = ("MAX_BODY", "encapsulated", "messages_of", "table_messages")

# gRPC refuses messages above 4 MiB unless a client asks for more.
MAX_BODY = 2 << 20
# The maximum size of a batch that is read, bytes.
MAX_MESSAGE = 64 << 20


def messages_of(items: Iterator[Item]) -> Iterator[tuple[pb.FlightData | End, int]]:
    """Yields the FlightData of the IPC stream in ``items``, and the End, each with its size.

    Raises the errors of ``items``, and pyarrow's errors for pieces that are not an IPC stream. A batch with a single
    row may be larger than MAX_BODY.
    """
    stream = _Stream(items)
    schema: pa.Schema | None = None
    with pa.PythonFile(_File(stream, 1 << 16), mode="r") as file:
        for message in pa.ipc.MessageReader.open_stream(file):
            if message.type == "schema":
                schema = pa.ipc.read_schema(message)
            elif message.type == "dictionary":
                # A batch with new dictionary codes cannot be read without these codes.
                schema = None
            for part in _small(message, schema):
                yield _data(part)
    yield from ((end, 0) for end in stream.rest())


def table_messages(table: pa.Table) -> Iterator[pb.FlightData]:
    """Yields ``table`` as FlightData."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for data, _ in messages_of(iter([sink.getvalue().to_pybytes()])):
        if isinstance(data, pb.FlightData):
            yield data


def encapsulated(schema: pa.Schema) -> bytes:
    """Returns the bytes of ``schema`` for FlightInfo, GetSchema and prepared statements."""
    return schema.serialize().to_pybytes()


class _File(io.BufferedReader):
    """A file that refuses messages that are too large for this process. Their size comes from a worker, which is not
    trusted.
    """

    def read(self, length: int | None = -1) -> bytes:
        if length is not None and length > MAX_MESSAGE:
            message = f"a batch of {size(length)} is too large for Flight"
            raise QueryError(message, hint="select fewer or shorter columns")
        return super().read(length)


class _Stream(io.RawIOBase):
    """The bytes in the items of an answer, as a file."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._piece = memoryview(b"")
        self._ends: list[End] = []

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._piece:
            item = next(self._items, None)
            if item is None:
                return 0
            self._take(item)
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size

    def rest(self) -> list[End]:
        """Reads the remaining items, and returns each ``End`` of the answer."""
        for item in self._items:
            self._take(item)
        return self._ends

    def _take(self, item: Item) -> None:
        if isinstance(item, End):
            self._ends.append(item)
        elif isinstance(item, bytes):
            self._piece = memoryview(item)


def _data(message: pa.ipc.Message) -> tuple[pb.FlightData, int]:
    header = message.metadata.to_pybytes()
    body = message.body.to_pybytes() if message.body is not None else b""
    return pb.FlightData(data_header=header, data_body=body), len(header) + len(body)


def _small(message: pa.ipc.Message, schema: pa.Schema | None) -> Iterator[pa.ipc.Message]:
    """Yields ``message``, or parts of it if it is a batch above MAX_BODY that can be read with ``schema``."""
    size = message.body.size if message.body is not None else 0
    if message.type != "record batch" or size <= MAX_BODY or schema is None:
        yield message
        return
    batch = pa.ipc.read_record_batch(message, schema)
    if batch.num_rows <= 1:
        yield message
        return
    rows = max(batch.num_rows * MAX_BODY // size, 1)
    for first in range(0, batch.num_rows, rows):
        # Rows differ in size, so a part may still be too large.
        yield from _small(pa.ipc.read_message(batch.slice(first, rows).serialize()), schema)
