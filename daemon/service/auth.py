"""Decides who may call what. The Unix socket is for root and its group; TCP is read-only and needs a bearer token."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from probing.api.errors import ConfigError, PrivilegeError, Unauthenticated
from probing.daemon.query.caller import Caller

__all__ = ("Scope", "Token", "check_listen", "require")

MIN_TOKEN = 16
MAX_TOKEN = 4096
# For each address with a wrong token, one line is logged in this time.
AUDIT_S = 10.0
MAX_ADDRESSES = 1000
_audit = logging.getLogger("probing.audit")
_MAKE = "`openssl rand -hex 32 > FILE`, mode 0640, group of the service's user"


class Scope(Enum):
    READ = "read"
    PROBE = "probe"
    ADMIN = "admin"


class Token:
    """The bearer token of TCP calls: the text of ``file``, which is read again after it changed."""

    def __init__(self, file: str) -> None:
        """An empty ``file`` means that no token is needed. Raises ConfigError for a file that cannot be used."""
        self._path = Path(file)
        self._wanted = bool(file)
        self._stamp: tuple[int, int, int] | None = None
        self._text = b""
        self._refused: OrderedDict[str, tuple[float, int]] = OrderedDict()
        if file:
            self._read()

    @property
    def text(self) -> str:
        """The token, for a call to a peer; empty where none is needed."""
        return self._text.decode("ascii")

    def check(self, caller: Caller, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Raises Unauthenticated unless ``metadata`` has the token, or none is needed."""
        if not self._wanted:
            return
        shown = next((value for key, value in metadata if key == "authorization"), "")
        given = shown.encode() if isinstance(shown, str) else shown
        try:
            self._read()
        except ConfigError as e:
            _audit.error("%s: the last token stays", e.message)
        # Takes the same time for every wrong token.
        if hmac.compare_digest(given, b"Bearer " + self._text):
            return
        self._log(caller)
        raise Unauthenticated("the token is wrong" if shown else "this node wants a token")

    def _read(self) -> None:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                text = file.read(MAX_TOKEN + 1).strip()
        except OSError as e:
            raise ConfigError(f"cannot read token_file {self._path}: {e.strerror}", hint=_MAKE) from e
        if found.st_mode & 0o007:
            raise ConfigError(f"token_file {self._path} is open to everybody", hint=f"chmod o= {self._path}")
        if not re.fullmatch(rb"[!-~]{%d,%d}" % (MIN_TOKEN, MAX_TOKEN), text):
            message = f"token_file {self._path} has no token of {MIN_TOKEN} to {MAX_TOKEN} visible characters"
            raise ConfigError(message, hint=_MAKE)
        self._stamp, self._text = stamp, text

    def _log(self, caller: Caller) -> None:
        now = time.monotonic()
        since, count = self._refused.pop(caller.who, (-AUDIT_S, 0))
        if now - since >= AUDIT_S:
            more = f", and {count} times since the last line" if count else ""
            _audit.warning("a call by %s was refused: wrong token%s", caller, more)
            since, count = now, 0
        else:
            count += 1
        self._refused[caller.who] = (since, count)
        while len(self._refused) > MAX_ADDRESSES:
            self._refused.popitem(last=False)


def check_listen(address: str, *, token_file: str, insecure: bool, key: str = "listen") -> None:
    """Raises ConfigError if ``address`` (HOST:PORT) would be open to all, or carry tokens and rows unencrypted.

    ``key`` is the key of the configuration that has it.
    """
    if insecure:
        return
    if not token_file:
        raise ConfigError(
            f"{key} = {address} would answer everybody who can connect, on loopback each user of this machine",
            hint="set token_file to a file with a token, or insecure = true where everybody may read",
        )
    if not _is_loopback(address.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"{key} = {address} would answer in the clear off loopback",
            hint="listen on 127.0.0.1 and tunnel to it, or set insecure = true where the network is trusted",
        )


def require(caller: Caller, scope: Scope) -> None:
    """Raises PrivilegeError unless the caller has ``scope``: all scopes on the Unix socket, READ elsewhere."""
    if scope is Scope.READ or caller.listener == "unix":
        return
    raise PrivilegeError(
        f"the scope {scope.value} is needed, and TCP gives only {Scope.READ.value}",
        hint="ask on the node itself, by its Unix socket",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
