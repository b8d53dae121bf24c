"""Reads bearer tokens from a file: one token, or several with scopes and jobs. Reads the file again when it has
changed.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probing.api.errors import ConfigError
from probing.api.wire import bound, shown
from probing.daemon import toml
from probing.daemon.query.caller import Scope

__all__ = ("GRANTS", "Token", "Tokens")

MIN_TOKEN = 16
MAX_TOKEN = 4096
MAX_FILE = 1 << 20
MAX_TOKENS = 1000
MAX_JOBS = 1000
# The scopes that each value of ``scope`` in a token file grants.
GRANTS = {
    Scope.READ: frozenset((Scope.READ,)),
    Scope.PROBE: frozenset((Scope.READ, Scope.PROBE)),
    Scope.LAUNCH: frozenset((Scope.READ, Scope.LAUNCH)),
    Scope.ADMIN: frozenset((Scope.READ, Scope.PROBE, Scope.LAUNCH, Scope.ADMIN)),
    Scope.PEER: frozenset((Scope.READ, Scope.PEER)),
}
# The scopes of a single token, which the nodes of a cluster show to each other.
ONLY = frozenset((Scope.READ, Scope.PEER))
_KEYS = frozenset(("name", "scope", "jobs", "value"))
_VALUE = re.compile(rf"[!-~]{{{MIN_TOKEN},{MAX_TOKEN}}}")
_MAKE = "`openssl rand -hex 32 > FILE`, mode 0640, group of the service's user"
_EXAMPLE = 'docs/security.md has an example: [[token]] with name, scope = "read", value, and jobs if it is limited'
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """A token. ``jobs``: the only jobs whose rows the token may see; None: all jobs."""

    name: str
    value: bytes
    scopes: frozenset[Scope] = ONLY
    jobs: frozenset[str] | None = None

    def __repr__(self) -> str:
        return f"Token({self.name!r})"


class Tokens:
    """The tokens in ``file``. ``node``: the name of this node, to which callers bind their tokens."""

    def __init__(self, file: str, node: str = "") -> None:
        """Reads the tokens of ``file``. If ``file`` is empty, no token is needed. Raises ConfigError for a file that
        cannot be used.
        """
        self._node = node
        self._path = Path(file)
        self.wanted = bool(file)
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[Token, ...] = ()
        # The valid values of the header, each with its token: the token itself, and the form that is bound to this
        # node.
        self._shown: tuple[tuple[bytes, Token], ...] = ()
        self._problem = ""
        if file:
            self._read()

    @property
    def text(self) -> str:
        """The token that this node shows to peers; empty if no token has the scope peer."""
        self._refresh()
        return next((token.value.decode("ascii") for token in self._tokens if Scope.PEER in token.scopes), "")

    def find(self, authorization: str | bytes) -> Token | None:
        """Returns the token in ``authorization``, a header with the token itself or a form of it that is bound to this
        node; None for a wrong header."""
        self._refresh()
        given = authorization.encode() if isinstance(authorization, str) else authorization
        match = None
        # All tokens are compared, so that each wrong value takes the same time.
        for valid, token in self._shown:
            if hmac.compare_digest(given, valid):
                match = token
        return match

    def _refresh(self) -> None:
        if not self.wanted:
            return
        try:
            self._read()
            self._problem = ""
        except ConfigError as e:
            if e.message != self._problem:
                _log.error("%s: the last tokens stay", e.message)
            self._problem = e.message

    def _read(self) -> None:
        try:
            found = self._path.stat()
            stamp = (found.st_ctime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                text = file.read(MAX_FILE + 1).decode("utf-8", "replace").strip()
        except OSError as e:
            raise ConfigError(f"cannot read token_file {self._path}: {e.strerror}", hint=_MAKE) from e
        if found.st_mode & 0o007:
            raise ConfigError(f"token_file {self._path} is open to everybody", hint=f"chmod o= {self._path}")
        self._tokens = self._several(text) if "[[token]]" in text else (self._single(text),)
        texts = [(token.value.decode("ascii"), token) for token in self._tokens]
        ways = ((shown(text), bound(text, self._node)) if self._node else (shown(text),) for text, _ in texts)
        self._shown = tuple((way.encode(), token) for (_, token), each in zip(texts, ways, strict=True) for way in each)
        self._stamp = stamp

    def _single(self, text: str) -> Token:
        if not _VALUE.fullmatch(text):
            message = f"token_file {self._path} has no token of {MIN_TOKEN} to {MAX_TOKEN} visible characters"
            raise ConfigError(message, hint=_MAKE)
        return Token("token", text.encode())

    def _several(self, text: str) -> tuple[Token, ...]:
        try:
            return _tokens(text)
        except ValueError as e:
            raise ConfigError(f"token_file {self._path} cannot be used: {e}", hint=_EXAMPLE) from None


def _tokens(text: str) -> tuple[Token, ...]:
    """Returns the tokens in a file. Raises ValueError, which does not contain the value of a token."""
    try:
        entries = toml.loads(text).get("token") if len(text) <= MAX_FILE else None
    except ValueError:
        # The message of tomllib may quote a token.
        raise ValueError("it is not TOML") from None
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_TOKENS:
        raise ValueError(f"it must have 1 to {MAX_TOKENS} tokens")
    tokens = tuple(_token(entry) for entry in entries)
    for what, count in (("names", len({t.name for t in tokens})), ("values", len({t.value for t in tokens}))):
        if count < len(tokens):
            raise ValueError(f"two tokens have equal {what}")
    return tokens


def _token(entry: Mapping[str, Any]) -> Token:
    """Returns the token of an entry. Raises ValueError, which does not contain the value of a token."""
    name, value, jobs = entry.get("name"), entry.get("value"), entry.get("jobs")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.:@-]{1,64}", name, re.ASCII):
        raise ValueError("a token has no name of 1 to 64 letters, digits and . : @ _ -")
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"the token {name} has the unknown key {unknown[0][:40]!r}")
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise ValueError(f"the token {name} has no value of {MIN_TOKEN} to {MAX_TOKEN} visible characters")
    scope = entry.get("scope", "read")
    if scope not in [one.value for one in Scope]:
        raise ValueError(f"the token {name} has none of the scopes {', '.join(one.value for one in Scope)}")
    if jobs is None:
        return Token(name, value.encode(), GRANTS[Scope(scope)])
    if not isinstance(jobs, list) or not 0 < len(jobs) <= MAX_JOBS or not all(isinstance(j, str) and j for j in jobs):
        raise ValueError(f"the jobs of the token {name} are not a list of names")
    if scope != Scope.READ.value:
        raise ValueError(f'the token {name} is limited to jobs, so its scope must be "read"')
    return Token(name, value.encode(), GRANTS[Scope.READ], frozenset(jobs))
