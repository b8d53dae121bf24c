"""The gRPC service: ``python -m probing.daemon.service.main --socket=PATH ...``. It has no rights of its own."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from functools import partial
from importlib.metadata import version

import grpc

from probing.daemon.config import Config
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.user_views import UserViews
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.live import live_tables
from probing.daemon.service.server import listen
from probing.daemon.service.servicer import Limits, Node, NodeService
from probing.daemon.supervisor.alive import Watch
from probing.daemon.supervisor.fatal import guard
from probing.daemon.supervisor.ready import service_state

__all__ = ("main",)

GRACE_S = 1.0
REFILL_S = 1.0


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    config = Config.from_args(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s service: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    collector = CollectorClient(config.control_socket)
    pool = WorkerPool(f"{config.runtime_dir}/sql.sock", warm=config.query.workers)
    server = listen(
        _service(config, collector, pool),
        config.socket,
        group=config.users.group,
        tcp=config.listen,
        insecure=config.insecure,
    )
    watch = Watch(config.hang_s, partial(_answers, grpc.insecure_channel(f"unix:{config.socket}")))
    watch.start()
    while not stop.is_set():
        watch.step()
        pool.fill()
        stop.wait(REFILL_S)
    server.stop(GRACE_S).wait()
    pool.close()
    collector.close()
    return 0


def _answers(channel: grpc.Channel, timeout: float) -> bool:
    return service_state(channel, timeout) is not None


def _service(config: Config, collector: CollectorClient, pool: WorkerPool) -> NodeService:
    limits = Limits(query_s=config.query.timeout_s)
    node = Node(
        name=config.node_name,
        version=version("probingd"),
        instance=config.instance,
        address=config.listen or f"unix:{config.public_socket}",
        peers=config.cluster.peers,
    )
    views = UserViews(config.query.views_dir, lambda: collector.tables(limits.control_s))
    live = live_tables(
        node.name,
        time.time_ns,
        node.members,
        lambda: collector.status(limits.control_s),
        lambda: collector.tables(limits.control_s),
        views=views.rows,
        settings=lambda: collector.config({}, limits.control_s),
    )
    return NodeService(node, collector, Engine(collector, pool, live=live, views=views.views), limits)


if __name__ == "__main__":
    sys.exit(guard(main))
