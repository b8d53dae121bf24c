"""Opens calls that never send their message: ``http2_flood.py ADDRESS CONNECTIONS STREAMS PATH [NAME=VALUE...]``.

ADDRESS is ``unix:PATH`` or HOST:PORT. Speaks HTTP/2 by hand (RFC 9113, HPACK literals of RFC 7541). Prints ``open``
once all frames are sent, and waits for the end of its standard input.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS = 1, 4
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """A literal that is not indexed; both texts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address[len("unix:") :])
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def main() -> None:
    address, connections, streams, path, *more = sys.argv[1:]
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", "application/grpc"), ("te", "trailers"), *(tuple(text.split("=", 1)) for text in more)]
    block = b"".join(header(name, value) for name, value in fields)
    held = []
    for _ in range(int(connections)):
        # Those above its bound are closed by the service.
        with contextlib.suppress(OSError):
            sock = connect(address)
            sock.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            for number in range(int(streams)):
                sock.sendall(frame(HEADERS, END_HEADERS, 2 * number + 1, block))
            held.append(sock)
    print("open", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
