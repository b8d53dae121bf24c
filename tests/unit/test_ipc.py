"""Messages of a process that may have been taken over: none does harm, and no descriptor stays open."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from probing.api.errors import InternalError
from probing.daemon.ipc import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with Channel(ours) as channel, theirs:
        yield channel, theirs


@pytest.mark.parametrize("header", [b"{", b"\xff", b"[" * 100_000, b'{"a":' * 20_000])
def test_a_header_that_is_no_object_is_an_error_of_the_other_end(
    ends: tuple[Channel, socket.socket], header: bytes
) -> None:
    channel, other = ends
    other.sendall(struct.pack("!II", len(header), 0) + header)
    with pytest.raises(InternalError, match="not JSON"):
        channel.receive(60)
