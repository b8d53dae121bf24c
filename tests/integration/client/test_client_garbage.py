"""A node that answers garbage: every command reports it on one line, and no raw byte reaches the terminal."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from client_in_process import probingctl

from probing.api.proto.probing.v1 import node_pb2 as pb

COMMANDS = (
    ("ps",),
    ("status",),
    ("nodes",),
    ("query", "SELECT 1"),
    ("stacks",),
    ("top", "--once"),
    ("nccl",),
    ("config",),
    ("vars", "1", "step"),
    ("tables",),
    ("pause",),
    ("query", "--all-nodes", "SELECT count(*) FROM comm.ops"),
)
EVIL = "\x1b]0;evil\x07\x1b[31m\r\n\u202e" + "x" * 300
Answer = Callable[[str, grpc.ServicerContext], bytes]


def _no_message(method: str, context: grpc.ServicerContext) -> bytes:
    del method, context
    return b"\xff" * 100


def _no_arrow(method: str, context: grpc.ServicerContext) -> bytes:
    del context
    return pb.QueryReply(arrow=bytes(range(256)) * 10).SerializeToString() if method == "Query" else b"\xff" * 100


def _evil_error(method: str, context: grpc.ServicerContext) -> bytes:
    del method
    sent = pb.Error(kind=EVIL, message=EVIL, hint=EVIL).SerializeToString()
    context.set_trailing_metadata((("probing-error-bin", sent),))
    context.abort(grpc.StatusCode.INTERNAL, EVIL)


def _evil_code(method: str, context: grpc.ServicerContext) -> bytes:
    del method
    context.set_trailing_metadata((("probing-error-bin", b"\xff\xff"),))
    context.abort(grpc.StatusCode.DATA_LOSS, EVIL)


@contextmanager
def _node(address: str, answer: Answer) -> Iterator[None]:
    """Answers every method of the service with the result of ``answer``."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            method = str(details.method).rpartition("/")[2]
            if method == "Query":
                return grpc.unary_stream_rpc_method_handler(lambda _, context: iter((answer(method, context),)))
            return grpc.unary_unary_rpc_method_handler(lambda _, context: answer(method, context))

    server = grpc.server(ThreadPoolExecutor(4), handlers=(Handler(),))
    assert server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


def _check(address: str, *words: str) -> None:
    done = probingctl("-t", address, "--timeout", "5s", *words)
    shown = done.stdout + done.stderr
    assert done.returncode > 0, shown
    assert all(c.isprintable() or c == "\n" for c in shown), repr(shown)
    lines = done.stderr.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, done.stderr
    assert all(line.startswith(("error: ", "hint: ", "warning: ")) for line in lines), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("answer", [_no_message, _no_arrow, _evil_error, _evil_code])
def test_garbage_is_one_line(tmp_path: Path, answer: Answer, words: tuple[str, ...]) -> None:
    address = f"unix:{tmp_path}/node.sock"
    with _node(address, answer):
        _check(address, *words)


@pytest.mark.parametrize("words", [("ps",), ("status",), ("query", "SELECT 1")], ids=" ".join)
@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 \x1b[31mNo\r\n\r\n", bytes(range(256)) * 100])
def test_what_speaks_no_http2_is_one_line(greeting: bytes, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.sendall(greeting)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        _check(f"127.0.0.1:{server.getsockname()[1]}", *words)
        server.shutdown(socket.SHUT_RDWR)
    thread.join(30)
