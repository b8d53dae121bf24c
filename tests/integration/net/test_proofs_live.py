"""Who takes part in a job, by what the kernel shows of real connections between network namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from fakes import at_once
from network_namespaces import Peer, connected, may_make_namespaces, namespaces
from processes_helpers import start_ns_of
from waiting import until

from probing.api.errors import PeerError, PrivilegeError
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.clock import SystemClock
from probing.daemon.diagnose.coordination.peers import Holder, PeerFacts, Sight
from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.daemon.diagnose.coordination.sight import LocalSights
from probing.daemon.net.tcp.source import TcpSource
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2")
KEY = ("j", "r")


class Node:
    """A node whose rank of the job is ``peer``: its source of sockets, and the collector that shows them."""

    def __init__(self, readers: ReaderPool, peer: Peer) -> None:
        self.rank = Identity(peer.pid, start_ns_of(peer.pid), *KEY, "trainer", 0)
        self.source = TcpSource(readers, self, self, SystemClock(), "n", 1.0, on=True)
        self.sights = LocalSights(self)  # type: ignore[arg-type]

    def states(self) -> list[str]:
        """The states of its sockets, read now."""
        self.source._owners._due = self.source._rest_until = 0.0
        self.source.tick()
        return self.source.live_tables["net.sockets"](SystemClock().pair()).column("state").to_pylist()

    def put(self, table: str, batch: Any) -> None: ...

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)

    # For the source, the processes; for the sights, the collector.

    def live(self, table: str = "", timeout: float = 0.0) -> Any:
        if not table:
            return [self.rank]
        if table == "net.sockets":
            self.states()
            return ipc_bytes(self.source.live_tables[table](SystemClock().pair()))
        # An operation of the run has ended: until then all claims count.
        who = self.rank
        row = {"node": who.job, "ts": 1, "job": who.job, "run": who.run, "pid": who.pid, "start_ns": who.start_ns}
        return ipc_bytes(batch_of(table, [{**row, "rank": 0, "world_size": 2, "calls": 1}]))


class Net:
    """What n1 hears of n2, and of "-", which says that it has the address of n1, and is connected with all."""

    def __init__(self, own: Node, other: Node) -> None:
        self._own, self._other = own, other

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        return [Holder("n2", True, False), Holder("-", True, False)]

    def sight(self, node: str, job: str, run: str, timeout: float) -> Future[Sight]:
        return at_once(lambda: self._sight(node, job, run))

    def _sight(self, node: str, job: str, run: str) -> Sight:
        if node == "n2":
            return self._other.sights.sight(job, run)._replace(hosts=frozenset(("192.0.2.2",)))
        known = self._own.sights.sight(job, run)
        return Sight(known.addresses | {"192.0.2.9"}, known.addresses | known.peers | {"192.0.2.9"})

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        raise PeerError("not asked")

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        raise PeerError("not asked")

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None: ...


@pytest.mark.parametrize("enters", [True, False], ids=["sock_diag", "proc"])
@pytest.mark.parametrize("first", [0, 1], ids=["connects", "accepts"])
def test_a_node_whose_rank_is_connected_takes_part(
    readers: ReaderPool, monkeypatch: pytest.MonkeyPatch, enters: bool, first: int
) -> None:
    def refused(*_: object) -> None:
        raise PrivilegeError("connections in containers need CAP_SYS_ADMIN for the collector")

    if not enters:
        monkeypatch.setattr("probing.daemon.net.tcp.sockets.socket_in", refused)
    with namespaces() as pair, connected(pair) as ends:
        own, other = (Node(readers, ends[at]) for at in (first, 1 - first))
        try:
            for node in (own, other):
                until(lambda node=node: "open" in node.states(), what="its sockets")  # type: ignore[misc]
            assert bool(list(own.source._sockets.refused)) != enters
            proofs = Proofs("n1", Net(own, other), own.sights, grace_s=0.0)
            proofs.hold({KEY: True})
            proofs.step()
            assert [one.node for one in proofs.holders(*KEY)] == ["n2"]
            assert proofs.unproven(*KEY) == ("-",)
            # The connection ends at both, and the proof stays.
            for end in ends:
                end.send(-1)
            until(lambda: "open" not in own.states(), what="the end")
            assert own.sights.sight(*KEY).peers
            assert proofs.takes_part(*KEY, "n2")
        finally:
            own.source.stop()
            other.source.stop()
