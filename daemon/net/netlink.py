"""Requests a list from the kernel by netlink, and splits the answer into messages and attributes.

Formats: netlink(7), include/uapi/linux/netlink.h; all numbers are in the byte order of the machine. pyroute2 0.9.7 is
not used: it decodes every attribute of a message, which takes 50 us for a TCP connection, and its import takes 250 ms.
64 ranks have thousands of connections, which are read each second.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Iterator

from probing.api.errors import CorruptTarget, TargetError, TargetTimeout

__all__ = ("HEADER", "attribute", "attributes", "dump", "messages", "received", "text_of")

# struct nlmsghdr: length, type, flags, sequence, port. struct nlattr: length, type.
HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")
_REQUEST, _DUMP = 0x1, 0x300
_NOOP, _ERROR, _DONE = 1, 2, 3
# The flags NLA_F_NESTED and NLA_F_NET_BYTEORDER are not part of the type.
_TYPE_MASK = 0x3FFF
# The kernel returns at most 32 KiB in one receive.
_RECEIVE_BYTES = 1 << 16
_sequence = itertools.count(1)


def dump(sock: socket.socket, kind: int, body: bytes, *, most_bytes: int) -> list[bytes]:
    """Returns the kernel's answer to a request of type ``kind`` with NLM_F_DUMP, as the pieces that were received.

    Stops, without an error, at ``most_bytes``: then the socket must not be used again. Raises the errors of
    ``received``.
    """
    pieces: list[bytes] = []
    size = 0
    for piece in received(sock, kind, body):
        pieces.append(piece)
        size += len(piece)
        if size >= most_bytes:
            break
    return pieces


def received(sock: socket.socket, kind: int, body: bytes) -> Iterator[bytes]:
    """Yields the pieces of the kernel's answer to a request of type ``kind`` with NLM_F_DUMP, as they are received.

    The timeout of ``sock`` is for each piece. The kernel refuses another request over ``sock`` until the answer has
    ended. Raises TargetTimeout, or TargetError if the kernel refuses.
    """
    sequence = next(_sequence) & 0xFFFFFFFF
    ended = False
    try:
        sock.send(HEADER.pack(HEADER.size + len(body), kind, _REQUEST | _DUMP, sequence, 0) + body)
        while not ended:
            piece = sock.recv(_RECEIVE_BYTES)
            if len(piece) < HEADER.size or HEADER.unpack_from(piece)[3] != sequence:
                continue  # The message is left over from a request that was given up.
            ended = _ends(piece)
            yield piece
    except TimeoutError as e:
        raise TargetTimeout("the kernel does not answer over netlink") from e
    except OSError as e:
        raise TargetError(f"a request to the kernel over netlink failed: {e.strerror}") from e


def messages(piece: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields (type, begin, end) of the body of each message in a piece, without messages that only end or pad a list.

    Raises CorruptTarget for an impossible length, TargetError if the kernel refused the request.
    """
    at = 0
    while at + HEADER.size <= len(piece):
        length, kind, _, _, _ = HEADER.unpack_from(piece, at)
        if length < HEADER.size or at + length > len(piece):
            raise CorruptTarget("a netlink message has an impossible length")
        if kind == _ERROR:
            _refuse(piece, at + HEADER.size)
        elif kind not in (_NOOP, _DONE):
            yield kind, at + HEADER.size, at + length
        at += _aligned(length)


def attributes(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (type, begin, end) of each attribute between two offsets. Stops at an attribute of impossible length."""
    while begin + ATTRIBUTE.size <= end:
        length, kind = ATTRIBUTE.unpack_from(data, begin)
        if length < ATTRIBUTE.size or begin + length > end:
            return
        yield kind & _TYPE_MASK, begin + ATTRIBUTE.size, begin + length
        begin += _aligned(length)


def attribute(kind: int, value: bytes) -> bytes:
    """Returns an attribute of type ``kind``, padded."""
    length = ATTRIBUTE.size + len(value)
    return ATTRIBUTE.pack(length, kind) + value + bytes(_aligned(length) - length)


def text_of(value: bytes, limit: int = 64) -> str:
    """Returns the text of an attribute up to its NUL byte, at most ``limit`` bytes."""
    return value.split(b"\0", 1)[0][:limit].decode("utf-8", "replace")


def _ends(piece: bytes) -> bool:
    """Returns whether this piece contains the end of the list, or the kernel's refusal."""
    length, kind = HEADER.unpack_from(piece)[:2]
    if length >= HEADER.size and len(piece) % length == 0 and kind > _DONE:
        # In most lists all messages have the same length. In this case only the last message of the piece is read.
        last = HEADER.unpack_from(piece, len(piece) - length)
        if last[:2] == (length, kind):
            return False
    at = 0
    while at + HEADER.size <= len(piece):
        length, kind, _, _, _ = HEADER.unpack_from(piece, at)
        if kind in (_DONE, _ERROR) or length < HEADER.size:
            return True
        at += _aligned(length)
    return False


def _refuse(piece: bytes, at: int) -> None:
    (code,) = struct.unpack_from("=i", piece, at) if at + 4 <= len(piece) else (0,)
    if code:
        raise TargetError(f"the kernel refuses a netlink request: {os.strerror(-code)}")


def _aligned(length: int) -> int:
    return (length + 3) & ~3
