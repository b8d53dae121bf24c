"""Files that the page offers: a thread writes them, and they are sent in pieces, as fast as the browser reads."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import IO, TYPE_CHECKING, cast

import anyio
from anyio import CapacityLimiter, from_thread, to_thread
from starlette.types import Receive, Scope, Send

from probing.api.errors import Overloaded, UsageError
from probing.client.render.writers import writer_of
from probing.client.web.panels import Question
from probing.client.web.sql import cluster_of
from probing.client.web.streams import left
from probing.client.wire.loop import Waits

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

__all__ = ("FileAnswer", "Files", "columns", "rows", "trace")

Write = Callable[[IO[bytes]], None]
Files = Callable[[Question], tuple[Write, str, str]]
"""Returns, for a question, the function that writes the file, its media type, and the name for the browser."""
_PIECE = 64 << 10
_PIECES = 4
# Timeouts, s. _WAIT_S: until each limiter has a free slot for the file. _SENT_S: from the first piece until the reader
# has read the whole file, because the file keeps its slots that long.
_WAIT_S, _SENT_S = 60.0, 900.0
_ROWS = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}


class FileAnswer:
    """An answer with the file that ``write`` writes in a thread. The answer holds one slot of each limiter in
    ``places``. ``name``: the file name for the browser, or empty.

    An error before the first piece is answered like other errors, including Overloaded if no slot becomes free in time.
    A later error, or a reader that takes too long, aborts the answer, so that a part of the file is not mistaken for
    the whole file.
    """

    def __init__(self, write: Write, kind: str, name: str, places: Sequence[CapacityLimiter]) -> None:
        self._write = write
        self._places = places
        self._waits = Waits()
        saved = {"content-disposition": f'attachment; filename="{name}"'} if name else {}
        self._headers = [(k.encode(), v.encode()) for k, v in {"content-type": kind, **saved}.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        pieces_in, pieces = anyio.create_memory_object_stream[bytes](_PIECES)
        errors: list[BaseException] = []

        async def write() -> None:
            async with pieces_in, AsyncExitStack() as held:
                try:
                    await self._enter(held)
                    # The limiters in ``places`` already limit the number of these threads.
                    await to_thread.run_sync(self._run, pieces_in, limiter=CapacityLimiter(1))
                except anyio.BrokenResourceError:
                    # The browser has closed the connection.
                    return
                except Exception as e:
                    errors.append(e)

        async def leave() -> None:
            await left(receive)
            pieces.close()

        begun = whole = False
        async with anyio.create_task_group() as group:
            group.start_soon(write)
            group.start_soon(leave)
            try:
                async for piece in pieces:
                    if not begun:
                        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                        begun = True
                        group.cancel_scope.deadline = anyio.current_time() + _SENT_S
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                whole = True
            except anyio.ClosedResourceError:
                return
            finally:
                # This stops the thread from asking the nodes for more rows.
                self._waits.end()
                pieces.close()
                group.cancel_scope.cancel()
        if not whole:
            raise Overloaded(f"the file was not read within {_SENT_S:.0f} s", hint="choose a shorter range")
        if errors:
            raise errors[0]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _enter(self, held: AsyncExitStack) -> None:
        """Takes a slot of each limiter until ``held`` is closed. Raises Overloaded if no slot becomes free in time."""
        try:
            with anyio.fail_after(_WAIT_S):
                for places in self._places:
                    await places.acquire_on_behalf_of(self)
                    held.callback(places.release_on_behalf_of, self)
        except TimeoutError:
            raise Overloaded("other files are still being written", hint="try again later") from None

    def _run(self, pieces: MemoryObjectSendStream[bytes]) -> None:
        sink = _Sink(pieces)
        with self._waits:
            self._write(cast("IO[bytes]", sink))
        sink.flush()


class _Sink(io.RawIOBase):
    """A write-only file that passes its bytes on in pieces."""

    def __init__(self, pieces: MemoryObjectSendStream[bytes]) -> None:
        self._pieces = pieces
        self._parts = bytearray()
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        part = bytes(data)  # type: ignore[call-overload]
        self._parts += part
        self._size += len(part)
        if len(self._parts) >= _PIECE:
            self.flush()
        return len(part)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Passes on the bytes so far; waits while ``_PIECES`` pieces are not sent yet."""
        data, self._parts = bytes(self._parts), bytearray()
        for start in range(0, len(data), _PIECE):
            from_thread.run(self._pieces.send, data[start : start + _PIECE])


def rows(question: Question) -> tuple[Write, str, str]:
    """Returns the function that writes the rows of ``sql``, the media type and the file name. ``sql`` and ``format``
    (``csv`` or ``parquet``) are parameters of ``question``.
    """
    kind = question.parameters.text("format")
    if kind not in _ROWS:
        raise UsageError(f"the format {kind} is not offered", hint=f"use one of {', '.join(_ROWS)}")
    cluster, sql = cluster_of(question)

    def write(sink: IO[bytes]) -> None:
        with cluster.stream(sql) as found:
            writer = writer_of(kind, sink, found.schema, terminal=False)
            for batch in found:
                writer.write(batch)
            writer.end()

    return write, _ROWS[kind], f"rows.{kind}"


def columns(question: Question) -> tuple[Write, str, str]:
    """Returns the function that writes the timeline of a job for the page, the media type, and an empty file name."""
    from probing.client.timeline.columns import MIME, write_columns
    from probing.client.timeline.reading import timeline

    return lambda sink: write_columns(timeline(question.cluster, *_range(question)), sink), MIME, ""


def trace(question: Question) -> tuple[Write, str, str]:
    """Returns the function that writes the timeline of a job, the media type and the file name. The parameter
    ``format`` is ``pftrace``, ``json`` or ``html``.
    """
    from probing.client.timeline.chrome import write_chrome
    from probing.client.timeline.html import write_html
    from probing.client.timeline.perfetto import write_perfetto
    from probing.client.timeline.reading import Timeline, timeline

    writers: dict[str, tuple[Callable[[Timeline, IO[bytes]], None], str]] = {
        "pftrace": (write_perfetto, "application/octet-stream"),
        "json": (write_chrome, "application/json"),
        "html": (write_html, "text/html; charset=utf-8"),
    }
    kind = question.parameters.text("format", "pftrace")
    if kind not in writers:
        raise UsageError(f"the format {kind} is not offered", hint=f"use one of {', '.join(writers)}")
    write, media = writers[kind]
    return lambda sink: write(timeline(question.cluster, *_range(question)), sink), media, f"timeline.{kind}"


def _range(question: Question) -> tuple[str, str, str | None]:
    return question.parameters.text("job"), *question.parameters.bounds("5m")
