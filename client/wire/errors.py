"""Errors of calls: those that the node reports, and those of the connection, with the reason and a hint."""

from __future__ import annotations

import grp
import os
import pwd
import socket
from pathlib import Path
from typing import Any

import grpc

from probing.api.errors import InternalError, PeerError, PrivilegeError, ProbingError, error_from
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import ERROR_KEY

__all__ = ("diagnose", "error_of", "is_late", "too_old")

_DENIED = "permission denied"
_UNKNOWN_HOST = "the host name is not known"
_LATE = ("no answer in time", "no connection in time")
# What grpcio 1.85 says of a server that does not speak gRPC.
_OTHER_PROTOCOL = ("Failed parsing HTTP/2", "http1.x server", "Received http2 header with status")
_OTHER_HINT = "another service listens there: -t takes the socket, or the port of `listen`, not that of `http`"


def error_of(address: str, error: grpc.RpcError) -> ProbingError:
    """Returns the error of a call to ``address``."""
    trailing: Any = error.trailing_metadata() or ()
    sent = next((value for key, value in trailing if key == ERROR_KEY), None)
    if isinstance(sent, bytes):
        message = pb.Error()
        try:
            message.ParseFromString(sent)
        except ValueError:
            return InternalError(f"{address} sent an error that cannot be read")
        return error_from(message.kind, message.message, message.hint)
    code, details = error.code(), str(error.details() or "").strip()
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unreached(address, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        why = diagnose(address) or _LATE[0]
        return PeerError(f"{address} does not answer: {why}", hint="raise --timeout, or ask its `probingctl status`")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        hint = "give the node's token by --token-file or PROBING_AUTH_TOKEN"
        return PrivilegeError(f"{address} refused: {details or code.name.lower()}", hint=hint)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return too_old(address)
    return PeerError(f"{address}: {code.name.lower()}: {details}" if details else f"{address}: {code.name.lower()}")


def too_old(address: str) -> PeerError:
    """Returns the error of a node that does not know a request."""
    hint = "its probingd is older than this probingctl, or it is another service"
    return PeerError(f"{address} does not know this request", hint=hint)


def is_late(error: ProbingError) -> bool:
    """Whether a node did not answer in time, so that it may answer later."""
    return isinstance(error, PeerError) and error.message.endswith((*_LATE, "it was not asked in time"))


def _unreached(address: str, details: str) -> ProbingError:
    if any(text in details for text in _OTHER_PROTOCOL):
        return PeerError(f"{address} is no probingd: it does not speak gRPC", hint=_OTHER_HINT)
    why = diagnose(address)
    error = PeerError(f"{address} does not answer: {why or details or 'the connection broke'}")
    if why == _DENIED:
        group = _group_of(address.removeprefix("unix:"))
        error.hint = f"root and the group {group} may: `sudo usermod -aG {group} {_user()}`, then log in again"
    elif why == _UNKNOWN_HOST:
        error.hint = "is the name spelt right? an IP address does as well"
    return error


def _group_of(path: str) -> str:
    """Returns the group that may use the socket ``path``."""
    try:
        return grp.getgrgid(Path(path).stat().st_gid).gr_name
    except (OSError, KeyError):
        return "probing"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def diagnose(address: str) -> str:
    """Connects once more to ``address``; returns why that fails, empty where it works."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(1.0)
                sock.connect(address[len("unix:") :])
        else:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
                return ""
    except FileNotFoundError:
        return "there is no such socket"
    except PermissionError:
        return _DENIED
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return _LATE[1]
    except socket.gaierror:
        return _UNKNOWN_HOST
    except OSError as e:
        return e.strerror or str(e)
    return ""
