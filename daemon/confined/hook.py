"""The hook process: starts the configured command, or posts to the configured URL, for one finding, and ends.

The connection at descriptor 0 brings the finding as JSON, and takes {"failed": [TEXT, ...]}. The command and the URL
come from the configuration alone. The process has no rights; it has no sandbox, since the command is the
administrator's. It does not end with its connection, so that a service that restarts cuts no page short.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from types import FrameType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from probing.api.errors import ProbingError
from probing.daemon.config import Config, DiagnoseConfig
from probing.daemon.confined.sandbox import stand_back
from probing.daemon.ipc import Channel

__all__ = ("main",)

RECEIVE_S = 5.0
MAX_FINDING = 1 << 20
MAX_VALUE = 1000
_LIMITS = {
    resource.RLIMIT_AS: 4 << 30,
    resource.RLIMIT_CPU: 600,
    resource.RLIMIT_FSIZE: 256 << 20,
    resource.RLIMIT_NOFILE: 1024,
    resource.RLIMIT_CORE: 0,
}
_END = (signal.SIGTERM,)
# Variables of the command, by field of the finding.
_VARIABLES = ("finding_id", "job", "run", "node", "verdict", "severity", "sentence", "ranks", "nodes")


def main() -> int:
    """Returns 0, or 1 when the hook failed or no finding came."""
    config = Config.from_args(sys.argv[1:]).diagnose
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    channel = Channel(socket.socket(fileno=0))
    _limit()
    stand_back()
    try:
        request = channel.receive(RECEIVE_S)
        request.close_fds()
        failed = _run(config, request.payload[:MAX_FINDING], request.header)
        channel.send({"failed": failed}, timeout=RECEIVE_S)
    except ProbingError as e:
        sys.stderr.write(f"hook: {e.message}\n")
        return 1
    return 1 if failed else 0


def _run(config: DiagnoseConfig, finding: bytes, header: Mapping[str, Any]) -> list[str]:
    failed = []
    if config.hook:
        failed += _start(shlex.split(config.hook), finding, _variables(header), config.hook_timeout_s)
    if config.webhook:
        failed += _post(config.webhook, finding, config.hook_timeout_s)
    return failed


def _start(command: list[str], finding: bytes, variables: Mapping[str, str], timeout: float) -> list[str]:
    """Runs the command in a session of its own, and kills what is left of that. Returns why it failed."""
    # Until the command can be killed SIGTERM has to wait; the command gets it as usual.
    signal.pthread_sigmask(signal.SIG_BLOCK, _END)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=2,
            env={**os.environ, **variables},
            cwd="/",
            start_new_session=True,
            preexec_fn=_take_end,
        )
    except OSError as e:
        _take_end()
        return [f"the command cannot be started: {e.strerror}"]
    try:
        _take_end()
        process.communicate(finding, timeout)
    except subprocess.TimeoutExpired:
        return [f"the command did not end within {timeout:g} s and was killed"]
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode
    if not code:
        return []
    return [f"the command was killed by signal {-code}" if code < 0 else f"the command ended with exit status {code}"]


def _take_end() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END)


def _post(url: str, finding: bytes, timeout: float) -> list[str]:
    """Posts the finding; a redirect is not followed. Returns why it failed."""
    opener = build_opener(ProxyHandler({}), _NoRedirect)
    # The configuration takes http and https alone.
    request = Request(url, finding, {"Content-Type": "application/json", "User-Agent": "probingd"})  # noqa: S310
    try:
        with _bounded(timeout), opener.open(request, timeout=timeout):
            return []
    except HTTPError as e:
        return [f"the webhook answered {e.code}"]
    except (OSError, HTTPException, ValueError) as e:
        reason = e.reason if isinstance(e, URLError) else e
        if isinstance(reason, TimeoutError):
            return [f"the webhook did not answer within {timeout:g} s"]
        # The text may hold the URL, which may hold a secret.
        return [f"the webhook cannot be reached: {type(reason).__name__}"]


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body after ``seconds``: urllib's timeout holds for each step alone."""
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_late(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TimeoutError


def _stop(number: int, frame: FrameType | None) -> None:
    # The exception ends the command on its way.
    del number, frame
    raise SystemExit(1)


def _variables(header: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables PROBING_*. They hold texts of targets: what is not printable becomes a question mark."""
    texts = {name: str(header[name])[:MAX_VALUE] for name in _VARIABLES if header.get(name) is not None}
    return {
        f"PROBING_{name.upper()}": "".join(c if c.isprintable() else "?" for c in text) for name, text in texts.items()
    }


def _limit() -> None:
    for kind, value in _LIMITS.items():
        _, hard = resource.getrlimit(kind)
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))


if __name__ == "__main__":
    sys.exit(main())
