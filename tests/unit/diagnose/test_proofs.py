"""Which nodes take part in a job: those whose ranks' connections are seen, whatever others say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from fakes import at_once

from probing.api.errors import PeerError
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.diagnose.coordination.peers import Holder, Holding, PeerFacts, Sight, plain_address
from probing.daemon.diagnose.coordination.proofs import MAX_ASKED, START_S, Proofs
from probing.daemon.diagnose.coordination.sight import LocalSights

KEY = ("job", "run")
GRACE_S = 10.0


def at(*numbers: int) -> frozenset[str]:
    return frozenset(f"10.0.0.{number}" for number in numbers)


class Net:
    """Nodes of a job. ``shown``: what each shows when it is asked; a node without that does not answer by its name.

    ``own``, ``here``: what the kernel of this node shows. ``asked``: the nodes that were asked.
    """

    def __init__(self, **shown: Sight) -> None:
        self.shown: dict[str, Sight] = dict(shown)
        self.claiming: dict[str, Holder] = {name: Holder(name, True, False) for name in shown}
        self.own = Sight()
        self.here = Holding(frozenset((0,)), 4, 7, living=True)
        self.asked: list[str] = []
        self.now = 0.0

    def claim(self, *names: str, failed: bool = False) -> None:
        self.claiming |= {name: Holder(name, True, failed) for name in names}

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        return list(self.claiming.values()) if (job, run) == KEY else ()

    def sight(self, node: str, job: str, run: str, timeout: float) -> Future[Sight]:
        return at_once(lambda: self._sight(node))

    def _sight(self, node: str) -> Sight:
        self.asked.append(node)
        if node not in self.shown:
            raise PeerError(f"{node} does not answer")
        return self.shown[node]

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        raise NotImplementedError

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        raise NotImplementedError

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None: ...


class Here:
    def __init__(self, net: Net) -> None:
        self._net = net

    def sight(self, job: str, run: str) -> Sight:
        return self._net.own

    def holding(self, job: str, run: str) -> Holding:
        return self._net.here


def examined(net: Net, node: str = "n1", *, trusted: bool = False) -> Proofs:
    """The proofs of ``node``, some seconds after its run began."""
    one = Proofs(node, net, Here(net), grace_s=GRACE_S, trusted=trusted, now=lambda: net.now)
    one.hold({KEY: True})
    one.step()
    net.now += GRACE_S
    return one


def parts(one: Proofs) -> list[str]:
    return [holder.node for holder in one.holders(*KEY)]


def test_a_node_that_only_says_so_takes_no_part() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)), **{"-": Sight(at(9), at(1, 2), at(9))})
    net.own = Sight(at(1), at(2))
    one = examined(net)
    assert parts(one) == ["n2"]
    assert one.takes_part(*KEY, "n2")
    assert not one.takes_part(*KEY, "-")
    assert one.unproven(*KEY) == ("-",)
    assert "-" in one.problems[0]


@pytest.mark.parametrize(
    ("lie", "proves"),
    [
        # An address at which another node of the job answers, and one of this node.
        (Sight(at(9, 2), at(1), at(9)), False),
        (Sight(at(9, 1), at(1), at(9)), False),
        # A node that shows everything as the other ends of its ranks sees nothing of itself.
        (Sight(at(9), at(1, 2, 3, 9), at(9)), False),
        (Sight(), False),
        (Sight(at(9), at(1), at(8)), False),
        # Its ranks are connected with ours.
        (Sight(at(4), at(1), at(9)), True),
        (Sight(at(9), at(1), at(4)), True),
    ],
)
def test_what_a_node_says_of_itself_proves_nothing(lie: Sight, proves: bool) -> None:
    net = Net(n2=Sight(at(2), at(1, 3), at(2)), n3=Sight(at(3), at(2), at(13)), **{"-": lie})
    net.own = Sight(at(1), at(2, 4))
    assert parts(examined(net)) == ["n2", "n3", *(["-"] if proves else [])]


def test_an_address_that_another_node_claims_proves_neither_but_where_its_daemon_answers() -> None:
    # Ranks of n2 have a network of their own, at 22, which the node "-" claims, too.
    net = Net(n2=Sight(at(22), at(1), at(2)), n3=Sight(at(3), at(1), at(3)), **{"-": Sight(at(22, 3), (), at(9))})  # type: ignore[arg-type]
    net.own = Sight(at(1), at(22, 3))
    assert parts(examined(net)) == ["n3"]


def test_a_node_counts_that_a_node_of_the_job_sees() -> None:
    # A chain: each is connected with the next alone.
    names = [f"n{number:02d}" for number in range(2, 9)]
    net = Net(**{name: Sight(at(i), at(i - 1, i + 1), at(i)) for i, name in enumerate(names, 2)})
    net.own = Sight(at(1), at(2))
    one = examined(net, "n01")
    assert parts(one) == names


def test_a_stranger_vouches_for_nobody() -> None:
    net = Net(x1=Sight(at(8), at(9), at(8)), x2=Sight(at(9), at(8, 1), at(9)))
    net.own = Sight(at(1), at(2))
    assert parts(examined(net)) == []


def test_a_node_that_answers_by_another_name_takes_no_part() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    # Its record has an address of n2, where n2 answers.
    net.claim("-")
    net.own = Sight(at(1), at(2))
    assert parts(examined(net)) == ["n2"]


def test_an_older_node_counts_by_the_address_at_which_it_answers() -> None:
    net = Net(n2=Sight(hosts=at(2)))
    net.own = Sight(at(1), at(2))
    assert parts(examined(net)) == ["n2"]


def test_a_proof_holds_for_the_life_of_the_run() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    net.own = Sight(at(1), at(2))
    one = examined(net)
    net.own, net.shown = Sight(), {}
    for _ in range(9):
        net.now += 1000
        one.step()
    assert parts(one) == ["n2"]
    one.hold({})
    one.hold({KEY: True})
    net.own = Sight(at(1), at(3))
    one.step()
    net.now += GRACE_S
    assert parts(one) == []


def test_connections_that_come_later_are_seen() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    net.own = Sight(at(1), at(3))
    one = examined(net)
    assert parts(one) == []
    net.own = Sight(at(1), at(2, 3))
    net.now += 1
    one.step()
    assert parts(one) == ["n2"]
    assert one.problems == []


def test_all_claims_count_until_the_first_operation_and_some_seconds_longer_once() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    # Its data come from elsewhere.
    net.own, net.here = Sight(at(1), at(3)), net.here._replace(calls=0)
    one = Proofs("n1", net, Here(net), grace_s=GRACE_S, now=lambda: net.now)
    one.hold({KEY: True})
    for _ in range(100):
        net.now += 1
        one.step()
        assert parts(one) == ["n2"]
        # But nobody is believed about findings before it is proven, and a silent leader is replaced.
        assert not one.takes_part(*KEY, "n2")
        assert one.is_new(*KEY) == (net.now < GRACE_S)
    net.here = net.here._replace(calls=1)
    for _ in range(8):
        net.now += 1
        one.step()
        assert parts(one) == ["n2"]
    assert one.is_new(*KEY)
    net.now += GRACE_S
    one.hold({KEY: True})
    assert parts(one) == []
    net.claim("-")
    net.here = net.here._replace(calls=0)
    one.step()
    assert parts(one) == []


def test_a_node_that_never_sees_an_operation_believes_no_claims_in_the_end() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    net.here = net.here._replace(calls=0)
    one = examined(net)
    assert parts(one) == ["n2"]
    net.now = START_S
    one.step()
    assert parts(one) == []
    assert one.unproven(*KEY) == ("n2",)


def test_a_job_whose_ranks_are_all_here_has_no_other_nodes() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    net.own = Sight(at(1), at(2))
    net.here = Holding(frozenset(range(4)), 4, 7, living=True)
    for trusted in (False, True):
        one = examined(net, trusted=trusted)
        assert parts(one) == []
        assert not one.takes_part(*KEY, "n2")
    # A hostile world size costs nothing.
    assert not Holding(frozenset((0, -5, 1 << 30)), 1 << 31).whole


def test_an_administrator_may_believe_all_claims() -> None:
    net = Net(n2=Sight(), **{"-": Sight()})
    one = examined(net, trusted=True)
    assert parts(one) == ["n2", "-"]
    assert one.takes_part(*KEY, "-")
    assert (net.asked, one.problems) == ([], [])


def test_the_name_of_a_job_is_shown_without_control_characters() -> None:
    net = Net()
    net.own = Sight(at(1), at(3))
    net.holders = lambda job, run: [Holder("-", True, False)]  # type: ignore[method-assign]
    one = Proofs("n1", net, Here(net), grace_s=0.0, now=lambda: net.now)
    one.hold({("job\x1b[2J\n", "run"): True})
    one.step()
    net.now = 1.0
    assert one.problems[0].isprintable()


def test_thousands_of_claims_cost_little() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    net.own = Sight(at(1), at(2))
    net.claim(*(f"-{number}" for number in range(5000)))
    # The true one is where ranks are connected.
    net.claiming["n2"] = Holder("n2", True, False, "10.0.0.2")
    one = examined(net)
    assert parts(one) == ["n2"]
    for _ in range(100):
        net.now += 1
        one.step()
    # Fewer and fewer: an examination asks so many at most, and they come once a minute in the end.
    assert len(net.asked) <= 9 * 8 * MAX_ASKED
    assert len(one.problems) == 1
    assert len(one.problems[0]) < 400


def test_a_claim_among_many_is_asked_in_its_turn() -> None:
    net = Net(n2=Sight(at(2), at(1), at(2)))
    net.own = Sight(at(1), at(2))
    net.claim(*(f"-{number}" for number in range(500)))
    one = examined(net)
    for _ in range(40):
        net.now += 1
        one.step()
    assert parts(one) == ["n2"]


def test_a_node_that_does_not_lead_asks_few() -> None:
    names = [f"n{number:03d}" for number in range(2, 200)]
    net = Net(**{name: Sight(at(i), (), at(i)) for i, name in enumerate(names, 2)})  # type: ignore[arg-type]
    net.own = Sight(at(1), at(*range(2, 200)))
    one = examined(net, "n150")
    assert parts(one)[0] == "n002"
    assert len(net.asked) <= 2 * MAX_ASKED


def test_what_is_asked_for_is_examined() -> None:
    names = [f"n{number:02d}" for number in range(2, 40)]
    net = Net(**{name: Sight(at(i), (), at(i)) for i, name in enumerate(names, 2)})  # type: ignore[arg-type]
    net.own = Sight(at(1), at(*range(2, 40)))
    one = examined(net, "n20x")
    assert not one.takes_part(*KEY, "n39")
    one.step()
    assert one.takes_part(*KEY, "n39")
    assert not one.takes_part(*KEY, "nobody")
    assert not one.takes_part("other", "run", "n39")


class Tables:
    """The collector."""

    def __init__(self, sockets: Sequence[Mapping[str, Any]], progress: Sequence[Mapping[str, Any]]) -> None:
        common = {"node": "n1", "ts": 7, "job": "job", "run": "run", "pid": 5, "start_ns": 6}
        self._streams = {
            name: ipc_bytes(batch_of(name, [{**common, **row} for row in rows]))
            for name, rows in (("net.sockets", sockets), ("comm.progress", progress))
        }
        self.reads: list[str] = []

    def live(self, table: str, timeout: float) -> bytes:
        self.reads.append(table)
        return self._streams[table]


def socket_row(local: str, peer: str | None, **more: Any) -> dict[str, Any]:
    own = {"role": "trainer", "netns": 1, "state": "open", "seen": 7, "local_port": 1, "peer_port": 2}
    return {**own, "local_address": local, "peer_address": peer, **more}


def test_connections_are_those_of_the_ranks_and_their_launcher() -> None:
    tables = Tables(
        [
            socket_row("10.0.0.1", "10.0.0.2"),
            socket_row("::ffff:10.0.0.1", "::ffff:10.0.0.3", state="closed"),
            socket_row("10.0.0.1", "10.0.0.4", role="launcher"),
            socket_row("10.0.0.1", "10.0.0.5", role="data_loader"),
            socket_row("10.0.0.1", "10.0.0.6", job="other"),
            socket_row("10.0.0.1", "10.0.0.7", run="other"),
            socket_row("127.0.0.1", "127.0.0.1"),
            socket_row("0.0.0.0", None, state="listens"),
            socket_row("fe80::1", "fe80::2"),
        ],
        [
            {"rank": 0, "world_size": 2, "calls": 5, "ended": None},
            {"rank": 0, "world_size": 2, "calls": 4, "ended": None, "comm": "d"},
            {"pid": 8, "rank": 1, "world_size": 2, "calls": 3, "ended": 9},
            {"pid": 9, "rank": None, "world_size": None, "calls": 0, "ended": None},
            {"pid": 10, "rank": 7, "job": "other"},
        ],
    )
    now = [0.0]
    sights = LocalSights(tables, lambda: now[0])  # type: ignore[arg-type]
    assert sights.sight("job", "run") == Sight(at(1), at(2, 3, 4))
    assert sights.sight("nothing", "run") == Sight()
    assert sights.holding("job", "run") == Holding(frozenset((0, 1)), 2, 12, living=True)
    assert sights.holding("job", "run").whole
    assert tables.reads == ["net.sockets", "comm.progress"]
    now[0] = 2.0
    sights.sight("job", "run")
    assert tables.reads[2:] == ["net.sockets"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("127.0.0.53", ""),
        ("::1", ""),
        ("0.0.0.0", ""),
        ("fe80::1%eth0", ""),
        ("gn6", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_addresses_have_a_form(text: str | None, plain: str) -> None:
    assert plain_address(text) == plain
