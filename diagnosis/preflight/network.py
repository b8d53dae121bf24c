"""Checks between nodes before a job: that they answer, their clocks, interfaces, ports, round trips, bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low

from probing.api.text import age
from probing.diagnosis.preflight.facts import Case, Interface, NodeFacts, Port, Reached
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, by_value, compared, names, skipped

__all__ = (
    "Cell",
    "check_bandwidth",
    "check_clocks",
    "check_infiniband",
    "check_interfaces",
    "check_master",
    "check_nodes",
    "check_round_trips",
    "chosen",
    "matrix",
)

BANDWIDTH = "bandwidth"
# A pair is slow below this share of the median bandwidth. The margin is large because other work of the hosts uses the
# network, too.
LEAST_SHARE = 0.5


def check_bandwidth(case: Case) -> Iterator[Result]:
    """Warns for pairs of nodes whose bandwidth is far below the median."""
    if not case.bandwidth:
        return
    by_address = {address: name for name, address in case.addresses.items()}
    pairs = [(n.node, by_address.get(t.address, t.address), t) for n in case.nodes for t in n.transfers]
    rates = [(a, b, t.sent_bytes / t.duration_ns) for a, b, t in pairs if t.duration_ns > 0 and not t.why]
    for a, b, t in pairs:
        if t.why:
            yield skipped(BANDWIDTH, f"{a} to {b} was not measured: {t.why}", [a, b])
    if not rates:
        if not pairs:
            yield skipped(BANDWIDTH, "there are no pairs of nodes that reach each other by TCP")
        return
    middle = median(rate for *_, rate in rates)
    slow = [(a, b, rate) for a, b, rate in rates if rate < LEAST_SHARE * middle]
    for a, b, rate in slow:
        text = f"{a} sends {b} {8 * rate:.2f} Gb/s, the median is {8 * middle:.2f}"
        yield Result(BANDWIDTH, WARN, text, (a, b), "look at the link, and at what else uses it")
    if not slow:
        yield Result(BANDWIDTH, PASS, f"{len(rates)} pairs: median {8 * middle:.2f} Gb/s over one connection")


CLOCKS = "clocks"
LOW_NS, MOST_NS = 50e6, 1e9


def check_clocks(case: Case) -> Iterator[Result]:
    """Warns for a clock that differs from the median by more than LOW_NS beyond the error of the measurement; fails
    above MOST_NS.
    """
    known = {node.node: case.offsets[node.node] for node in case.nodes if node.node in case.offsets}
    if len(known) < 2:
        if case.nodes:
            yield skipped(CLOCKS, "there is one node")
        return
    # median_low is the clock of one of the nodes. A mean of the two middle clocks could be far from every clock.
    middle = median_low(offset for offset, _ in known.values())
    wrong = False
    for node, (offset, error) in sorted(known.items()):
        apart = abs(offset - middle)
        if apart - error > LOW_NS:
            wrong = True
            where = "ahead of" if offset > middle else "behind"
            text = f"the clock of {node} is {age(apart)} {where} the others"
            state = FAIL if apart - error > MOST_NS else WARN
            yield Result(CLOCKS, state, text, (node,), "let chrony or ntpd set it")
    if not wrong:
        worst = max(abs(offset - middle) + error for offset, error in known.values())
        yield Result(CLOCKS, PASS, f"the clocks of {len(known)} nodes agree to {age(worst)}")


INFINIBAND = "infiniband"


def check_infiniband(case: Case) -> Iterator[Result]:
    """Fails for ports of NCCL_IB_HCA that are down, or slower than most ports of their name."""
    with_ports = [node for node in case.nodes if node.ports]
    if not with_ports:
        if case.nodes:
            why = next((why for node in case.nodes if (why := node.problem("ports"))), "no node has an RDMA device")
            yield skipped(INFINIBAND, why)
        return
    used = {node.node: [port for port in node.ports if _named_port(case, node, port)] for node in with_ports}
    rates = [port.rate_gbps for ports in used.values() for port in ports if port.state == "ACTIVE" and port.rate_gbps]
    usual = next(iter(by_value(("", rate) for rate in rates)), None)
    # Ports to the storage may have another rate than ports to other GPUs, so a port is compared with the ports of the
    # same name and number on other nodes.
    alike: dict[tuple[str, int], list[float]] = {}
    for port in (port for ports in used.values() for port in ports if port.state == "ACTIVE" and port.rate_gbps):
        alike.setdefault((port.hca, port.port), []).append(port.rate_gbps or 0.0)
    own = {key: next(iter(by_value(("", rate) for rate in known))) for key, known in alike.items() if len(known) > 1}
    found = [
        result
        for node, ports in used.items()
        for port in ports
        for result in _of(node, port, own.get((port.hca, port.port), usual))
    ]
    yield from found
    if without := [node.node for node in case.nodes if not node.ports and not node.problem("ports")]:
        yield Result(INFINIBAND, FAIL, f"{names(without)} without RDMA devices, others have some", tuple(without))
    active = {node: str(sum(port.state == "ACTIVE" for port in ports)) for node, ports in used.items()}
    if len(set(active.values())) > 1:
        yield from compared(
            INFINIBAND, "the number of active ports,", active, hint="look for a cable that is out, or a missing device"
        )
    elif not found:
        at = f" at {usual:g} Gb/s" if usual and len(set(rates)) == 1 else ""
        yield Result(INFINIBAND, PASS, f"{next(iter(active.values()))} ports are active{at} on {names(active)}")


def _of(node: str, port: Port, usual: float | None) -> Iterator[Result]:
    where = f"{port.hca} port {port.port} of {node}"
    if port.state != "ACTIVE":
        # A port without a cable may be intended; a port that trains its link or has errors is a fault.
        state = WARN if port.phys_state in ("Disabled", "Polling") else FAIL
        text = f"{where} is {port.state or 'in an unknown state'} ({port.phys_state or 'unknown'})"
        yield Result(INFINIBAND, state, text, (node,), "look at cable, transceiver and subnet manager")
    elif usual and port.rate_gbps and port.rate_gbps < usual:
        text = f"{where} has {port.rate_gbps:g} Gb/s, the others {usual:g}"
        yield Result(
            INFINIBAND, FAIL, text, (node,), "the link came up with fewer lanes or a lower rate: reseat the cable"
        )


def _named_port(case: Case, node: NodeFacts, port: Port) -> bool:
    """Returns whether NCCL would use the port according to NCCL_IB_HCA. The value lists prefixes, after ``=`` whole
    names, and after ``^`` the ports to leave out.
    """
    value = case.variable(node, "NCCL_IB_HCA")
    if not value:
        return True
    but, text = value.startswith("^"), value.removeprefix("^")
    whole = text.startswith("=")
    parts = [part.partition(":") for part in text.removeprefix("=").split(",") if part]
    fits = any(
        (port.hca == hca if whole else port.hca.startswith(hca)) and number in ("", str(port.port))
        for hca, _, number in parts
    )
    return fits != but


INTERFACE = "interface"
# The states of an interface that is up; tunnels are "unknown". NCCL itself chooses no loopback or docker interface.
_UP = ("up", "unknown", None)


def check_interfaces(case: Case) -> Iterator[Result]:
    """Fails if no interface of a node matches, and warns if none of the matching interfaces is up."""
    good: dict[str, list[str]] = {}
    named = False
    for node in case.nodes:
        for what, wanted in _wanted(case, node):
            named = True
            if why := node.problem("interfaces"):
                yield skipped(INTERFACE, f"the interfaces of {node.node} are not known: {why}", [node.node])
                continue
            fitting = chosen(wanted, node.interfaces)
            have = names(interface.name for interface in node.interfaces) or "none"
            if not fitting:
                text = f"{node.node} has no interface {_named_interface(wanted)} ({what}); it has {have}"
                yield Result(INTERFACE, FAIL, text, (node.node,), "name an interface that every node has, or a prefix")
            elif not any(interface.state in _UP for interface in fitting):
                text = f"{names(i.name for i in fitting)} of {node.node} is {fitting[0].state} ({what})"
                yield Result(INTERFACE, FAIL if len(fitting) == 1 else WARN, text, (node.node,), "bring the link up")
            else:
                good.setdefault(f"{what} {_named_interface(wanted)}", []).append(node.node)
    for wanted, nodes in good.items():
        yield Result(INTERFACE, PASS, f"{wanted} is there on {names(nodes)}")
    if not named and case.nodes:
        yield skipped(INTERFACE, "no interface is named by NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or --iface")


def chosen(wanted: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Returns the interfaces among which NCCL would choose for the value ``wanted``."""
    text, but = (wanted[1:], True) if wanted.startswith("^") else (wanted, False)
    whole = text.startswith("=")
    parts = [part.partition(":")[0] for part in text.removeprefix("=").split(",") if part]
    if but:
        return [i for i in interfaces if not _fits(i.name, parts, whole) and i.name != "lo"]
    return [i for i in interfaces if _fits(i.name, parts, whole)]


def _named_interface(wanted: str) -> str:
    """Returns the value in words, without the signs of NCCL's syntax: ``eth9``, ``but docker``."""
    return f"but {wanted[1:].removeprefix('=')}" if wanted.startswith("^") else wanted.removeprefix("=")


def _fits(name: str, parts: Sequence[str], whole: bool) -> bool:
    return any(name == part if whole else name.startswith(part) for part in parts)


def _wanted(case: Case, node: NodeFacts) -> Iterator[tuple[str, str]]:
    if case.iface:
        yield "--iface", "=" + case.iface
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value := case.variable(node, name):
            # gloo accepts only whole names.
            yield name, value if name.startswith("NCCL") else "=" + value


MASTER = "master"


def check_master(case: Case) -> Iterator[Result]:
    """Fails if MASTER_ADDR does not resolve, or resolves to the node itself on several machines, or if MASTER_PORT is
    taken. Warns if MASTER_ADDR is not an address of the nodes.
    """
    address = next((value for node in case.nodes if (value := case.variable(node, "MASTER_ADDR"))), "")
    port = next((value for node in case.nodes if (value := case.variable(node, "MASTER_PORT"))), "29500")
    if not address:
        if case.nodes:
            yield skipped(MASTER, "no MASTER_ADDR is known: name it in --env-file F")
        return
    where = f"{address}:{port}"
    known = [(node, node.master) for node in case.nodes if node.master is not None]
    found = 0
    for node in case.nodes:
        if why := node.problem("master"):
            yield Result(
                MASTER,
                FAIL,
                f"{node.node} cannot resolve MASTER_ADDR {address}: {why}",
                (node.node,),
                "name a host that all nodes resolve, or an IP address",
            )
            found += 1
    owners = [node for node, master in known if master.local]
    if _apart(owners):
        text = f"MASTER_ADDR {address} is the node itself on each of {names(n.node for n in owners)}"
        yield Result(
            MASTER, FAIL, text, tuple(n.node for n in owners), "name the master by an address that others reach"
        )
        found += 1
    elif known and not owners and not case.silent:
        yield Result(MASTER, WARN, f"MASTER_ADDR {address} is not an address of these nodes", (), "check the host name")
        found += 1
    for node, master in known:
        if master.port == "taken":
            text = f"MASTER_PORT {port} of {node.node} is taken by a connection, so that nobody can listen on it"
            yield Result(MASTER, FAIL, text, (node.node,), "choose another MASTER_PORT")
            found += 1
    if not found and known:
        state = next((master.port for _, master in known if master.port), None)
        yield Result(MASTER, PASS, f"{where} resolves on all nodes" + (f", the port is {state}" if state else ""))


def _apart(owners: list[NodeFacts]) -> bool:
    """Returns whether the owners are several machines. Two daemons may share a machine; their boot ids are equal."""
    return len({node.boot_id or node.node for node in owners}) > 1


NODES = "nodes"


def check_nodes(case: Case) -> Iterator[Result]:
    """Fails for nodes that do not answer, and for names that occur twice."""
    for node, why in sorted(case.silent.items()):
        yield Result(NODES, FAIL, f"{node} does not answer: {why}", (node,), "check that probingd runs there")
    counted = Counter(node.node for node in case.nodes)
    if twice := [name for name, count in counted.items() if count > 1]:
        hint = "give each daemon a node_name of its own"
        yield Result(NODES, FAIL, f"several nodes call themselves {names(twice)}", tuple(sorted(twice)), hint)
    elif case.nodes and not case.silent:
        text = f"all {len(case.nodes)} nodes answer" if len(case.nodes) > 1 else f"{case.nodes[0].node} answers"
        yield Result(NODES, PASS, text)


ROUND_TRIPS = "round_trips"
# A round trip is slow if it exceeds FACTOR times the median, and exceeds the median by more than LEAST_NS.
FACTOR, LEAST_NS = 5.0, 1e6
_UNMEASURED = "not measured"
_LOOPBACK_PREFIX = ("127.", "localhost:", "[::1]:")
# The round trip in ns from the first node to the second, or None and the reason.
Cell = tuple[str, str, int | None, str]


def check_round_trips(case: Case) -> Iterator[Result]:
    """Fails for pairs that cannot reach each other, and warns for round trips far above the median."""
    if len(case.nodes) < 2:
        if case.nodes:
            yield skipped(ROUND_TRIPS, "there is one node")
        return
    cells = matrix(case)
    unknown = [cell for cell in cells if cell[2] is None and cell[3].startswith(_UNMEASURED)]
    lost = [cell for cell in cells if cell[2] is None and not cell[3].startswith(_UNMEASURED)]
    for source, target, _, why in lost:
        hint = "look at routes and firewalls between the two"
        yield Result(ROUND_TRIPS, FAIL, f"{source} does not reach {target}: {why}", (source, target), hint)
    known = [(source, target, ns) for source, target, ns, _ in cells if ns is not None]
    if unknown:
        why = unknown[0][3].removeprefix(f"{_UNMEASURED}: ")
        pairs = f"{len(unknown)} of {len(cells)} pairs were not measured, such as {unknown[0][0]} to {unknown[0][1]}"
        yield skipped(ROUND_TRIPS, f"{pairs}: {why}", sorted({cell[1] for cell in unknown}))
    if not known:
        return
    middle = median(ns for *_, ns in known)
    far = [(source, target, ns) for source, target, ns in known if ns > FACTOR * middle and ns - middle > LEAST_NS]
    for source, target, ns in far:
        text = f"{source} to {target} takes {age(ns)}, the median is {age(middle)}"
        yield Result(ROUND_TRIPS, WARN, text, (source, target), "look for congestion or a longer path between the two")
    if not lost and not far:
        ends = {name for source, target, _ in known for name in (source, target)}
        text = f"{len(known)} pairs of {names(ends)}: median {age(middle)}"
        yield Result(ROUND_TRIPS, PASS, f"{text}, longest {age(max(ns for *_, ns in known))}")


def matrix(case: Case) -> list[Cell]:
    """Returns the round trip of each ordered pair of nodes."""
    cells: list[Cell] = []
    for source in case.nodes:
        reached = {one.address: one for one in reversed(source.reached)}
        cells += [_cell(case, source, target, reached) for target in case.nodes if source.node != target.node]
    return cells


def _cell(case: Case, source: NodeFacts, target: NodeFacts, reached: Mapping[str, Reached]) -> Cell:
    address = case.addresses.get(target.node, "")
    if not address:
        return source.node, target.node, None, f"{_UNMEASURED}: {target.node} has no TCP address (option listen)"
    if address.startswith(_LOOPBACK_PREFIX) and source.boot_id != target.boot_id:
        return source.node, target.node, None, f"{_UNMEASURED}: {address} is a loopback address"
    found = reached.get(address)
    if found is None:
        return source.node, target.node, None, f"{_UNMEASURED}: the node did not try"
    return source.node, target.node, found.round_trip_ns, found.why or "no answer"
