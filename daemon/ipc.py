"""Sends and receives framed messages between the daemon's own processes, over a Unix stream socket.

A message is ``!II`` (header length, payload length), a JSON object, and raw bytes; file descriptors travel beside the
header. All confined processes and the collector's control socket use this format, so only this module has to check
sizes that another process sends.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from probing.api.errors import InternalError, ProbingError, error_from

__all__ = ("Channel", "ChannelClosed", "ChannelTimeout", "Header", "Message", "connect", "error_of", "peer_credentials")

MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 30
MAX_FDS = 16
_FRAME = struct.Struct("!II")
_CREDENTIALS = struct.Struct("3i")
# The JSON object of a message, in its header or its payload.
Header = dict[str, Any]


class ChannelClosed(InternalError):
    default_hint = "the process at the other end ended and is restarted automatically; ask again"


class ChannelTimeout(InternalError, TimeoutError):
    pass


@dataclass(slots=True)
class Message:
    """A message. ``header``: a JSON object; ``payload``: raw bytes; ``fds``: descriptors that the receiver
    must close.
    """

    header: Header
    payload: bytes = b""
    fds: list[int] = field(default_factory=list)

    def take_fd(self) -> int:
        """Returns the next descriptor, which the caller then owns."""
        if not self.fds:
            raise InternalError("a message came without its descriptor")
        return self.fds.pop(0)

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Channel:
    """One end of a connection. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def hang_up(self) -> None:
        """Ends the connection, but keeps the descriptor: a thread that reads from it gets ChannelClosed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        header: Header,
        payload: bytes | memoryview = b"",
        fds: Sequence[int] = (),
        *,
        timeout: float | None = None,
    ) -> None:
        """Sends a message. ``timeout`` in seconds; None: the timeout of the previous call still applies.

        Raises ChannelClosed when the other end is gone, ChannelTimeout when the other end does not read in time; part
        of the message may then have been sent.
        """
        if timeout is not None:
            self._sock.settimeout(timeout)
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER or len(payload) > MAX_PAYLOAD or len(fds) > MAX_FDS:
            raise InternalError(f"message too large: header {len(text)}, payload {len(payload)}, fds {len(fds)}")
        head = _FRAME.pack(len(text), len(payload)) + text
        try:
            sent = socket.send_fds(self._sock, [head], list(fds)) if fds else self._sock.send(head)
            if sent < len(head):
                self._sock.sendall(head[sent:])
            if len(payload):
                self._sock.sendall(payload)
        except TimeoutError as e:
            raise ChannelTimeout("the other end does not read the message") from e
        except OSError as e:
            raise ChannelClosed(f"the other end is gone: {e.strerror}") from e

    def receive(self, timeout: float | None = None) -> Message:
        """Returns the next message. ``timeout`` in seconds covers the whole message.

        Raises ChannelClosed at the end of the stream, ChannelTimeout, or InternalError for a frame that is malformed or
        too large.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        fds: list[int] = []
        try:
            head = self._exactly(_FRAME.size, deadline, fds)
            header_len, payload_len = _FRAME.unpack(head)
            if header_len > MAX_HEADER or payload_len > MAX_PAYLOAD:
                raise InternalError(f"frame out of bounds: header {header_len}, payload {payload_len}")
            header = json.loads(bytes(self._exactly(header_len, deadline, fds)))
            if not isinstance(header, dict):
                raise InternalError("a message header is not an object")
            payload = self._exactly(payload_len, deadline, fds) if payload_len else b""
        except BaseException as e:
            for fd in fds:
                os.close(fd)
            if isinstance(e, (ValueError, RecursionError)):
                raise InternalError("a message header is not JSON, or nests too deep") from e
            raise
        return Message(header, bytes(payload), fds)

    def request(
        self, header: Header, payload: bytes = b"", *, timeout: float | None = None, fds: Sequence[int] = ()
    ) -> Message:
        """Sends a request and returns the answer. Raises the ``error`` in the answer, if there is one."""
        self.send(header, payload, fds)
        return self.answer(timeout)

    def answer(self, timeout: float | None = None) -> Message:
        """Returns the answer to a sent request. Raises the ``error`` in the answer, if there is one."""
        answer = self.receive(timeout)
        if error := answer.header.get("error"):
            answer.close_fds()
            raise error_of(error)
        return answer

    def send_error(self, error: ProbingError) -> None:
        self.send({"error": error.to_dict()})

    def _exactly(self, size: int, deadline: float | None, fds: list[int]) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ChannelTimeout("no answer in time")
                self._sock.settimeout(left)
            else:
                self._sock.settimeout(None)
            try:
                # MSG_CMSG_CLOEXEC: a descriptor must not leak into a child.
                count, ancillary, _, _ = self._sock.recvmsg_into(
                    [view], socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError as e:
                raise ChannelTimeout("no answer in time") from e
            except OSError as e:
                raise ChannelClosed(f"the other end is gone: {e.strerror}") from e
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(raw[: len(raw) - len(raw) % received.itemsize])
                    fds.extend(received)
            if len(fds) > MAX_FDS:
                raise InternalError(f"a message came with more than {MAX_FDS} descriptors")
            if count == 0:
                raise ChannelClosed("the other end is gone")
            view = view[count:]
        return data


def connect(path: str, timeout: float = 5.0) -> Channel:
    """Returns a connection to the Unix socket ``path``. Raises ChannelClosed when nobody listens on it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
    except OSError as e:
        sock.close()
        raise ChannelClosed(f"nobody listens on {path}: {e.strerror}") from e
    return Channel(sock)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Returns (pid, uid, gid) of the process at the other end, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def error_of(fields: Mapping[str, Any]) -> ProbingError:
    """Returns the error that the other end wrote with ``ProbingError.to_dict``."""
    return error_from(*(str(fields.get(name) or "") for name in ("kind", "message", "hint", "code")))
