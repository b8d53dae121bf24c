"""Decides which calls a caller may make. Callers on the Unix socket have all scopes; on TCP a token, a certificate, or
both determine the scopes.

``Doors`` contains everything that protects the public ports: tokens, TLS, the audit log, and the rate limit of each
caller over TCP.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from probing.api.errors import ConfigError, Overloaded, PrivilegeError, Unauthenticated
from probing.daemon.config import Config, TlsConfig, is_collected
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.audit import Audit
from probing.daemon.service.outgoing import is_loopback
from probing.daemon.service.tls import Certificate, Tls
from probing.daemon.service.tokens import GRANTS, ONLY, Tokens

__all__ = ("FOR_JOBS", "RIGHTS", "Doorkeeper", "Doors", "Rates", "check_listen", "permit", "require")

# A caller's burst: as many calls as its rate allows in this many seconds.
BURST_S = 2.0
MAX_CALLERS = 4096


class Rates:
    """Limits the calls of each caller to ``per_s`` a second. Belongs to one event loop."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._now = now
        # The number of calls left in each caller's bucket, and the time of the caller's last call. The least recent
        # comes first.
        self._left: OrderedDict[tuple[str, str, str], tuple[float, float]] = OrderedDict()

    def take(self, caller: Caller) -> None:
        """Counts a call. Raises Overloaded if the caller (``Caller.key``) makes too many calls."""
        if math.isinf(self._per_s):
            return
        key, now = caller.key, self._now()
        most = max(self._per_s * BURST_S, 1.0)
        left, since = self._left.pop(key, (most, now))
        left = min(left + (now - since) * self._per_s, most)
        self._left[key] = (left - 1.0 if left >= 1.0 else left, now)
        while len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
        if left < 1.0:
            raise Overloaded(f"more than {self._per_s:g} calls a second by {caller}", hint="ask less often")


def _config_scope(request: Any) -> Scope:
    proposes = request.HasField("propose_value") or request.propose_reset
    if not (request.HasField("value") or request.reset or proposes):
        return Scope.READ
    return Scope.PROBE if is_collected(request.key) else Scope.ADMIN


def _group_scope(request: Any) -> Scope:
    change = request.WhichOneof("change")
    if change is None:
        return Scope.READ
    return Scope.ADMIN if change == "stop" else Scope.LAUNCH


# Calls of Arrow Flight; none of them changes anything.
FLIGHT = frozenset(
    (
        "Handshake",
        "ListFlights",
        "GetFlightInfo",
        "PollFlightInfo",
        "GetSchema",
        "DoGet",
        "DoPut",
        "DoExchange",
        "DoAction",
        "ListActions",
    )
)
# The scope that each call needs. A Preflight checks the scope of each of its parts itself.
RIGHTS: Mapping[str, Scope | Callable[[Any], Scope]] = {
    "Query": Scope.READ,
    "QueryMany": Scope.READ,
    "Stacks": Scope.READ,
    "Status": Scope.READ,
    "Peers": Scope.READ,
    "Vars": Scope.READ,
    "Eval": Scope.ADMIN,
    "Annotate": Scope.PROBE,
    "Pause": Scope.PROBE,
    "Config": _config_scope,
    "Facts": Scope.READ,
    "Preflight": Scope.READ,
    "Sink": Scope.READ,
    "Gossip": Scope.PEER,
    "Record": Scope.PEER,
    "AwaitFinding": Scope.READ,
    "Work": Scope.LAUNCH,
    "Group": _group_scope,
    "GroupLog": Scope.LAUNCH,
    "Agree": Scope.PEER,
    **dict.fromkeys(FLIGHT, Scope.READ),
}
# Calls that a token limited to jobs may make.
FOR_JOBS = frozenset(("Query", "Stacks", "Vars", "Facts", "AwaitFinding", "Status", "Peers")) | FLIGHT
# The calls of FOR_JOBS whose request names one job.
_NAMED = frozenset(("Stacks", "Vars", "Facts", "AwaitFinding"))
_OF_PIDS = frozenset(("Stacks", "Vars"))


class Doorkeeper:
    """Identifies callers of TCP. Belongs to one event loop."""

    def __init__(self, tokens: Tokens, tls: Tls, audit: Audit, rates: Rates | None = None) -> None:
        self._tokens = tokens
        self._rates = rates or Rates(math.inf)
        self._tls = tls
        self._audit = audit

    def identified(
        self, caller: Caller, metadata: Sequence[tuple[str, str | bytes]], certificate: Certificate | None = None
    ) -> Caller:
        """Returns ``caller`` with its name, scopes and jobs added. Raises Unauthenticated, and Overloaded for too many
        calls.

        A node's certificate is enough. Any other caller needs a token if there are tokens; if there are none, a
        client's certificate gives the scope read. If neither is configured, every caller has the scope read and counts
        as a node. A caller with a certificate and a token has the scopes that both allow.
        """
        try:
            known = self._identified(caller, metadata, certificate)
            self._rates.take(known)
            return known
        except (Overloaded, Unauthenticated) as e:
            self._audit.refused(caller, "a call", e.message, kind=e.kind)
            raise

    def _identified(
        self, caller: Caller, metadata: Sequence[tuple[str, str | bytes]], certificate: Certificate | None
    ) -> Caller:
        if certificate is not None:
            self._tls.check(certificate)
        peer = certificate is not None and certificate.peer
        shown = next((value for key, value in metadata if key == "authorization"), "")
        token = self._tokens.find(shown) if shown else None
        if certificate is not None:
            caller = dataclasses.replace(caller, name=certificate.name, nodes=certificate.nodes)
        if token is not None:
            scopes = token.scopes & _most(certificate)
            # A site may give all people the same certificate, and each person a token with that person's rights.
            name = f"{caller.name}, {token.name}" if certificate and not peer else caller.name or token.name
            return dataclasses.replace(caller, name=name, scopes=scopes, jobs=token.jobs)
        if peer or not self._tokens.wanted:
            alone = ONLY if certificate is None else GRANTS[Scope.PEER if peer else Scope.READ]
            return dataclasses.replace(caller, scopes=alone)
        raise Unauthenticated("the token is wrong" if shown else "this node wants a token")


def _most(certificate: Certificate | None) -> frozenset[Scope]:
    """Returns the scopes that a token can give to a caller with ``certificate``: a node cannot act as a user, nor a
    user as a node.
    """
    if certificate is None:
        return frozenset(Scope)
    return GRANTS[Scope.PEER if certificate.peer else Scope.ADMIN]


def permit(method: str, request: Any, caller: Caller) -> Scope:
    """Returns the scope that the call uses. Raises PrivilegeError if the caller has no right to make the call."""
    needed = RIGHTS[method]
    scope = needed(request) if callable(needed) else needed
    require(caller, scope)
    if caller.jobs is not None:
        if method not in FOR_JOBS:
            raise PrivilegeError(
                f"the token {caller.name} is limited to jobs, and {method} belongs to no job", hint=_LIMITED
            )
        if method == "Facts" and request.hardware:
            raise PrivilegeError(
                f"the token {caller.name} is limited to jobs, and hardware belongs to no job", hint=_LIMITED
            )
        if method in _NAMED and (request.job not in caller.jobs or (method in _OF_PIDS and request.pids)):
            raise PrivilegeError(f"the token {caller.name} is limited to jobs: name one of them", hint=_LIMITED)
    return scope


_LIMITED = "ask for one of its jobs with --job, and without pids; or use another token"


def require(caller: Caller, scope: Scope) -> None:
    """Raises PrivilegeError unless the caller has ``scope``. Callers on the Unix socket have all scopes."""
    if caller.listener == "unix" or scope in caller.scopes:
        return
    has = ", ".join(sorted(one.value for one in caller.scopes)) or "none"
    raise PrivilegeError(
        f"the scope {scope.value} is needed, and this caller has {has}",
        hint="ask on the node itself, by its Unix socket, or with a token of that scope",
    )


def check_listen(
    address: str, *, token_file: str, insecure: bool, tls: bool = False, client_ca: bool = False, key: str = "listen"
) -> None:
    """Raises ConfigError if ``address`` (HOST:PORT) would be open to all, or tokens and rows would be sent unencrypted.

    ``key``: the key of the address in the configuration.
    """
    if insecure:
        return
    if not token_file and not client_ca:
        raise ConfigError(
            f"{key} = {address} would answer everybody who can connect; on loopback, that is each user of this machine",
            hint="set token_file, or tls.client_ca, or insecure = true where everybody may read",
        )
    if not tls and not is_loopback(address):
        raise ConfigError(
            f"{key} = {address} would answer unencrypted outside of loopback",
            hint="set tls.cert and tls.key, listen on 127.0.0.1, or set insecure = true where the network is trusted",
        )


class Doors(NamedTuple):
    """The objects that protect the ports of one service."""

    tokens: Tokens
    tls: Tls
    audit: Audit
    keeper: Doorkeeper

    @classmethod
    def of(cls, config: Config) -> Doors:
        """Makes the objects from ``config``. Raises ConfigError for a port that is open to all, or files that cannot be
        used.
        """
        for key, address in (("listen", config.listen), ("http", config.http)):
            if address:
                check_listen(
                    address,
                    token_file=config.token_file,
                    insecure=config.insecure,
                    tls=bool(config.tls.cert),
                    client_ca=bool(config.tls.client_ca),
                    key=key,
                )
        tcp = bool(config.listen or config.http)
        tls = Tls(config.tls if tcp else TlsConfig())
        tokens, audit = Tokens(config.token_file if tcp else "", config.node_name), Audit()
        return cls(tokens, tls, audit, Doorkeeper(tokens, tls, audit, Rates(config.calls_per_s)))
