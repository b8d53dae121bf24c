"""Messages of a process that may have been taken over: none does harm, and no descriptor stays open."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from probing.api.errors import InternalError
from probing.daemon.ipc import MAX_FDS, Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with Channel(ours) as channel, theirs:
        yield channel, theirs


def descriptors_of(inode: int) -> int:
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += path.stat().st_ino == inode
    return count


@pytest.mark.parametrize("header", [b"{", b"\xff", b"[" * 100_000, b'{"a":' * 20_000])
def test_a_header_that_is_no_object_is_an_error_of_the_other_end(
    ends: tuple[Channel, socket.socket], header: bytes
) -> None:
    channel, other = ends
    other.sendall(struct.pack("!II", len(header), 0) + header)
    with pytest.raises(InternalError, match="not JSON"):
        channel.receive(60)


def test_descriptors_beside_each_piece_of_a_message_do_not_use_all_up(ends: tuple[Channel, socket.socket]) -> None:
    # GIVEN a message of which each byte brings as many descriptors as a message may have
    channel, other = ends
    frame, memory = struct.pack("!II", 2, 0) + b"{}", os.memfd_create("one")
    inode = os.fstat(memory).st_ino
    for byte in frame:
        socket.send_fds(other, [bytes([byte])], [memory] * MAX_FDS)
    # WHEN it is received
    with pytest.raises(InternalError, match="more than 16 descriptors"):
        channel.receive(60)
    # THEN it is refused, and its descriptors are closed
    assert descriptors_of(inode) == 1
    os.close(memory)
