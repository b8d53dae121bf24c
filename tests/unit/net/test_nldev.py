"""Queue pairs from messages as RDMA_NLDEV sends them."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any

from fakes import TOTALS, Processes, Readers
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ProbingError, TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.net.netlink import HEADER, attribute
from probing.daemon.net.rdma import qps
from probing.daemon.net.rdma.nldev import read_qps
from probing.daemon.net.rdma.qps import QueuePairs
from probing.daemon.source import Identity


def u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def u8(kind: int, value: int) -> bytes:
    return attribute(kind, bytes([value]))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def nested(kind: int, *values: bytes) -> bytes:
    return attribute(kind | 0x8000, b"".join(values))


def qp(number: int, peer: int | None, pid: int | None, *, state: int = 3, kind: int = 2) -> bytes:
    parts = [u32(3, 1), u32(21, number)]
    parts += [u32(22, peer), u32(23, 101)] if peer is not None else []
    parts += [u32(24, 103), u8(26, kind), u8(27, state)]
    parts += [u32(28, pid)] if pid is not None else [text(29, "ib_core")]
    return nested(20, *parts)


def cm_id(number: int, host: str, port: int) -> bytes:
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(120)
    return nested(31, u32(21, number), attribute(34, address))


class Kernel:
    """Two devices: their lists by (command, index)."""

    def __init__(self, lists: dict[tuple[int, int], list[bytes]]) -> None:
        self.lists = lists
        self.pending: list[bytes] = []

    def send(self, data: bytes) -> None:
        length, kind, _, sequence, _ = HEADER.unpack_from(data)
        index = struct.unpack_from("=I", data, 20)[0] if length > HEADER.size else -1
        found = self.lists.get((kind - (5 << 10), index), [])

        def message(kind: int, body: bytes) -> bytes:
            return HEADER.pack(HEADER.size + len(body), kind, 2, sequence, 0) + body

        refused = isinstance(found, int)
        self.pending = [message(2, struct.pack("=i", -22))] if refused else [message(kind, body) for body in found]
        self.pending.append(message(3, bytes(4)))

    def recv(self, _: int) -> bytes:
        return self.pending.pop(0)


DEVICES = [u32(1, 0) + text(2, "mlx5_0") + u32(3, 1), u32(1, 4) + text(2, "mlx5_1") + u32(3, 1)]


def kernel(**more: Any) -> Any:
    return Kernel(
        {
            (1, -1): DEVICES,
            (10, 0): [
                u32(1, 0) + text(2, "mlx5_0") + nested(19, qp(17, 1009, 4242), qp(1, None, None, kind=1)),
                u32(1, 0) + text(2, "mlx5_0") + nested(19, qp(18, 1013, 4243, state=6)),
            ],
            (10, 4): [u32(1, 4) + nested(19, qp(19, None, 4242, kind=4))],
            (11, 4): [u32(1, 4) + nested(30, cm_id(19, "10.1.2.3", 18515))],
            **more,
        }
    )


def test_the_queue_pairs_of_processes_on_all_devices() -> None:
    found = read_qps(kernel())
    assert found["problems"] == []
    assert found["qps"] == [
        {
            "hca": "mlx5_0",
            "port": 1,
            "qpn": 17,
            "peer_qpn": 1009,
            "type": "RC",
            "state": "RTS",
            "sq_psn": 103,
            "rq_psn": 101,
            "pid": 4242,
            "peer_address": None,
        },
        {
            "hca": "mlx5_0",
            "port": 1,
            "qpn": 18,
            "peer_qpn": 1013,
            "type": "RC",
            "state": "ERR",
            "sq_psn": 103,
            "rq_psn": 101,
            "pid": 4243,
            "peer_address": None,
        },
        {
            "hca": "mlx5_1",
            "port": 1,
            "qpn": 19,
            "peer_qpn": None,
            "type": "UD",
            "state": "RTS",
            "sq_psn": 103,
            "rq_psn": None,
            "pid": 4242,
            "peer_address": "10.1.2.3:18515",
        },
    ]


def test_a_device_that_refuses_is_named_and_holds_up_no_other() -> None:
    made = kernel()
    made.lists[10, 0] = 22
    found = read_qps(made)
    assert [one["hca"] for one in found["qps"]] == ["mlx5_1"]
    assert found["problems"] == ["mlx5_0: the kernel refuses a netlink request: Invalid argument"]


@given(st.binary(max_size=200))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    made = kernel()
    made.lists[10, 0] = [data, nested(19, nested(20, data)), nested(19, data)]
    made.lists[1, -1] = [*DEVICES, data]
    with suppress(ProbingError):
        assert "qps" in read_qps(made)


def test_each_has_its_rank_or_the_name_of_its_process(monkeypatch: Any) -> None:
    monkeypatch.setattr(qps, "NETLINK_RDMA", socket.NETLINK_ROUTE)
    reads = Readers(
        rdma_devices=lambda _: ["mlx5_0"],
        list=lambda request: [[pid, 77, 1, "S", "storage", "/bin/x"] for pid in request["pids"]],
    )
    parsers = Readers(rdma_qps=lambda _: None)
    monkeypatch.setattr(parsers, "call", lambda *_, **__: read_qps(kernel()))
    made = QueuePairs(reads, parsers, Processes(Identity(4242, 7, "j", "r", "trainer", 3)), "n1")  # type: ignore[arg-type]
    rows = made.rows(FakeClock(real_ns=5_000).pair()).to_pylist()
    assert [(row["pid"], row["job"], row["rank"], row["start_ns"], row["comm"]) for row in rows] == [
        (4242, "j", 3, 7, None),
        (4243, None, None, 77, "storage"),
        (4242, "j", 3, 7, None),
    ]
    assert made.states(TOTALS)[0].reason == ""

    def silent(*_: Any, **__: Any) -> Any:
        raise TargetTimeout("a file could not be parsed in time")

    monkeypatch.setattr(parsers, "call", silent)
    assert made.rows(FakeClock().pair()).num_rows == 0
    assert made.states(TOTALS)[0].state == "degraded"
    # It is left alone for a while.
    monkeypatch.setattr(parsers, "call", lambda *_, **__: read_qps(kernel()))
    assert made.rows(FakeClock().pair()).num_rows == 0
    assert "for a while" in made.states(TOTALS)[0].reason


def test_without_devices_the_kernel_is_not_asked() -> None:
    made = QueuePairs(Readers(rdma_devices=lambda _: []), Readers(), Processes(), "n1")  # type: ignore[arg-type]
    assert made.rows(FakeClock().pair()).num_rows == 0
    assert made.states(TOTALS)[0].state == "running"
