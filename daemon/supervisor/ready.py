"""``python -m probing.daemon.supervisor.ready``: ends with 0 once the daemon collects and answers.

It asks the collector on its own socket and then the service on the public one, as a client would. It runs as a process
of its own so that the supervisor neither imports gRPC nor waits.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from probing.daemon.config import Config
from probing.daemon.ipc import ChannelClosed, ChannelTimeout
from probing.daemon.supervisor.asking import collector_status
from probing.daemon.supervisor.fatal import guard

if TYPE_CHECKING:
    import grpc

__all__ = ("main", "service_state")

RUNNING = ("running", "degraded", "paused")
INTERVAL_S = 0.05
ANSWER_S = 2.0


def main() -> int:
    config = Config.from_args(sys.argv[1:])
    while not _collects(config.control_socket):
        time.sleep(INTERVAL_S)
    # Imported late: it takes long, and the collector starts meanwhile.
    import grpc

    while True:
        with grpc.insecure_channel(f"unix:{config.socket}") as channel:
            if service_state(channel, ANSWER_S) in RUNNING:
                return 0
        time.sleep(INTERVAL_S)


def _collects(path: str) -> bool:
    try:
        return collector_status(path, ANSWER_S).get("state") in RUNNING
    except (ChannelClosed, ChannelTimeout):
        return False


def service_state(channel: grpc.Channel, timeout: float) -> str | None:
    """Returns the ``state`` of the service; None without an answer within ``timeout`` seconds."""
    # Imported late: it takes long.
    import grpc

    from probing.api.proto.probing.v1.node_pb2 import StatusRequest
    from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

    try:
        return str(NodeStub(channel).Status(StatusRequest(), timeout=timeout).state)
    except (grpc.RpcError, ValueError):
        # ValueError: the channel was closed.
        return None


if __name__ == "__main__":
    sys.exit(guard(main))
