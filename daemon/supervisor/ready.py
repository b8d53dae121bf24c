"""``python -m probing.daemon.supervisor.ready``: ends with 0 once the daemon collects and answers.

It asks the collector on its own socket and then the service on the public one, as a client would. It is a process
of its own so that the supervisor need not know gRPC, nor wait for anybody.
"""

from __future__ import annotations

import sys
import time

from probing.daemon.config import Config
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, connect
from probing.daemon.supervisor.fatal import guard

__all__ = ("main",)

RUNNING = ("running", "degraded", "paused")
INTERVAL_S = 0.05


def main() -> int:
    config = Config.from_args(sys.argv[1:])
    while not _collects(config.control_socket):
        time.sleep(INTERVAL_S)
    # Only now, as it takes long and the collector has started meanwhile.
    import grpc

    from probing.api.proto.probing.v1.node_pb2 import StatusRequest
    from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

    while True:
        with grpc.insecure_channel(f"unix:{config.socket}") as channel:
            try:
                answer = NodeStub(channel).Status(StatusRequest(), timeout=2)
            except grpc.RpcError:
                time.sleep(INTERVAL_S)
                continue
        if answer.state in RUNNING:
            return 0
        time.sleep(INTERVAL_S)


def _collects(path: str) -> bool:
    try:
        with connect(path, timeout=2) as channel:
            answer = channel.request({"op": "status"}, timeout=2)
    except (ChannelClosed, ChannelTimeout):
        return False
    return answer.header.get("state") in RUNNING


if __name__ == "__main__":
    sys.exit(guard(main))
