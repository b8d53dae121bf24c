"""Keeps queries open at ``unix:PATH``: ``python many_queries.py ADDRESS COUNT SQL``. Prints a line for each that
was refused, ``open`` once all have been sent, and waits for the end of its standard input."""

from __future__ import annotations

import sys

import grpc

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub


def main() -> None:
    address, count, sql = sys.argv[1:]
    channels = [grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
    calls = [NodeStub(channels[i % 4]).Query(pb.QueryRequest(sql=sql), timeout=60) for i in range(int(count))]
    for call in calls:
        call.add_done_callback(lambda done: print(done.code().name, done.details(), flush=True))
    print("open", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
