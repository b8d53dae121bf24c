"""Where the service listens: its Unix socket always, TCP when it is configured."""

from __future__ import annotations

import grp
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from probing.api.errors import ConfigError
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from probing.daemon.service.auth import check_listen

__all__ = ("listen",)

THREADS = 16
MAX_CALLS = 64
MAX_REQUEST = 1 << 20
MAX_METADATA = 16 << 10
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST),
    ("grpc.max_metadata_size", MAX_METADATA),
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.so_reuseport", 0),
)
_log = logging.getLogger(__name__)


def listen(
    servicer: NodeServicer, socket_path: str, *, group: str, tcp: str = "", insecure: bool = False
) -> grpc.Server:
    """A server that answers already. ``tcp`` is HOST:PORT or empty.

    Raises ConfigError when a socket is taken or cannot be made, or TCP would be in the clear off loopback.
    """
    if tcp:
        check_listen(tcp, insecure=insecure)
    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="rpc")
    server = grpc.server(executor, options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    add_NodeServicer_to_server(servicer, server)
    _bind_unix(server, socket_path, group)
    if tcp:
        _bind(server, tcp, "is another daemon on that port?")
    server.start()
    return server


def _bind_unix(server: grpc.Server, path: str, group: str) -> None:
    if _answers(path):
        raise ConfigError(f"{path} is taken: a daemon answers on it", hint="stop it, or choose another --socket")
    # Nobody outside the group may connect in the instant before the mode is set.
    old = os.umask(0o117)
    try:
        _bind(server, f"unix:{path}", "its directory must exist and belong to the service's user")
    finally:
        os.umask(old)
    _give_to_group(path, group)


def _bind(server: grpc.Server, address: str, hint: str) -> None:
    try:
        if server.add_insecure_port(address):
            return
    except RuntimeError:
        _log.debug("cannot bind %s", address, exc_info=True)
    raise ConfigError(f"cannot listen on {address}", hint=hint)


def _give_to_group(path: str, group: str) -> None:
    try:
        gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        os.chown(path, -1, gid)
    except (KeyError, PermissionError) as e:
        _log.warning("only this user can use %s: it cannot be given to the group %s (%s)", path, group, e)
    Path(path).chmod(0o660)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True
