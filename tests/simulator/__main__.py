"""One process of a simulation: ``python -m simulator '{"count": 1000, "port": 7000}' 0``. Ends when stdin does."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import grpc.aio

from probing.api.proto.probing.v1.node_pb2_grpc import add_NodeServicer_to_server
from simulator.cast import Cast
from simulator.relay import Relay
from simulator.service import Service

_OTHER_FILES = 4096
# One server has the calls that wait at thousands of nodes.
_OPTIONS = (("grpc.server.max_pending_requests", 1 << 20), ("grpc.server.max_pending_requests_hard_limit", 1 << 20))


async def _run(cast: Cast, process: int, kept: int) -> None:
    service = Service(cast, kept)
    server = grpc.aio.server(options=_OPTIONS)
    add_NodeServicer_to_server(service, server)
    with tempfile.TemporaryDirectory(prefix="simulator-") as directory:
        inner = str(Path(directory, "inner"))
        server.add_insecure_port(f"unix:{inner}")
        await server.start()
        relay = Relay(cast, inner, process)
        # Before "ready", so that nobody is refused and a port that is in use ends the simulation.
        serving = asyncio.create_task(relay.serve(relay.listen()))
        # It would look through the objects of thousands of nodes again and again.
        gc.disable()
        print("ready", flush=True)
        # Each line asks for figures.
        while await asyncio.to_thread(sys.stdin.readline):
            took = service.took_ns
            print(json.dumps({"p50_ms": statistics.median(took) / 1e6 if took else None}), flush=True)
            took.clear()
        serving.cancel()
        await server.stop(0)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Each connection of a node in the middle takes four files of this process.
    kept = max((hard - _OTHER_FILES) // 4, 256)
    asyncio.run(_run(Cast(**json.loads(sys.argv[1])), int(sys.argv[2]), kept))
    # DuckDB's binding reports what an interpreter leaves behind.
    os._exit(0)
