"""The main function of the gRPC service. It has no rights of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.clock import until_next
from probing.daemon.cluster import Membership
from probing.daemon.cluster.keys import NodeKey
from probing.daemon.cluster.record import Proof
from probing.daemon.config import Config, shown
from probing.daemon.confined.sandbox import restrict
from probing.daemon.confined.seccomp import SERVICE
from probing.daemon.groups.workers import Workers
from probing.daemon.ipc import Header
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import GATE, QUERY, WorkerPool
from probing.daemon.query.user_views import UserViews
from probing.daemon.service.allowed import Allowed
from probing.daemon.service.auth import Doors
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.diagnosis import Diagnosis
from probing.daemon.service.gossip import Gossip
from probing.daemon.service.group_peers import GroupPeers, Records
from probing.daemon.service.groups import Groups
from probing.daemon.service.job_peers import JobPeers
from probing.daemon.service.label_socket import LabelSocket
from probing.daemon.service.limits import Limits
from probing.daemon.service.listening import Listeners
from probing.daemon.service.live import live_tables
from probing.daemon.service.members import address_of, known_at, member_rows, membership_of
from probing.daemon.service.outgoing import Outgoing, PeerStubs
from probing.daemon.service.preflight.bandwidth import Bandwidth
from probing.daemon.service.preflight.gather import Interpreters, Preflight
from probing.daemon.service.server import Server
from probing.daemon.service.servicer import Node, NodeService
from probing.daemon.service.stored_findings import StoredFindings
from probing.daemon.source_state import SourceState
from probing.daemon.supervisor.health import Watch, stop_on_signal
from probing.daemon.supervisor.journal import log_to_stderr
from probing.daemon.supervisor.node_key import take_key
from probing.daemon.supervisor.notify import notify
from probing.daemon.supervisor.ready import RUNNING, service_state

if TYPE_CHECKING:
    from probing.daemon.service.flight.service import FlightService
    from probing.daemon.service.metrics.http import Metrics

__all__ = ("main",)

ROUND_S = 1.0
# The timeout of passing the labels of a datagram to the collector, s.
LABEL_S = 2.0
# After this many rounds all parts are started, even if the collector is not ready.
MOST_ROUNDS = 10


def main() -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code."""
    config = Config.from_args(sys.argv[1:])
    log_to_stderr("service")
    # The key is read before ``restrict`` takes rights away: a new key is written to a file.
    key = NodeKey(take_key(Path(config.socket).parent))
    restrict(SERVICE)
    asyncio.run(_serve(config, Doors.of(config), key))
    return 0


async def _serve(config: Config, doors: Doors, key: NodeKey) -> None:
    stop = asyncio.Event()
    stop_on_signal(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
    collector = CollectorClient(config.control_socket)
    pool = WorkerPool(f"{config.runtime_dir}/sql.sock", QUERY._replace(kept=0))
    gate = WorkerPool(f"{config.runtime_dir}/sql.sock", GATE._replace(kept=0))
    listeners = Listeners.inherited()
    server = Server(config.socket, config.users.group, config.listen, doors.keeper, doors.tls, doors.audit, listeners)
    labels = LabelSocket(Path(config.socket).parent, partial(_label, collector), doors.audit)
    service, diagnosis, metrics, gossip, groups = _service(
        config, collector, (pool, gate), server, doors, listeners, key, labels
    )
    await server.start(service, _flight(service, server) if config.flight else None)
    gossip.start()
    if groups:
        groups.start()
    labels.start()
    if metrics:
        await metrics.start()
    listeners.start()
    channel = grpc.insecure_channel(f"unix:{config.socket}")
    watch = Watch(config.hang_s, partial(_answers, channel))
    watch.start()
    watch.step()
    also = f" and {config.listen}" if config.listen else ""
    notify(f"READY=1\nSTATUS=answering at unix:{config.public_socket}{also}")
    # The parts that are needed to answer start first. The other parts start one round after the collector is ready.
    rounds, whole = 0, False
    gate.keep(1)
    pool.keep(1)
    while not stop.is_set():
        watch.step()
        ready = whole or rounds == MOST_ROUNDS or await asyncio.to_thread(_collects, collector)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), until_next(ROUND_S))
        rounds += 1
        if ready and not whole:
            whole = True
            pool.keep(config.query.workers)
            await asyncio.to_thread(diagnosis.start)
    # A gRPC call that is still in progress when the interpreter exits would crash the interpreter.
    channel.close()
    await asyncio.to_thread(watch.stop)
    listeners.stop()
    if metrics:
        metrics.stop()
    await asyncio.to_thread(diagnosis.stop)
    if groups:
        await groups.stop()
    await gossip.stop()
    await labels.stop()
    await server.stop()
    pool.close()
    gate.close()
    collector.close()
    service.close()


def _label(collector: CollectorClient, request: Mapping[str, Any]) -> None:
    collector.label(request, LABEL_S)


def _collects(collector: CollectorClient) -> bool:
    try:
        return collector.status(ROUND_S).get("state") in RUNNING
    except ProbingError:
        return False


def _answers(channel: grpc.Channel, timeout: float) -> bool:
    return service_state(channel, timeout) is not None


def _service(
    config: Config,
    collector: CollectorClient,
    pools: tuple[WorkerPool, WorkerPool],
    server: Server,
    doors: Doors,
    listeners: Listeners,
    key: NodeKey,
    labels: LabelSocket,
) -> tuple[NodeService, Diagnosis, Metrics | None, Gossip, Groups | None]:
    limits = Limits(query_s=config.query.timeout_s, unread_s=config.query.unread_s)
    membership = membership_of(config, version("probingd"), key)
    allowed = Allowed(config.cluster.allow, address_of(config))
    outgoing = Outgoing(doors.tokens, doors.tls, allowed, lambda address: known_at(membership, address))
    stubs = PeerStubs(outgoing)
    gossip = Gossip(membership, config.cluster.seeds, local=not config.listen, peers=stubs)
    groups = _groups(config, membership, stubs, collector) if config.groups.enabled else None
    node = Node(
        name=config.node_name,
        version=version("probingd"),
        instance=config.instance,
        address=address_of(config),
        known=membership.members,
    )

    def own_sources() -> list[SourceState]:
        return [*gossip.sources(), *labels.sources(), *(groups.sources() if groups else ())]

    def with_own(seconds: float) -> Header:
        status = diagnosis.among(collector.status(seconds))
        return {**status, "sources": [*status["sources"], *(state._asdict() for state in own_sources())]}

    views = UserViews(config.query.views_dir, lambda: collector.tables(limits.control_s))
    live = live_tables(
        node.name,
        time.time_ns,
        lambda: member_rows(node.members()),
        lambda: with_own(limits.control_s),
        lambda: collector.tables(limits.control_s),
        views=views.rows,
        settings=lambda: collector.config({}, limits.control_s)["settings"],
        config=lambda: shown(config),
        groups=groups.group_rows if groups else list,
        workers=groups.worker_rows if groups else list,
    )
    engine = Engine(collector, *pools, live=live, views=views.views)
    peers = JobPeers(membership, stubs, asyncio.get_running_loop())
    findings = StoredFindings()

    def stored(row: Mapping[str, Any], owner: Hashable) -> None:
        findings.note(row)
        if groups:
            groups.finding(row, owner)

    diagnosis = Diagnosis(
        config,
        collector,
        engine,
        peers,
        lambda name: membership.proof_of(name) is Proof.CERTIFICATE,
        stored,
        groups.absences if groups else lambda _: (),
    )
    metrics = _metrics(config, node, engine, with_own, doors, lambda: service.calls, lambda: diagnosis.hooks, listeners)

    def all_sources() -> list[pb.Source]:
        found = [*server.sources(), *(metrics.sources() if metrics else ())]
        return [*found, *(pb.Source(**state._asdict()) for state in (*diagnosis.sources(), *own_sources()))]

    service = NodeService(
        node,
        collector,
        engine,
        server.identify,
        limits,
        gatherer=diagnosis.gatherer,
        preflight=_preflight(config, engine, outgoing),
        sources=all_sources,
        timed=metrics.times.call if metrics else lambda *_: None,
        audit=doors.audit,
        gossip=gossip,
        outgoing=outgoing,
        take_findings=diagnosis.take,
        sight=diagnosis.sight,
        evaluates=config.inject.enabled,
        groups=groups,
        findings=findings,
    )
    return service, diagnosis, metrics, gossip, groups


def _groups(config: Config, membership: Membership, stubs: PeerStubs, collector: CollectorClient) -> Groups:
    # A call to this node needs no connection. The lambda looks ``groups`` up when it is called, because ``groups`` is
    # assigned only below.
    peers = GroupPeers(membership, stubs, lambda request: groups.agree(request))
    workers = Workers(config.node_name, config.cluster.suspect_s, config.cluster.failed_s)
    groups = Groups(config.node_name, peers, Records(collector), workers)
    return groups


def _preflight(config: Config, engine: Engine, outgoing: Outgoing) -> Preflight:
    interpreters = Interpreters(f"{config.runtime_dir}/interpreter.sock")
    bandwidth = Bandwidth(config.cluster.bandwidth_test_bytes, outgoing)
    return Preflight(config.node_name, engine, interpreters, bandwidth)


def _flight(service: NodeService, server: Server) -> FlightService:
    # Imported late, so that a service without Arrow Flight does not keep the protocol's module in memory.
    from probing.daemon.service.flight.service import FlightService

    return FlightService(
        service.query, server.identify, service.audit, version("probingd"), service.limits, service.timed
    )


def _metrics(
    config: Config,
    node: Node,
    engine: Engine,
    status: Callable[[float], Mapping[str, Any]],
    doors: Doors,
    calls: Callable[[], Mapping[str, int]],
    hooks: Callable[[], Mapping[str, int]],
    listeners: Listeners,
) -> Metrics | None:
    if not config.http:
        return None
    # Imported late, so that a service without a page does not have Prometheus' library in memory.
    from probing.daemon.service.metrics.http import Metrics

    return Metrics(
        config.http,
        node.name,
        node.version,
        engine,
        status,
        doors.keeper,
        doors.tls,
        doors.audit,
        calls,
        hooks,
        listeners,
    )
