"""Files that the page offers: written and sent piece by piece, so that one of any size needs no memory."""

from __future__ import annotations

import io
from collections.abc import Iterator

from starlette.responses import StreamingResponse

from probing.api.errors import UsageError
from probing.client.render.writers import writer_of
from probing.client.web.panels import Question
from probing.client.web.sql import cluster_of
from probing.federation.execution.answer import Rows

__all__ = ("download",)

_KINDS = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}
_MOST_BYTES = 4 << 30


class _Sink(io.RawIOBase):
    """A file that is only written; ``taken`` returns what was written since."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        part = bytes(data)  # type: ignore[call-overload]
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def download(question: Question) -> StreamingResponse:
    """Returns the rows of ``sql`` as a file of ``format``, csv or parquet. Raises the error of a wrong SELECT."""
    kind = question.parameters.text("format")
    if kind not in _KINDS:
        raise UsageError(f"the format {kind} is not offered", hint=f"one of {', '.join(_KINDS)}")
    cluster, sql = cluster_of(question)
    rows = cluster.stream(sql)
    named = {"content-disposition": f'attachment; filename="rows.{kind}"'}
    return StreamingResponse(_written(rows, kind), headers=named, media_type=_KINDS[kind])


def _written(rows: Rows, kind: str) -> Iterator[bytes]:
    """Yields the file. An error breaks the answer off, so that no one takes a part for the whole."""
    sink, size = _Sink(), 0
    with rows:
        writer = writer_of(kind, sink, rows.schema, terminal=False)  # type: ignore[arg-type]
        for batch in rows:
            writer.write(batch)
            part = sink.taken()
            size += len(part)
            if size > _MOST_BYTES:
                raise UsageError(f"the file has more than {_MOST_BYTES} bytes", hint="use `probingctl query -o`")
            yield part
        writer.end()
        yield sink.taken()
