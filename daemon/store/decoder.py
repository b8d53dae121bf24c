"""Decodes files in a process without rights: ``verify`` and ``import`` do not trust the files that they read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import pyarrow as pa

from probing.api.errors import FormatError, InternalError, ProbingError
from probing.api.typed import typed
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Message
from probing.daemon.pool import Child
from probing.daemon.store.manifest import Segment
from probing.daemon.store.tasks.messages import Contents, Data, LostGroup, Made, Rows, Step, unpack_step

__all__ = ("Decoder", "LogContents", "LogHeader", "SegmentContents")

# The timeout of one answer, s. For one answer the process decodes about 65,536 rows, or checks a whole segment.
TIMEOUT_S = 300.0
_NOBODY = 65534
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """A decoded Parquet file. ``table``: the name in its metadata, or "". Times are UTC ns."""

    table: str
    columns: tuple[str, ...]
    rows: int
    ts_min: int
    ts_max: int
    jobs: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The header of a log part."""

    number: int
    node: str
    first_sequence: int


@dataclass(frozen=True, slots=True)
class LogContents:
    """A decoded log part. ``rows``: number of rows by table. ``times``: first and last ``ts`` by table, UTC ns.
    ``problems``: what is wrong with its bytes.
    """

    rows: dict[str, int]
    times: dict[str, tuple[int, int]]
    next_sequence: int
    problems: tuple[str, ...]


class Decoder:
    """Decodes files in a process without rights. Not thread-safe.

    The process starts at the first call, and is started again if it died while it decoded a file.
    Under root the process runs as ``uid`` and ``gid``, otherwise as the caller. All methods take the descriptor of a
    regular file and raise FormatError when it cannot be decoded.
    """

    def __init__(self, uid: int = _NOBODY, gid: int = _NOBODY) -> None:
        self._account = (uid, gid) if os.geteuid() == 0 else None
        self._child: Child | None = None

    def segment(self, fd: int) -> SegmentContents:
        """Decodes a whole Parquet file, and checks its pages."""
        return self._contents(SegmentContents, "segment", fd, {})

    def segment_rows(self, fd: int, piece: int, skip: int = 0) -> Iterator[pa.Table]:
        """Yields the rows of a Parquet file in pieces of ``piece`` rows, without the first ``skip`` pieces."""
        for _, rows in self._rows("rows", fd, {"piece": piece, "skip": skip}):
            yield rows

    def log_header(self, fd: int) -> LogHeader:
        """Decodes the header of a log part."""
        return self._contents(LogHeader, "header", fd, {})

    def log(self, fd: int, void_from: int | None) -> LogContents:
        """Decodes a log part up to its first bad record, or up to the sequence number ``void_from``."""
        return self._contents(LogContents, "log", fd, {"void_from": void_from, "send": False})

    def log_rows(self, fd: int, void_from: int | None) -> Iterator[tuple[str, pa.Table]]:
        """Yields (table, rows) of a log part."""
        yield from self._rows("log", fd, {"void_from": void_from, "send": True})

    def salvage(self, fd: int, damaged: Segment) -> tuple[int, list[LostGroup]]:
        """Returns the descriptor of a new segment with the readable row groups of ``damaged``, and the lost row groups.

        Raises FormatError when no row group can be read.
        """
        fields = {"table": damaged.table, "rows": damaged.rows, "ts_min": damaged.ts_min, "ts_max": damaged.ts_max}
        copy, lost = os.memfd_create("salvaged", os.MFD_CLOEXEC), []
        try:
            with closing(self._steps("salvage", fd, fields)) as steps:
                for step in steps:
                    match step:
                        case LostGroup():
                            lost.append(step)
                        case Data(data):
                            while data:
                                data = data[os.write(copy, data) :]
                        case Made():
                            pass
                        case _:
                            raise FormatError(f"the decoder answered the request `salvage` with {type(step).__name__}")
            if not os.fstat(copy).st_size:
                raise FormatError("none of its row groups can be read")
        except BaseException:
            os.close(copy)
            raise
        return copy, lost

    def close(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _contents(self, kind: type[_T], task: str, fd: int, fields: dict[str, object]) -> _T:
        """Returns the contents of a file. ``task`` must yield them as its only step."""
        with closing(self._steps(task, fd, fields)) as steps:
            contents = next(steps, None)
            if not isinstance(contents, Contents) or next(steps, None) is not None:
                raise InternalError(f"the decoder's reply to {task} is not exactly one Contents message")
        try:
            return typed(kind, contents.fields)
        except ValueError as e:
            raise FormatError(f"the decoder answered {task} with invalid contents: {e}") from e

    def _rows(self, task: str, fd: int, fields: dict[str, object]) -> Iterator[tuple[str, pa.Table]]:
        with closing(self._steps(task, fd, fields)) as steps:
            for step in steps:
                if isinstance(step, Rows):
                    yield step.table, _table(step.stream)

    def _steps(self, task: str, fd: int, fields: dict[str, object]) -> Generator[Step, None, None]:
        """Yields the steps of ``task`` for one file, except ``Turn``."""
        with closing(self._messages(task, fd, fields)) as messages:
            for message in messages:
                yield unpack_step(message.header, message.payload)

    def _messages(self, task: str, fd: int, fields: dict[str, object]) -> Generator[Message, None, None]:
        os.lseek(fd, 0, os.SEEK_SET)
        channel = (self._child or self._start()).channel
        finished = False
        try:
            channel.send({"op": "give", "job": 0}, b"", [fd])
            channel.send({"op": "begin", "job": 0, "what": task}, json.dumps(fields).encode())
            channel.send({"op": "next", "job": 0})
            while "end" not in (message := channel.answer(TIMEOUT_S)).header:
                if "turn" in message.header:
                    channel.send({"op": "next", "job": 0})
                else:
                    yield message
            finished = True
        except ChannelTimeout:
            raise FormatError("it could not be decoded in time") from None
        except ChannelClosed:
            raise FormatError(
                "the process that decoded it ended: the file may need too much memory or CPU time"
            ) from None
        except InternalError as e:
            raise FormatError(f"it could not be decoded: {e.message}") from e
        except ProbingError:
            # The process answered with an error, and can be used again.
            finished = True
            raise
        finally:
            if not finished:
                self.close()

    def _start(self) -> Child:
        self._child = Child(
            [sys.executable, "-I", "-m", "probing.daemon.confined.store_maintenance", "decode"],
            {"MALLOC_ARENA_MAX": "2"},
            self._account,
        )
        try:
            self._child.channel.request({"op": "ping"}, timeout=TIMEOUT_S)
        except ProbingError as e:
            self.close()
            raise InternalError(
                "the process that decodes files did not start",
                hint="the lines above show its error; check that its user can read the program files of probingd",
            ) from e
        return self._child


def _table(stream: bytes | memoryview) -> pa.Table:
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"its rows are malformed: {e}") from e
    return rows
