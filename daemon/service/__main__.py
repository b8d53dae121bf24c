"""The gRPC service: ``python -m probing.daemon.service --socket=PATH ...``. It has no rights of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import restrict
from probing.daemon.confined.seccomp import SERVICE
from probing.daemon.query.caller import Caller
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.user_views import UserViews
from probing.daemon.service.auth import Token, check_listen
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.limits import Limits
from probing.daemon.service.live import live_tables
from probing.daemon.service.server import Server
from probing.daemon.service.servicer import Node, NodeService
from probing.daemon.supervisor.alive import Watch
from probing.daemon.supervisor.fatal import guard
from probing.daemon.supervisor.ready import service_state

__all__ = ("main",)

REFILL_S = 1.0


def main() -> int:
    """Serves until SIGTERM or SIGINT."""
    config = Config.from_args(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s service: %(message)s", stream=sys.stderr)
    restrict(SERVICE)
    if config.listen:
        check_listen(config.listen, token_file=config.token_file, insecure=config.insecure)
    asyncio.run(_serve(config, Token(config.token_file if config.listen else "")))
    return 0


async def _serve(config: Config, token: Token) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    collector = CollectorClient(config.control_socket)
    pool = WorkerPool(f"{config.runtime_dir}/sql.sock", warm=config.query.workers)
    gate = WorkerPool(f"{config.runtime_dir}/sql.sock", warm=1, renew_after=1000, role="gate")
    server = Server(config.socket, config.users.group, config.listen, token)
    service = _service(config, collector, (pool, gate), server.identify, server.sources)
    await server.start(service)
    channel = grpc.insecure_channel(f"unix:{config.socket}")
    watch = Watch(config.hang_s, partial(_answers, channel))
    watch.start()
    while not stop.is_set():
        watch.step()
        for workers in (gate, pool):
            await asyncio.to_thread(workers.fill)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), REFILL_S)
    # A gRPC call still in progress at the interpreter's exit would crash it.
    channel.close()
    await asyncio.to_thread(watch.stop)
    await server.stop()
    pool.close()
    gate.close()
    collector.close()
    service.close()


def _answers(channel: grpc.Channel, timeout: float) -> bool:
    return service_state(channel, timeout) is not None


def _service(
    config: Config,
    collector: CollectorClient,
    pools: tuple[WorkerPool, WorkerPool],
    identify: Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[Caller]],
    sources: Callable[[], list[pb.Source]],
) -> NodeService:
    limits = Limits(query_s=config.query.timeout_s, unread_s=config.query.unread_s)
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
    engine = Engine(collector, *pools, live=live, views=views.views)
    return NodeService(node, collector, engine, identify, limits, sources=sources)


if __name__ == "__main__":
    sys.exit(guard(main))
