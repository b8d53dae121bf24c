"""Files of the store read by a process without rights: ``verify`` and ``import`` trust none that they look at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from types import TracebackType
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError, InternalError, ProbingError
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout

__all__ = ("Decoder",)

# For one message: a piece of some 65,536 rows, or a whole segment that is only checked.
TIMEOUT_S = 300.0
_NOBODY = 65534
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}


class Decoder:
    """Starts the process when it is first asked, and again after a file that ended it. Not safe for two threads.

    Under root it runs as ``uid`` and ``gid``, else as who we are.
    """

    def __init__(self, uid: int = _NOBODY, gid: int = _NOBODY) -> None:
        self._account = (uid, gid) if os.geteuid() == 0 else None
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, op: str, fd: int, **fields: Any) -> dict[str, Any]:
        """The end of an answer that has no rows. Raises FormatError when the file cannot be decoded."""
        for _ in (pieces := self.rows(op, fd, **fields)):
            pieces.close()
            raise InternalError(f"a decoder answered {op} with rows")
        return self.end

    def rows(self, op: str, fd: int, **fields: Any) -> Generator[tuple[str, pa.Table], None, None]:
        """(table, rows) one after the other, validated; ``end`` is set behind the last. Raises FormatError."""
        for header, payload in self._messages(op, fd, fields):
            yield str(header.get("part")), _rows(payload)

    def salvage(self, fd: int, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
        """A descriptor of a segment with the row groups of ``fd`` that can be read, and ``lost`` for each of the others
        as ``jobs`` has it. Raises FormatError when none can be read.
        """
        copy, lost = os.memfd_create("salvaged", os.MFD_CLOEXEC), []
        try:
            for header, payload in self._messages("salvage", fd, {"fields": fields}):
                if "lost" in header:
                    lost.append(dict(header["lost"]))
                while payload:
                    payload = payload[os.write(copy, payload) :]
            if not os.fstat(copy).st_size:
                raise FormatError("none of its row groups can be read")
        except BaseException:
            os.close(copy)
            raise
        return copy, lost

    def _messages(
        self, op: str, fd: int, fields: dict[str, Any]
    ) -> Generator[tuple[dict[str, Any], bytes], None, None]:
        self.end: dict[str, Any] = {}
        os.lseek(fd, 0, os.SEEK_SET)
        channel = self._channel or self._start()
        finished = False
        try:
            channel.send({"op": op, **fields}, b"", [fd])
            while "end" not in (message := channel.answer(TIMEOUT_S)).header:
                yield message.header, message.payload
            self.end = dict(message.header["end"])
            finished = True
        except ChannelTimeout:
            raise FormatError("it could not be decoded in time") from None
        except ChannelClosed:
            raise FormatError("the process that decoded it ended: the file may ask for too much") from None
        except InternalError as e:
            raise FormatError(f"it could not be decoded: {e.message}") from e
        except ProbingError:
            # An answer of its own: the process is as good as before.
            finished = True
            raise
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> Channel:
        ours, theirs = socket.socketpair()
        uid, gid = self._account or (None, None)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", "probing.daemon.confined.store_decoder"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT, user=uid, group=gid, extra_groups=None if uid is None else (),
            )  # fmt: skip
        self._channel = Channel(ours)
        try:
            self._channel.request({"op": "ping"}, timeout=TIMEOUT_S)
        except ProbingError as e:
            self.close()
            raise InternalError(
                "the process that decodes files did not start", hint="its error is above; can its user read probingd?"
            ) from e
        return self._channel


def _rows(payload: bytes) -> pa.Table:
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"its rows make no sense: {e}") from e
    return rows
