"""The parser of sock_diag on messages made here: uniform, mixed, cut, refused."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget, ProbingError, TargetError
from probing.daemon.net import netlink
from probing.daemon.net.netlink import HEADER, attribute, attributes, messages
from probing.daemon.net.tcp.sock_diag import SOCKET, address_text, parse

INFO_BYTES = 280


def connection(cookie: int, inode: int, *, rtt: int = 31, extra: bytes = b"", info: int = INFO_BYTES) -> bytes:
    """A message as the kernel sends it, with other attributes before tcp_info."""
    ends = struct.pack("!HH", 43_210, 29_500) + bytes([10, 0, 0, 1]) + bytes(12) + bytes([10, 0, 0, 2]) + bytes(12)
    head = struct.pack("=BBBB", socket.AF_INET, 1, 0, 0) + ends + struct.pack("=IQ", 0, cookie)
    head += struct.pack("=IIIII", 0, 11, 13, 1000, inode)
    tcp = bytearray(max(info, INFO_BYTES))
    struct.pack_into("=I", tcp, 68, rtt)
    struct.pack_into("=I", tcp, 100, 17)  # total_retrans
    struct.pack_into("=Q", tcp, 120, 7919)  # bytes_acked
    body = head + extra + attribute(8, b"\0") + (attribute(2, bytes(tcp[:info])) if info else b"")
    return message(20, body)


def message(kind: int, body: bytes) -> bytes:
    return HEADER.pack(HEADER.size + len(body), kind, 2, 1, 0) + body


DONE = message(3, bytes(4))


def test_all_that_is_used_is_where_the_kernel_puts_it() -> None:
    (found,) = parse([connection(5, 1_000_003), DONE])
    assert (found["cookie"], found["inode"], found["uid"], found["unread"]) == (5, 1_000_003, 1000, 11)
    assert (found["local_port"], found["peer_port"], found["state"]) == (43_210, 29_500, 1)
    assert (found["rtt"], found["retrans"], found["bytes_acked"]) == (31, 17, 7919)
    assert address_text(int(found["family"]), found["local"].tobytes()) == "10.0.0.1"
    assert address_text(int(found["family"]), found["peer"].tobytes()) == "10.0.0.2"


def test_lists_of_equal_and_of_mixed_messages_give_every_connection() -> None:
    alike = b"".join(connection(n, n) for n in range(1, 60))
    # Another extension moves tcp_info, with the length the same or not.
    moved = connection(70, 70, extra=attribute(22, b"\0\0"))
    same_length = connection(71, 71, extra=attribute(22, bytes(8)), info=INFO_BYTES - 12)
    without = connection(72, 72, info=0)
    found = parse([alike, alike[: len(connection(1, 1))], moved + same_length + connection(73, 73) + without + DONE])
    assert found["cookie"].tolist().count(1) == 2
    assert set(found["cookie"].tolist()) == {*range(1, 60), 70, 71, 73}
    assert set(found["rtt"].tolist()) == {31}
    assert all(row["cookie"] == row["inode"] for row in found)


def test_a_shorter_tcp_info_is_left_out_and_a_longer_one_is_read() -> None:
    assert parse([connection(1, 1, info=200)]).shape == (0,)
    assert parse([connection(1, 1, info=512)])["retrans"].tolist() == [17]
    assert parse([DONE]).dtype == SOCKET


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(TargetError, match="Operation not permitted"):
        parse([message(2, struct.pack("=i", -1) + bytes(16))])


@pytest.mark.parametrize("cut", [1, 15, 17, 80, 200])
def test_a_cut_message_is_an_error(cut: int) -> None:
    whole = connection(1, 1)
    piece = whole + whole[:cut]
    if cut < HEADER.size:
        assert len(parse([piece])) == 1
    else:
        with pytest.raises(CorruptTarget):
            parse([piece])
    with pytest.raises(CorruptTarget):
        parse([message(20, b"short")])


@given(st.binary(min_size=16, max_size=600))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    for piece in (data, connection(1, 1)[:-40] + data, message(20, data)):
        try:
            assert parse([piece]).dtype == SOCKET
        except ProbingError:
            continue
        list(attributes(data, 0, len(data)))


def test_ipv4_inside_ipv6_is_the_same_address() -> None:
    mapped = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
    assert address_text(socket.AF_INET6, mapped) == "10.0.0.1"
    assert address_text(socket.AF_INET6, bytes(15) + b"\1") == "::1"


class Kernel:
    """Answers each send with prepared pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.sequence = 0

    def send(self, data: bytes) -> None:
        self.sequence = HEADER.unpack_from(data)[3]

    def recv(self, _: int) -> bytes:
        piece = bytearray(self.pieces.pop(0))
        struct.pack_into("=I", piece, 8, self.sequence)
        return bytes(piece)


def test_a_list_ends_with_the_last_message_and_at_the_bound() -> None:
    same = connection(1, 1) * 3
    kernel = Kernel(same, connection(2, 2) + DONE, b"never asked for......")
    pieces = netlink.dump(kernel, 20, b"", most_bytes=1 << 20)  # type: ignore[arg-type]
    assert parse(pieces)["cookie"].tolist() == [1, 1, 1, 2]
    assert len(kernel.pieces) == 1
    bounded = netlink.dump(Kernel(*[same] * 9), 20, b"", most_bytes=2 * len(same))  # type: ignore[arg-type]
    assert len(bounded) == 2


def test_answers_to_a_request_that_was_given_up_are_dropped() -> None:
    class Late(Kernel):
        def recv(self, size: int) -> bytes:
            return connection(9, 9) if len(self.pieces) == 2 and self.pieces.pop(0) else super().recv(size)

    kernel = Late(b"stale", connection(3, 3) + DONE)
    pieces = netlink.dump(kernel, 20, b"", most_bytes=1 << 20)  # type: ignore[arg-type]
    # The sequence of the stale one is 1.
    assert [next(messages(piece))[0] for piece in pieces] == [20]
    assert parse(pieces)["cookie"].tolist() == [3]
