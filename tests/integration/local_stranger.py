"""Holds connections to HOST:PORT: ``local_stranger.py KIND HOST:PORT COUNT [TOKEN]``.

KIND: ``silent`` sends nothing, ``trickle`` a byte of a request now and then, ``wrong`` asks for /metrics with a wrong
token, ``unread`` asks for it with TOKEN and reads nothing; a connection that ends is opened again. ``calls`` keeps
COUNT gRPC connections that have shown TOKEN. Prints ``open`` once the daemon holds as many as it may, so that one has
ended (``unread``, ``calls``: once all have been opened), and goes on until its standard input ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys

_REQUEST = "GET /metrics HTTP/1.1\r\nHost: n\r\nAuthorization: Bearer {}\r\n\r\n"


def opened(kind: str, host: str, port: int, token: str) -> socket.socket:
    sock = socket.socket()
    if kind == "unread":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sock.connect((host, port))
    if kind in ("wrong", "unread"):
        sock.sendall(_REQUEST.format(token if kind == "unread" else "x" * 20).encode())
    sock.setblocking(False)
    return sock


def hold(kind: str, host: str, port: int, count: int, token: str) -> None:
    held = [opened(kind, host, port, token) for _ in range(count)]
    reported = kind == "unread"
    if reported:
        print("open", flush=True)
    while True:
        readable = select.select([sys.stdin, *([] if kind == "unread" else held)], [], [], 0.05)[0]
        if sys.stdin in readable:
            return
        for at, sock in enumerate(held):
            with contextlib.suppress(BlockingIOError):
                try:
                    if kind == "trickle":
                        sock.send(b"G")
                    ended = sock in readable and not sock.recv(1 << 16)
                except BlockingIOError:
                    raise
                except OSError:
                    ended = True
                if ended:
                    if not reported:
                        reported = True
                        print("open", flush=True)
                    sock.close()
                    held[at] = opened(kind, host, port, token)


def call(address: str, count: int, token: str) -> None:
    import grpc

    from probing.api.proto.probing.v1 import node_pb2 as pb
    from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.insecure_channel(address, options=options) for _ in range(count)]
    for channel in channels:
        NodeStub(channel).Status(pb.StatusRequest(), metadata=(("authorization", f"Bearer {token}"),), timeout=60)
    print("open", flush=True)
    sys.stdin.read()


def main() -> None:
    kind, address, count, token = (*sys.argv[1:], "")[:4]
    host, _, port = address.rpartition(":")
    if kind == "calls":
        call(address, int(count), token)
    else:
        hold(kind, host, int(port), int(count), token)


if __name__ == "__main__":
    main()
