"""Asks a confined process to run an interpreter for its versions (``daemon/confined/interpreter.py``)."""

from __future__ import annotations

import time

from probing.api.errors import TargetTimeout, UsageError
from probing.daemon.ipc import ChannelTimeout, connect
from probing.diagnosis.preflight.facts import Version

__all__ = ("Interpreters",)

CONNECT_S = 2.0
NAMES = ("python", "torch", "cuda", "nccl")
MAX_PATH = 4096
MAX_VALUE = 100


class Interpreters:
    """``path``: the socket on which a connection starts such a process."""

    def __init__(self, path: str) -> None:
        self._path = path

    def versions(self, python: str, timeout: float) -> list[Version]:
        """Returns what the interpreter at the path ``python`` says of itself. Raises TargetError, UsageError."""
        if not python.startswith("/") or len(python) > MAX_PATH or "\0" in python:
            raise UsageError(f"{python[:80]!r} is no path of an interpreter")
        begun = time.monotonic()
        try:
            with connect(self._path, min(CONNECT_S, timeout)) as channel:
                header = {"op": "versions", "python": python, "deadline": begun + 0.85 * timeout}
                answer = channel.request(header, timeout=timeout)
        except ChannelTimeout:
            raise TargetTimeout(f"{python} did not answer within {timeout:.0f} s") from None
        answer.close_fds()
        found = answer.header.get("versions") or {}
        return [Version(name, str(found[name])[:MAX_VALUE]) for name in NAMES if found.get(name)]
