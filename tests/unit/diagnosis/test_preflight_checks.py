"""The checks before a job on simulated nodes: healthy ones pass, and each planted fault is found, where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from diagnosis_cases import instructions

from probing.api.errors import FormatError, UsageError
from probing.diagnosis.facts_file import decoded, encoded
from probing.diagnosis.preflight.env_file import parse
from probing.diagnosis.preflight.facts import (
    Case,
    Device,
    FileSystem,
    Interface,
    Master,
    NodeFacts,
    NodeRank,
    Port,
    Problem,
    Reached,
    Transfer,
    Variable,
    Version,
)
from probing.diagnosis.preflight.network import chosen, matrix
from probing.diagnosis.preflight.result import FAIL, PASS, SKIPPED, WARN, Result
from probing.diagnosis.preflight.run import CHECKS, failed, results

GIB = 1 << 30
NODES = ("gn1", "gn2", "gn3", "gn4")
VERSIONS = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "cuda": "12.9",
    "nccl": "2.27.5",
    "driver": "575.51",
    "kernel": "6.8",
}
VARIABLES = {
    "NCCL_SOCKET_IFNAME": "bond0",
    "NCCL_IB_HCA": "mlx5",
    "MASTER_ADDR": "gn1",
    "MASTER_PORT": "29500",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def node(number: int) -> NodeFacts:
    """A healthy node of two GPUs, with a rank on each."""
    name = NODES[number]
    ranks = tuple(
        NodeRank(
            2 * number + n,
            n,
            2 * len(NODES),
            number,
            pid=100 + n,
            variables=tuple(Variable(k, v) for k, v in VARIABLES.items()),
        )
        for n in (0, 1)
    )
    return NodeFacts(
        name,
        f"boot-{name}",
        versions=tuple(Version(k, v) for k, v in VERSIONS.items()),
        interfaces=(Interface("lo", "unknown"), Interface("eth0", "down"), Interface("bond0", "up")),
        ports=tuple(Port(f"mlx5_{n}", 1, "InfiniBand", "ACTIVE", "LinkUp", 400.0) for n in (0, 1)),
        file_systems=(
            FileSystem("/", "ext4", True, False, 500 * GIB, 300 * GIB, 10**7, 10**5),
            FileSystem("/dev/shm", "tmpfs", True, False, 64 * GIB, 63 * GIB),
            FileSystem("/data", "lustre", True, False, 9000 * GIB, 500 * GIB),
        ),
        devices=tuple(
            Device(
                n,
                f"GPU-{name}-{n}",
                None,
                "H100",
                "ok",
                None,
                80 * GIB,
                45.0,
                "sw_power_cap",
                0,
                False,
                False,
                False,
                "none",
            )
            for n in (0, 1)
        ),
        master=Master(("10.0.0.1",), number == 0, "free" if number == 0 else None),
        reached=tuple(Reached(f"10.0.0.{n + 1}:7070", 120_000 + 1000 * n) for n in range(len(NODES))),
        ranks=ranks,
    )


def healthy() -> Case:
    return Case(
        nodes=tuple(node(n) for n in range(len(NODES))),
        addresses={name: f"10.0.0.{n + 1}:7070" for n, name in enumerate(NODES)},
        offsets={name: (1e6 * n, 2e5) for n, name in enumerate(NODES)},
        python="/opt/venv/bin/python",
    )


def with_node(number: int, **changes: object) -> Case:
    """The healthy case in which the facts of one node differ."""
    case = healthy()
    nodes = list(case.nodes)
    nodes[number] = replace(nodes[number], **changes)  # type: ignore[arg-type]
    return replace(case, nodes=tuple(nodes))


def versions(**changes: str) -> tuple[Version, ...]:
    return tuple(Version(k, v) for k, v in {**VERSIONS, **changes}.items() if v)


def ranks(number: int, **changes: str) -> tuple[NodeRank, ...]:
    own = tuple(Variable(k, v) for k, v in {**VARIABLES, **changes}.items() if v)
    return tuple(replace(rank, variables=own) for rank in node(number).ranks)


def device(number: int, **changes: object) -> tuple[Device, ...]:
    first, second = node(number).devices
    return first, replace(second, **changes)  # type: ignore[arg-type]


def test_healthy_nodes_pass_every_check() -> None:
    found = results(healthy())
    assert {result.state for result in found} == {PASS}, [r for r in found if r.state != PASS]
    assert {result.check for result in found} == {
        "nodes",
        "versions",
        "variables",
        "ranks",
        "interface",
        "master",
        "shared_memory",
        "disk",
        "gpus",
        "gpu_health",
        "infiniband",
        "clocks",
        "round_trips",
    }
    assert not failed(found)


FAULTS: dict[str, tuple[Callable[[], Case], str, str, str, tuple[str, ...]]] = {
    # name: case, check, state, words of the text, nodes
    "python": (lambda: with_node(2, versions=versions(python="3.12.1")), "versions", FAIL, "3.12.1 on gn3", ("gn3",)),
    "torch": (lambda: with_node(1, versions=versions(torch="2.12.0")), "versions", FAIL, "torch differs", ("gn2",)),
    "no torch": (lambda: with_node(1, versions=versions(torch="")), "versions", FAIL, "gn2 without torch", ("gn2",)),
    "cuda": (lambda: with_node(1, versions=versions(cuda="11.8")), "versions", FAIL, "CUDA of torch", ("gn2",)),
    "nccl": (lambda: with_node(3, versions=versions(nccl="2.26.2")), "versions", FAIL, "NCCL differs", ("gn4",)),
    "driver": (lambda: with_node(0, versions=versions(driver="570.1")), "versions", FAIL, "driver differs", ("gn1",)),
    "kernel": (lambda: with_node(0, versions=versions(kernel="5.15")), "versions", WARN, "5.15 on gn1", ("gn1",)),
    "variable": (
        lambda: with_node(1, ranks=ranks(1, NCCL_ALGO="Ring")),
        "variables",
        FAIL,
        "NCCL_ALGO differs",
        ("gn2",),
    ),
    "torch variable": (
        lambda: with_node(1, ranks=ranks(1, TORCH_NCCL_BLOCKING_WAIT="1")),
        "variables",
        FAIL,
        "TORCH_NCCL_BLOCKING_WAIT differs: not set on 6 ranks",
        ("gn2",),
    ),
    "name of a device": (
        lambda: with_node(1, ranks=ranks(1, NCCL_IB_HCA="mlx5_0")),
        "variables",
        WARN,
        "NCCL_IB_HCA",
        ("gn2",),
    ),
    "rank twice": (lambda: with_node(1, ranks=node(0).ranks), "ranks", FAIL, "RANK 0 occurs 2 times", ("gn1", "gn2")),
    "rank missing": (lambda: with_node(3, ranks=node(3).ranks[:1]), "ranks", FAIL, "RANK 7 of 8 has no process", ()),
    "local rank twice": (
        lambda: with_node(2, ranks=tuple(replace(r, local_rank=0) for r in node(2).ranks)),
        "ranks",
        FAIL,
        "LOCAL_RANK 0",
        ("gn3",),
    ),
    "interface": (
        lambda: with_node(3, interfaces=(Interface("lo", "unknown"), Interface("eth0", "up"))),
        "interface",
        FAIL,
        "gn4 has no interface bond0",
        ("gn4",),
    ),
    "interface down": (
        lambda: with_node(3, interfaces=(Interface("bond0", "down"),)),
        "interface",
        FAIL,
        "bond0 of gn4 is down",
        ("gn4",),
    ),
    "master unknown": (
        lambda: with_node(2, master=None, problems=(Problem("master", "Name or service not known"),)),
        "master",
        FAIL,
        "gn3 cannot resolve",
        ("gn3",),
    ),
    "master twice": (
        lambda: with_node(1, master=Master(("127.0.1.1",), True, "free")),
        "master",
        FAIL,
        "the node itself on each of gn1, gn2",
        ("gn1", "gn2"),
    ),
    "port": (
        lambda: with_node(0, master=Master(("10.0.0.1",), True, "taken")),
        "master",
        FAIL,
        "29500 of gn1",
        ("gn1",),
    ),
    "master elsewhere": (
        lambda: with_node(0, master=Master(("10.0.9.9",), False)),
        "master",
        WARN,
        "not an address of these",
        (),
    ),
    "shm": (
        lambda: with_node(2, file_systems=(FileSystem("/dev/shm", "tmpfs", True, False, 64 << 20, 64 << 20),)),
        "shared_memory",
        FAIL,
        "gn3 has 64 MiB",
        ("gn3",),
    ),
    "shm small": (
        lambda: with_node(2, file_systems=(FileSystem("/dev/shm", "tmpfs", True, False, 4 * GIB, 2 * GIB),)),
        "shared_memory",
        WARN,
        "2 GiB free",
        ("gn3",),
    ),
    "disk": (
        lambda: with_node(0, file_systems=(FileSystem("/", "ext4", True, False, 500 * GIB, 3 * GIB),)),
        "disk",
        FAIL,
        "/ of gn1 has 3 GiB free",
        ("gn1",),
    ),
    "disk low": (
        lambda: with_node(0, file_systems=(FileSystem("/", "ext4", True, False, 500 * GIB, 30 * GIB),)),
        "disk",
        WARN,
        "30 GiB free, 6%",
        ("gn1",),
    ),
    "disk silent": (
        lambda: with_node(0, file_systems=(FileSystem("/nfs", "nfs4", False),)),
        "disk",
        FAIL,
        "/nfs of gn1 does not answer",
        ("gn1",),
    ),
    "inodes": (
        lambda: with_node(0, file_systems=(FileSystem("/", "ext4", True, False, 9 * GIB, 8 * GIB, 100, 100),)),
        "disk",
        FAIL,
        "no inodes",
        ("gn1",),
    ),
    "gpu missing": (
        lambda: with_node(1, devices=node(1).devices[:1]),
        "gpus",
        FAIL,
        "names 1, which is not a GPU",
        ("gn2",),
    ),
    "gpu named by a wrong uuid": (
        lambda: with_node(1, ranks=ranks(1, CUDA_VISIBLE_DEVICES="GPU-gn3-0")),
        "gpus",
        FAIL,
        "GPU-gn3-0, which is not a GPU",
        ("gn2",),
    ),
    "fewer visible than ranks": (
        lambda: with_node(1, ranks=(*ranks(1), replace(ranks(1)[0], rank=9, local_rank=2))),
        "gpus",
        FAIL,
        "fewer GPUs than the 3 ranks",
        ("gn2",),
    ),
    "no gpus": (lambda: with_node(1, devices=()), "gpus", FAIL, "gn2 has no GPU", ("gn2",)),
    "other model": (lambda: with_node(1, devices=device(1, name="A100")), "gpus", WARN, "model, differs", ("gn2",)),
    "lost": (
        lambda: with_node(1, devices=device(1, state="lost", reason="fell off the bus")),
        "gpu_health",
        FAIL,
        "GPU 1 of gn2 is lost: fell off",
        ("gn2",),
    ),
    "ecc": (lambda: with_node(1, devices=device(1, ecc_uncorrected=2)), "gpu_health", FAIL, "2 uncorrected", ("gn2",)),
    "remap": (
        lambda: with_node(1, devices=device(1, remap_pending=True)),
        "gpu_health",
        FAIL,
        "waits for a reset",
        ("gn2",),
    ),
    "remap failed": (
        lambda: with_node(1, devices=device(1, remap_failed=True)),
        "gpu_health",
        FAIL,
        "could not be remapped",
        ("gn2",),
    ),
    "recovery": (
        lambda: with_node(1, devices=device(1, recovery_action="reset")),
        "gpu_health",
        FAIL,
        "action reset",
        ("gn2",),
    ),
    "hot": (lambda: with_node(1, devices=device(1, temperature_c=91.0)), "gpu_health", FAIL, "91 C", ("gn2",)),
    "warm": (lambda: with_node(1, devices=device(1, temperature_c=82.0)), "gpu_health", WARN, "82 C", ("gn2",)),
    "throttled": (
        lambda: with_node(1, devices=device(1, clock_event_reasons="sw_power_cap,hw_thermal")),
        "gpu_health",
        WARN,
        "slowed down: hw_thermal",
        ("gn2",),
    ),
    "ib down": (
        lambda: with_node(
            1, ports=(node(1).ports[0], Port("mlx5_1", 1, "InfiniBand", "DOWN", "LinkErrorRecovery", None))
        ),
        "infiniband",
        FAIL,
        "mlx5_1 port 1 of gn2 is DOWN",
        ("gn2",),
    ),
    "ib rate": (
        lambda: with_node(1, ports=(node(1).ports[0], Port("mlx5_1", 1, "InfiniBand", "ACTIVE", "LinkUp", 100.0))),
        "infiniband",
        FAIL,
        "has 100 Gb/s, the others 400",
        ("gn2",),
    ),
    "ib missing": (lambda: with_node(1, ports=()), "infiniband", FAIL, "gn2 without RDMA", ("gn2",)),
    "ib fewer": (lambda: with_node(1, ports=node(1).ports[:1]), "infiniband", FAIL, "number of active ports", ("gn2",)),
    "clock": (
        lambda: replace(healthy(), offsets={**healthy().offsets, "gn3": (-7e9, 2e5)}),
        "clocks",
        FAIL,
        "gn3 is 7 s behind",
        ("gn3",),
    ),
    "clock a little": (
        lambda: replace(healthy(), offsets={**healthy().offsets, "gn3": (2e8, 2e5)}),
        "clocks",
        WARN,
        "gn3 is 199 ms ahead",
        ("gn3",),
    ),
    "unreachable": (
        lambda: with_node(
            1, reached=(*node(1).reached[:2], Reached("10.0.0.3:7070", None, "timed out"), node(1).reached[3])
        ),
        "round_trips",
        FAIL,
        "gn2 does not reach gn3: timed out",
        ("gn2", "gn3"),
    ),
    "far": (
        lambda: with_node(1, reached=(*node(1).reached[:2], Reached("10.0.0.3:7070", 30_000_000), node(1).reached[3])),
        "round_trips",
        WARN,
        "gn2 to gn3 takes 30 ms",
        ("gn2", "gn3"),
    ),
    "silent": (
        lambda: replace(healthy(), silent={"gn9": "connection refused"}),
        "nodes",
        FAIL,
        "gn9 does not answer",
        ("gn9",),
    ),
    "one name": (lambda: with_node(1, node="gn1"), "nodes", FAIL, "call themselves gn1", ("gn1",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    make, check, state, words, nodes = FAULTS[fault]
    found = results(make())
    mine = [r for r in found if r.check == check and r.state == state and words in r.text]
    assert len(mine) == 1, [r for r in found if r.state != PASS]
    assert mine[0].nodes == nodes
    assert failed(found) == (state == FAIL or any(r.state == FAIL for r in found))


def of(case: Case, check: str) -> list[Result]:
    return [result for result in results(case) if result.check == check]


def test_what_is_not_known_is_skipped_with_a_reason() -> None:
    bare = Case(nodes=(NodeFacts("a"), NodeFacts("b", problems=(Problem("versions", "scope admin is needed"),))))
    found = results(bare)
    assert not failed(found)
    skipped = [result for result in found if result.state == SKIPPED]
    assert {result.check for result in skipped} >= {
        "versions",
        "variables",
        "ranks",
        "interface",
        "master",
        "shared_memory",
        "disk",
        "gpus",
        "infiniband",
    }
    assert all(result.text for result in skipped)
    assert any("scope admin" in result.text for result in skipped)


def test_no_nodes_and_one_node_are_no_trouble() -> None:
    for case in (Case(nodes=()), Case(nodes=(node(0),)), Case(nodes=(NodeFacts(""),))):
        for check in CHECKS:
            list(check(case))


def test_clocks_are_judged_beyond_what_the_measurement_can_be_off() -> None:
    case = replace(healthy(), offsets={name: (n * 4e8, 2e9) for n, name in enumerate(NODES)})
    assert [r.state for r in of(case, "clocks")] == [PASS]


@pytest.mark.parametrize("names", [("gn1", "gn2"), NODES])
def test_two_clocks_or_halves_are_compared_with_each_other(names: tuple[str, ...]) -> None:
    ahead = names[len(names) // 2 :]
    case = replace(healthy(), offsets={name: (9e7 if name in ahead else 0.0, 2e5) for name in names})
    found = of(case, "clocks")
    assert [(r.state, r.nodes) for r in found] == [(WARN, (name,)) for name in ahead]
    assert found[0].text == f"the clock of {ahead[0]} is 90 ms ahead of the others"


def test_ports_of_a_lower_rate_on_all_nodes_are_no_fault() -> None:
    storage = Port("mlx5_2", 1, "InfiniBand", "ACTIVE", "LinkUp", 200.0)
    nodes = tuple(replace(n, ports=(*n.ports, storage)) for n in healthy().nodes)
    assert [(r.state, r.text) for r in of(replace(healthy(), nodes=nodes), "infiniband")] == [
        (PASS, "3 ports are active on gn1, gn2, gn3, gn4")
    ]
    worse = replace(nodes[1], ports=(*nodes[1].ports[:2], replace(storage, rate_gbps=100.0)))
    [result] = of(replace(healthy(), nodes=(nodes[0], worse, *nodes[2:])), "infiniband")
    assert (result.state, result.text) == (FAIL, "mlx5_2 port 1 of gn2 has 100 Gb/s, the others 200")


def test_loopback_addresses_tell_nothing_across_machines() -> None:
    apart = replace(healthy(), addresses={name: f"127.0.0.1:{n}" for n, name in enumerate(NODES)})
    [result] = of(apart, "round_trips")
    assert (result.state, "loopback" in result.text) == (SKIPPED, True)
    # AND on one machine they are measured
    nodes = tuple(
        replace(n, boot_id="b", reached=tuple(Reached(f"127.0.0.1:{k}", 5) for k in range(len(NODES))))
        for n in apart.nodes
    )
    assert [r.state for r in of(replace(apart, nodes=nodes), "round_trips")] == [PASS]
    assert len(matrix(healthy())) == 12


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("eth", ["eth0"]),
        ("bond0", ["bond0"]),
        ("=eth", []),
        ("=eth0,bond0", ["eth0", "bond0"]),
        ("^eth,docker", ["bond0"]),
        ("^=bond0", ["eth0"]),
        ("ib", []),
        ("eth0:1", ["eth0"]),
    ],
)
def test_interfaces_are_chosen_as_nccl_does(wanted: str, names: list[str]) -> None:
    assert [interface.name for interface in chosen(wanted, node(0).interfaces)] == names


def test_facts_survive_the_wire_and_hostile_ones_are_refused() -> None:
    assert decoded(NodeFacts, encoded(node(1))) == node(1)
    for data in (
        b"",
        b"[]",
        b"{}",
        b'{"node": 1}',
        b'{"node": "n", "devices": [{"device_id": "x"}]}',
        b"\xff",
        b'{"node": "n", "reached": [{"address": "a", "round_trip_ns": 1e999}]}',
        b"[" * 9999,
    ):
        with pytest.raises(FormatError):
            decoded(NodeFacts, data)


def test_an_env_file_has_variables_and_ranks() -> None:
    text = """
    # of all
    export NCCL_DEBUG="INFO WARN"   # quoted
    WORLD_SIZE=2
    MASTER_ADDR=gn1

    [gn1]
    RANK=0
    LOCAL_RANK=0
    [gn2]
    RANK=1
    LOCAL_RANK=0
    NCCL_DEBUG=TRACE
    """
    plan = parse(text)
    assert plan.variables == {"NCCL_DEBUG": "INFO WARN", "WORLD_SIZE": "2", "MASTER_ADDR": "gn1"}
    [first], [second] = plan.ranks["gn1"], plan.ranks["gn2"]
    assert (first.rank, second.rank, second.world_size) == (0, 1, 2)
    nodes = tuple(NodeFacts(name, ranks=own) for name, own in plan.ranks.items())
    case = Case(nodes=nodes, variables=plan.variables, planned=True)
    assert [r.state for r in of(case, "ranks")] == [PASS]
    [variables] = of(case, "variables")
    assert (variables.state, "NCCL_DEBUG differs" in variables.text) == (FAIL, True)


@pytest.mark.parametrize("text", ["NAME", "[gn1", "1A=b", "A='b", "=x", "[a b]\nA=1"])
def test_a_wrong_line_of_an_env_file_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="line 2 of --env-file is wrong"):
        parse("X=1\n" + text)


def test_bandwidth_is_compared_where_it_was_measured() -> None:
    assert of(healthy(), "bandwidth") == []
    sent = {
        name: tuple(Transfer(f"10.0.0.{k + 1}:7070", 10**9, 10**9) for k in range(4) if k != n)
        for n, name in enumerate(NODES)
    }
    nodes = tuple(replace(n, transfers=sent[n.node]) for n in healthy().nodes)
    even = replace(healthy(), nodes=nodes, bandwidth=True)
    assert [(r.state, "8.00 Gb/s" in r.text) for r in of(even, "bandwidth")] == [(PASS, True)]
    slow = replace(nodes[1], transfers=(Transfer("10.0.0.1:7070", 10**8, 10**9), Transfer("10.0.0.3:7070", why="off")))
    found = of(replace(even, nodes=(nodes[0], slow, *nodes[2:])), "bandwidth")
    assert [(r.state, r.nodes) for r in found] == [(SKIPPED, ("gn2", "gn3")), (WARN, ("gn2", "gn1"))]
    assert [r.state for r in of(replace(healthy(), bandwidth=True), "bandwidth")] == [SKIPPED]


def test_texts_of_what_is_right_say_no_more_than_is_known() -> None:
    def texts(case: Case, check: str) -> list[tuple[str, str]]:
        return [(r.state, r.text) for r in results(case) if r.check == check]

    whole = healthy()
    # A rank of two, while the node of the other one does not answer.
    one = replace(whole.nodes[0], ranks=(NodeRank(0, 0, 2),))
    alone = replace(whole, nodes=(one,), silent={"gn9": "connection refused"})
    assert texts(alone, "ranks") == [("skipped", "only 1 of 2 ranks are known: the nodes of the others did not answer")]
    single = replace(whole, nodes=(replace(one, ranks=(NodeRank(0, 0, 1),)),), silent={})
    assert texts(single, "ranks") == [("pass", "1 rank covers 0, and LOCAL_RANK once on each node")]
    named = replace(single, iface="eth9")
    assert texts(named, "interface")[0][1].startswith(f"{one.node} has no interface eth9 (--iface)")
    (shared,) = [text for _, text in texts(single, "shared_memory")]
    assert " GiB free on " in shared
    assert "at least" not in shared
    assert "at least" in texts(whole, "shared_memory")[0][1]


class Name(str):
    """The name of a node, which counts how often it is compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def many(count: int, *, tried: bool) -> Case:
    addresses = {Name(f"n{number}"): f"10.0.0.{number}:7070" for number in range(count)}
    reached = tuple(Reached(address, 120_000) for address in addresses.values() if tried)
    return Case(tuple(NodeFacts(name, reached=reached) for name in addresses), addresses=addresses)


def test_the_work_of_round_trips_grows_with_the_pairs_of_nodes() -> None:
    def work(count: int) -> int:
        case = many(count, tried=True)
        return instructions(lambda: of(case, "round_trips"))

    assert work(80) < 4.8 * work(40)


def test_pairs_that_were_not_measured_are_not_compared_with_each_other() -> None:
    case = many(40, tried=False)
    Name.compared = 0
    assert [r.state for r in of(case, "round_trips")] == [SKIPPED]
    assert Name.compared < 4 * 40 * 40


def test_ranks_that_occur_twice_are_looked_up_once() -> None:
    def work(count: int) -> int:
        twice = tuple(NodeRank(rank, rank, count) for rank in (*range(count), *range(count)))
        case = Case((NodeFacts("n", ranks=twice),))
        assert len(of(case, "ranks")) >= count
        return instructions(lambda: of(case, "ranks"))

    assert work(80) < 2.6 * work(40)
