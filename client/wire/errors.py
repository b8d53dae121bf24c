"""Turns errors of calls that gRPC reports into errors with a reason and a hint."""

from __future__ import annotations

import asyncio
import grp
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from probing.api.errors import BROKEN, LATE, UNKNOWN_CALL, PeerError, PrivilegeError, ProbingError
from probing.client.user import user_name
from probing.federation.execution.asking import late

__all__ = ("diagnose", "error_of", "too_old")

_DENIED = "permission denied"
_UNKNOWN_HOST = "the host name is not known"
_LATE = "no connection in time"
# gRPC has the same status for a node that cannot be reached and for a connection that broke; only the text differs.
_UNCONNECTED, _ATTEMPT_LATE = "failed to connect", "attempt timed out"
# Texts of grpcio 1.85 about a server that does not speak gRPC.
_OTHER_PROTOCOL = ("Failed parsing HTTP/2", "http1.x server", "Received http2 header with status")
_OTHER_HINT = "another service listens there: -t takes the socket, or the port of `listen`, not the port of `http`"
_threads = ThreadPoolExecutor(8, thread_name_prefix="why")


async def error_of(address: str, error: grpc.RpcError, seconds: float, *, connected: bool) -> ProbingError:
    """Returns the error of a call to ``address`` with the time limit ``seconds``. ``connected``: whether there was a
    connection.
    """
    code, details = error.code(), str(error.details() or "").strip()
    if code is grpc.StatusCode.UNAVAILABLE:
        why = await asyncio.get_running_loop().run_in_executor(_threads, diagnose, address)
        return _unreached(address, details, why)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return late(address, seconds, "answer" if connected else "connection")
    said = details or code.name.lower()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        hint = "give the node's token by --token-file or PROBING_AUTH_TOKEN"
        return PrivilegeError(f"{address} refused: {said}", hint=hint)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return too_old(address)
    reason = f"{code.name.lower()}: {details}" if details else said
    # The node's gRPC answers CANCELLED if too many calls are in flight to begin this call.
    broken = BROKEN if code is grpc.StatusCode.CANCELLED else ""
    return PeerError(f"{address}: {reason}", reason=reason, code=broken)


def too_old(address: str) -> PeerError:
    """Returns the error of a node whose version does not know a request."""
    hint = "its probingd is older than this probingctl, or it is another service"
    return PeerError(f"{address} does not know this request", hint=hint, code=UNKNOWN_CALL)


def _unreached(address: str, details: str, why: str) -> ProbingError:
    if any(text in details for text in _OTHER_PROTOCOL):
        return PeerError(f"{address} is not probingd: it does not speak gRPC", hint=_OTHER_HINT)
    if not why and _ATTEMPT_LATE in details:
        # The node accepts connections, but sends nothing.
        why = _LATE
    reason = why or details or "the connection broke"
    hint = ""
    if why == _DENIED:
        group = _group_of(address.removeprefix("unix:"))
        hint = f"root and the group {group} may connect: `sudo usermod -aG {group} {user_name()}`, then log in again"
    elif why == _UNKNOWN_HOST:
        hint = "check the name, or give an IP address"
    code = LATE if why == _LATE else "" if details.startswith(_UNCONNECTED) else BROKEN
    return PeerError(f"{address} does not answer: {reason}", hint=hint, code=code, reason=reason)


def _group_of(path: str) -> str:
    """Returns the name of the group that may use the socket ``path``."""
    try:
        return grp.getgrgid(Path(path).stat().st_gid).gr_name
    except (OSError, KeyError):
        return "probing"


def diagnose(address: str) -> str:
    """Connects once more to ``address`` and returns why that fails; empty if it works."""
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
        return _LATE
    except socket.gaierror:
        return _UNKNOWN_HOST
    except OSError as e:
        return e.strerror or str(e)
    return ""
