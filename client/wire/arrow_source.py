"""The messages of a call as a file from which Arrow reads its stream."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from probing.api.errors import PeerError, QueryMemory
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.interrupt import sheltered
from probing.client.wire.arrow_checks import body_length, no_stream

__all__ = ("ArrowSource", "broken_off")

_MAX_METADATA = 16 << 20
_HELD = "narrow the time range, or aggregate; `probingctl query` and Cluster.stream have no such bound"
_CONTINUATION = b"\xff\xff\xff\xff"


def broken_off() -> PeerError:
    """Returns the error for an answer without its end."""
    return PeerError("the answer broke off", hint="ask again; `probingctl status` shows the state of the node")


class ArrowSource:
    """Hands checked messages to Arrow. Raises QueryMemory when they are larger than ``max_bytes`` together.

    ``error`` is what stopped the reading: Arrow wraps it.
    """

    closed = False

    def __init__(self, call: Any, max_bytes: int, watch: Callable[[pb.QueryProgress], None] | None) -> None:
        self.error: BaseException | None = None
        self._parts = iter(call)
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._watch = watch
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._pieces: deque[bytes] = deque()
        self._over = False
        self._end: pb.QueryEnd | None = None

    def open(self) -> Any:
        import pyarrow as pa

        # Of a file, Arrow needs read and closed alone.
        file: Any = self
        return pa.ipc.open_stream(pa.PythonFile(file, mode="r"))

    def end(self) -> pb.QueryEnd:
        """Returns the message behind the rows."""
        if self._end is None and self._chunk():
            raise no_stream("there is more after its end")
        if self._end is None:
            raise broken_off()
        return self._end

    def read(self, size: int = -1) -> bytes:
        try:
            return self._read(size)
        except BaseException as e:
            self.error = e
            raise

    def _read(self, size: int) -> bytes:
        if size <= 0:
            return b""
        if not self._pieces and not self._over:
            self._frame()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > size:
            self._pieces.appendleft(piece[size:])
            return piece[:size]
        while len(piece) < size and self._pieces:
            following = self._pieces.popleft()
            missing = size - len(piece)
            if len(following) > missing:
                self._pieces.appendleft(following[missing:])
            piece += following[:missing]
        return piece

    def _frame(self) -> None:
        """Appends the next message of the Arrow stream to ``_pieces``."""
        prefix = self._take(8)
        if not prefix and self._end is None:
            raise broken_off()
        self._over = not prefix or prefix == _CONTINUATION + bytes(4)
        if self._over:
            self._pieces.extend([prefix] if prefix else [])
            return
        (size,) = struct.unpack_from("<i", prefix, 4)
        if prefix[:4] != _CONTINUATION or not 0 < size <= _MAX_METADATA:
            raise no_stream("a message has no sound prefix")
        metadata = self._whole(size)
        try:
            length = body_length(metadata)
        except struct.error:
            raise no_stream("a message makes no sense") from None
        body = self._whole(length)
        self._pieces.extend(piece for piece in (prefix, metadata, body) if piece)

    def _whole(self, size: int) -> bytes:
        data = self._take(size)
        if len(data) < size:
            raise broken_off() if self._end is None else no_stream("its last message is cut")
        return data

    def _take(self, size: int) -> bytes:
        """Returns ``size`` bytes, or fewer at the end of the answer."""
        while self._held < size and self._chunk():
            pass
        taken: list[bytes] = []
        missing = size
        while missing and self._chunks:
            chunk = self._chunks.popleft()
            if len(chunk) > missing:
                self._chunks.appendleft(chunk[missing:])
                chunk = chunk[:missing]
            taken.append(chunk)
            missing -= len(chunk)
        self._held -= size - missing
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _chunk(self) -> bool:
        """Waits for the next piece of the answer; returns False at its end."""
        while (part := sheltered(lambda: next(self._parts, None))) is not None:
            kind = part.WhichOneof("part")
            if kind == "progress" and self._watch is not None:
                self._watch(part.progress)
            elif kind == "end":
                self._end = part.end
                return False
            elif kind == "arrow" and part.arrow:
                self._left -= len(part.arrow)
                if self._left < 0:
                    raise QueryMemory(f"the answer is larger than {self._max_bytes} bytes", hint=_HELD)
                self._chunks.append(part.arrow)
                self._held += len(part.arrow)
                return True
        return False
