"""The source of collectives on a session without a kernel: closing operations, attaching, threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fakes import Processes
from test_collectives_symbols import Symbol

from probing.api.errors import AttachError
from probing.daemon.bpf.build import build
from probing.daemon.bpf.libbpf import Object
from probing.daemon.bpf.probe_slots import SLOTS
from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.layouts.gloo import GLOO_LAYOUTS, NCCL_LAYOUTS
from probing.daemon.nccl_uprobes.operations.open_operations import abandoned
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.operations.symbols import NCCL

KEY = np.dtype([("object", "<u8"), ("position", "<u8"), ("start_ns", "<u8"), ("tgid", "<u8")])
SHARE_KEY = np.dtype([("start_ns", "<u8"), ("tgid", "<u8")])
VALUE = np.dtype([("t_call", "<u8"), ("state", "u1"), ("comm", "<u8")])


class Map:
    def __init__(self, keys: Any = (), values: Any = ()) -> None:
        self.keys = np.array(list(keys), KEY)
        self.values = np.array(list(values), VALUE)
        self.written: dict[int, bytes] = {}

    def update(self, key: int, value: bytes) -> None:
        self.written[key] = value

    def items(self) -> tuple[Any, Any]:
        return self.keys, self.values


class Shares:
    """The map ``operation_shares``, without values."""

    def __init__(self, keys: list[tuple[int, int]]) -> None:
        self.keys = list(keys)

    def items(self) -> tuple[Any, Any]:
        return np.array(self.keys, SHARE_KEY), None

    def delete(self, key: Any) -> bool:
        known = tuple(map(int, key)) in self.keys
        self.keys = [other for other in self.keys if other != tuple(map(int, key))]
        return known


class Link:
    adopted = False


class Session:
    def __init__(self) -> None:
        # Three operations of two processes, which have their communicators at the same address.
        operations = Map(
            [(1, 7, 10, 100), (2, 8, 10, 100), (3, 9, 20, 100)], [(50, 1, 0x70), (60, 2, 0x70), (70, 1, 0x70)]
        )
        self.maps: dict[str, Any] = {"gloo_layouts": Map(), "nccl_layouts": Map(), "operations": operations}
        self.shares = self.maps["operation_shares"] = Shares([(10, 100), (20, 100), (30, 7)])
        self.blind: tuple[int, int] | None = None
        self.ran: list[tuple[int, ...]] = []
        self.closed: list[tuple[int, ...]] = []
        self.links: list[Link] = []
        self.refuse = ""

    def attach_uprobe(
        self, program: str, fd: int, offsets: list[int], cookie: list[int], key: str = "", *, on_return: bool = False
    ) -> Link:
        if program == self.refuse:
            raise AttachError("no")
        self.links.append(Link())
        return self.links[-1]

    def identity(self, fd: int) -> tuple[int, int]:
        return os.fstat(fd).st_dev, os.fstat(fd).st_ino

    def detach(self, link: Link) -> None:
        self.links.remove(link)

    def run_program(self, name: str, context: bytes) -> int:
        ran = {"collectives_abandon": self.ran, "nccl_close": self.closed}[name]
        ran.append(tuple(np.frombuffer(context, "<u8").tolist()))
        return 1


class Slow:
    """An identity is answered only when the test allows it."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def identity(self, pid: int, start_ns: int) -> None:
        self.asked.set()
        self.answer.wait()


def nccl_symbols(_fd: int, _patterns: Any) -> list[Symbol]:
    return [Symbol(probe.pattern, 10 * n, 10 * n) for n, probe in enumerate(NCCL.probes, 1)]


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def source(session: Session) -> CollectivesSource:
    return CollectivesSource(session, Processes(), "n1", nccl_symbols)


def test_start_writes_the_layouts_and_closes_missed_operations(session: Session, source: CollectivesSource) -> None:
    session.blind = (40, 65)
    source.start()
    assert len(session.maps["gloo_layouts"].written) == len(GLOO_LAYOUTS)
    assert session.maps["nccl_layouts"].written[0] == NCCL_LAYOUTS[0].pack()
    assert session.ran == [(1, 7, 10, 100), (2, 8, 10, 100)]


def test_an_exit_closes_the_operations_of_that_process_only(session: Session, source: CollectivesSource) -> None:
    assert source.close_process(100, 20) == 1
    assert session.ran == [(3, 9, 20, 100)]
    assert session.shares.keys == [(10, 100), (30, 7)]


def test_exec_closes_the_operations_of_the_program(session: Session, source: CollectivesSource) -> None:
    # Operations of the new program stay open, as the event may come late.
    source.program_ended(100, 10, 65)
    assert session.ran == [(1, 7, 10, 100), (2, 8, 10, 100)]


def test_operations_of_ended_processes_are_closed(session: Session, source: CollectivesSource) -> None:
    assert source.close_ended(lambda pid, start_ns: (pid, start_ns) == (100, 20)) == 2
    assert session.ran == [(1, 7, 10, 100), (2, 8, 10, 100)]
    assert session.shares.keys == [(20, 100)]
    session.maps["operations"] = Map()
    assert source.close_ended(lambda *_: False) == 0
    assert session.shares.keys == []


def test_a_file_is_attached_once(session: Session, source: CollectivesSource, tmp_path: Any) -> None:
    path = tmp_path / "libnccl.so.2"
    path.touch()
    programs = {probe.program for probe in NCCL.probes if not probe.unless}
    with open(path, "rb") as file:
        assert source.attach(file.fileno(), bytes(path)) == len(programs)
        assert source.attach(file.fileno(), bytes(path)) == 0
        assert source.attach(file.fileno(), b"/other.so") == 0
        # Its probes were detached: it is attached again.
        source.forget(session.identity(file.fileno()))
        assert source.attach(file.fileno(), bytes(path)) == len(programs)


def test_operations_end_with_their_communicator(session: Session, source: CollectivesSource) -> None:
    """An abort closes earlier operations of that process on that communicator; a finalize does not."""
    path = next(path for path in build() if path.name == "nccl.bpf.o")
    with Object("nccl", path.read_bytes()) as found:
        records = np.zeros(4, found.btf.record("communicators"))
    events = [(55, 100, 10, 0x70, 5), (99, 100, 20, 0x70, 4), (99, 100, 10, 0x70, 3), (99, 7, 10, 0x70, 5)]
    for record, values in zip(records, events, strict=True):
        for name, value in zip(("t", "tgid", "start_ns", "comm", "event"), values, strict=True):
            record[name] = value
    batches = source.assemble_communicators(records, ClockPair(0, 0, 0))
    assert session.closed == [(1, 7, 10, 100, 1), (3, 9, 20, 100, 0)]
    states = batches["comm.communicators"].column("state").to_pylist()
    assert states == ["aborted", "destroyed", "finalized", "aborted"]


def test_probes_are_detached_again_when_one_cannot_be_attached(
    session: Session, source: CollectivesSource, tmp_path: Any
) -> None:
    path = tmp_path / "libnccl.so.2"
    path.touch()
    session.refuse = "nccl_enqueue"
    with open(path, "rb") as file, pytest.raises(AttachError):
        source.attach(file.fileno(), bytes(path))
    assert session.links == []


def test_operations_of_a_replaced_layout_are_abandoned() -> None:
    values = np.array([(50, 1, 0), (60, 2, 0)], VALUE)
    assert abandoned(values)["state"].tolist() == [5, 5]
    assert values["state"].tolist() == [1, 2]


def test_slots_are_those_reserved_for_each_library(source: CollectivesSource) -> None:
    assert sorted(source.slots) == [slot for name in ("gloo", "nccl", "jax") for slot in SLOTS.blocks[name]]


def test_nothing_seen_means_no_backends(source: CollectivesSource) -> None:
    assert source.backends_of(100, 10) == frozenset()
    assert source.assemble(np.zeros(0, VALUE), ClockPair(0, 0, 0)) == {}


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    started: list[threading.Thread] = []

    def start(call: Callable[[], object]) -> threading.Thread:
        started.append(threading.Thread(target=call, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for thread in started:
        thread.join(20)


def collectives_of(pid: int) -> Any:
    path = next(path for path in build() if path.name == "gloo.bpf.o")
    with Object("gloo", path.read_bytes()) as found:
        records = np.zeros(1, found.btf.record("collectives"))
    records["tgid"] = pid
    return records


def test_an_exit_is_handled_while_the_drain_makes_rows(session: Session, in_thread: Any) -> None:
    """The thread that identifies processes must not wait for the drain, which may wait for an identity."""
    # GIVEN a drain that is in the middle of making rows
    slow = Slow()
    source = CollectivesSource(session, slow, "n1", nccl_symbols)
    drain = in_thread(lambda: source.assemble(collectives_of(7), ClockPair(0, 0, 0)))
    assert slow.asked.wait(20)
    # THEN an exit closes the operations of that process meanwhile
    exited = in_thread(lambda: source.close_process(100, 20))
    exited.join(20)
    ended, closed = not exited.is_alive(), list(session.ran)
    slow.answer.set()
    drain.join(20)
    assert ended
    assert closed == [(3, 9, 20, 100)]


def test_the_drain_goes_on_during_a_query_for_operations_in_flight(session: Session, in_thread: Any) -> None:
    # GIVEN a query for the operations in flight that takes long
    slow = Slow()
    source = CollectivesSource(session, slow, "n1", nccl_symbols)
    session.maps["operations"] = Map()
    session.maps["operations"].values = collectives_of(7)
    asking = in_thread(lambda: source.inflight(ClockPair(0, 0, 0)))
    assert slow.asked.wait(20)
    # THEN the drain goes on
    drain = in_thread(lambda: source.assemble(collectives_of(7)[:0], ClockPair(0, 0, 0)))
    drain.join(20)
    ended = not drain.is_alive()
    slow.answer.set()
    asking.join(20)
    assert ended


def test_a_process_is_forgotten_once_its_last_records_are_rows(session: Session) -> None:
    source = CollectivesSource(session, Processes(), "n1", nccl_symbols)
    records = collectives_of(100)
    records["start_ns"], records["backend"] = 20, 1

    def drain() -> None:
        source.assemble(records, ClockPair(0, 0, 0))

    drain()
    source.close_process(100, 20)
    assert source.backends_of(100, 20) == {"gloo"}
    drain()
    records = records[:0]
    drain()
    assert source.backends_of(100, 20) == frozenset()


def test_a_process_whose_exit_is_not_reported_is_forgotten(session: Session) -> None:
    # GIVEN a process that ended before it was read, so that nobody hears of its exit
    source = CollectivesSource(session, Processes(), "n1", nccl_symbols)
    records = collectives_of(100)
    records["start_ns"], records["backend"], records["comm_size"] = 20, 1, 2
    records["name_form"], records["name"] = 1, b"0"
    source.assemble(records, ClockPair(0, 0, 0))
    assert source.processes_of("0") == [(100, 20)]
    # WHEN its operations are looked for
    for _ in range(3):
        source.close_ended(lambda pid, start_ns: (pid, start_ns) != (100, 20))
        source.assemble(records[:0], ClockPair(0, 0, 0))
    # THEN nothing is kept of it
    assert source.processes_of("0") == []
    assert source.backends_of(100, 20) == frozenset()


def test_an_observer_that_fails_costs_no_rows(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    source = CollectivesSource(session, Processes(), "n1", nccl_symbols)
    observed: list[int] = []

    def fail(_operations: Any, _pair: ClockPair) -> None:
        raise OverflowError("too large")

    source.observers += [fail, lambda operations, _: observed.append(len(operations))]
    batches = source.assemble(collectives_of(7), ClockPair(0, 0, 0))
    assert batches["comm.ops"].num_rows == 1
    assert observed == [1]
    assert "1 operations could not be observed" in caplog.text
