"""Checks a request for facts before a job: its limits, and the scopes that its parts need."""

from __future__ import annotations

import re
from collections.abc import Container

from probing.api.errors import PrivilegeError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.auth import require
from probing.daemon.service.preflight.gather import Asked
from probing.diagnosis.preflight.facts import Problem, Reached

__all__ = ("asked_of",)

MAX_PEERS = 1024
MAX_NAME = 255
MAX_JOB = 1024
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]{1,64}\]|[\w.-]{1,255}):(\d{1,5})", re.ASCII)


def asked_of(request: pb.PreflightRequest, caller: Caller, known: Container[str]) -> Asked:
    """Returns the parts that the request asks for. Raises UsageError for values that are too long, and for peers that
    are not addresses.

    Starting a process needs the scope admin; connecting to addresses that are not ``known`` needs the scope probe. A
    part without its scope is refused, and the facts say so.
    """
    if len(request.peers) > MAX_PEERS:
        raise UsageError(f"more than {MAX_PEERS} peers", hint="ask about fewer nodes at once")
    for peer in request.peers:
        match = _ADDRESS.fullmatch(peer)
        if match is None or not 0 < int(match[2]) < 65536:
            raise UsageError(f"{peer[:80]!r} is not HOST:PORT")
    if len(request.job) > MAX_JOB or len(request.master_addr) > MAX_NAME or not 0 <= request.master_port < 65536:
        raise UsageError("the job or master_addr of the request is too long, or its master_port is not a port")
    refused = _refusal(caller, Scope.ADMIN) if request.python else ""
    # Bytes are sent only to known peers, whatever the caller's scope is.
    bound = request.bandwidth or _refusal(caller, Scope.PROBE)
    strange = [peer for peer in request.peers if peer not in known] if bound else []
    why = "not measured: the node connects only to nodes that it knows"
    return Asked(
        python="" if refused else request.python,
        master=(request.master_addr, request.master_port) if request.master_addr else None,
        peers=tuple(dict.fromkeys(peer for peer in request.peers if peer not in strange)),
        unmeasured=tuple(Reached(peer, None, why) for peer in strange),
        bandwidth=request.bandwidth,
        job=request.job,
        refused=(Problem("versions", refused),) if refused else (),
    )


def _refusal(caller: Caller, scope: Scope) -> str:
    try:
        require(caller, scope)
    except PrivilegeError as e:
        return e.message
    return ""
