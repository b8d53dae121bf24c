"""The hook process: for one finding it starts the configured command, posts to the configured URL, or does both, and
ends.

The connection at descriptor 0 brings the finding as JSON, and the ``parts`` to run (empty: both). The answer is
{"failed": [TEXT, ...], "again": [PART, ...]}. The command and the URL come only from the configuration. The process has
no rights. It runs without a sandbox, because the command is the administrator's. It does not end when its connection
closes, so that a restart of the service interrupts no hook. Processes that the command leaves running end with this
process, even in another session: as the subreaper (prctl(2)) this process becomes the parent of each orphan.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from probing.api.errors import ProbingError
from probing.api.text import escape
from probing.daemon.config import Config, DiagnoseConfig
from probing.daemon.confined.sandbox import limit, stand_back
from probing.daemon.ipc import Channel

__all__ = ("main",)

RECEIVE_S = 5.0
# The timeout for ending processes that the command left, s.
END_S = 5.0
_PAUSE_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
_COMMAND, _WEBHOOK = "command", "webhook"
MAX_FINDING = 1 << 20
MAX_VALUE = 1000
MEMORY_BYTES, CPU_SECONDS, MAX_DESCRIPTORS, MAX_FILE = 4 << 30, 600, 1024, 256 << 20
_END = (signal.SIGTERM,)
# The fields of the finding that the command gets as environment variables.
_VARIABLES = ("finding_id", "job", "run", "node", "verdict", "severity", "sentence", "ranks", "nodes")


def main() -> int:
    """Runs the hook. Returns 0, or 1 if the hook failed or no finding arrived."""
    config = Config.from_args(sys.argv[1:]).diagnose
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    channel = Channel(socket.socket(fileno=0))
    limit(MEMORY_BYTES, CPU_SECONDS, descriptors=MAX_DESCRIPTORS, file_bytes=MAX_FILE)
    stand_back()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        request = channel.receive(RECEIVE_S)
        request.close_fds()
        failed = _run(config, request.payload[:MAX_FINDING], request.header)
        texts = [text for outcome in failed.values() for text in outcome.texts]
        again = [part for part, outcome in failed.items() if outcome.again]
        channel.send({"failed": texts, "again": again}, timeout=RECEIVE_S)
    except ProbingError as e:
        sys.stderr.write(f"hook: {e.message}\n")
        return 1
    finally:
        _end_orphans(END_S)
    return 1 if texts else 0


class _Outcome(NamedTuple):
    """The outcome of a part of the hook. ``texts``: its errors; ``again``: the part has to be tried again."""

    texts: list[str]
    again: bool


def _run(config: DiagnoseConfig, finding: bytes, header: Mapping[str, Any]) -> dict[str, _Outcome]:
    """Runs the requested parts of the hook: its command, its webhook, or both. Returns the outcome of each part."""
    wanted, seconds = header.get("parts") or (_COMMAND, _WEBHOOK), config.hook_timeout_s
    outcomes: dict[str, _Outcome] = {}
    if config.hook and _COMMAND in wanted:
        texts = _start(shlex.split(config.hook), finding, _variables(header), seconds)
        left = [] if _end_orphans(END_S) else [f"processes of the command did not end within {END_S:g} s"]
        outcomes[_COMMAND] = _Outcome([*texts, *left], bool(texts))
    if config.webhook and _WEBHOOK in wanted:
        texts = _post(config.webhook, finding, seconds)
        outcomes[_WEBHOOK] = _Outcome(texts, bool(texts))
    return outcomes


def _start(command: list[str], finding: bytes, variables: Mapping[str, str], timeout: float) -> list[str]:
    """Runs the command in a new session, and kills the processes that are left in its process group. Returns why the
    command failed; an empty list if it did not fail.
    """
    # SIGTERM is blocked until this process has the pid of the command and can kill the command. The child process
    # unblocks SIGTERM for itself.
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


def _end_orphans(seconds: float) -> bool:
    """Kills the children of this process, and orphans that become its children, until none is left. Returns False if
    some are left after ``seconds``."""
    # Killing by pid is safe: the kernel does not reuse the pid of a child before this process has waited for the child.
    children = Path("/proc/thread-self/children")
    until = time.monotonic() + seconds
    while True:
        for pid in map(int, children.read_text().split()) if children.exists() else ():
            with suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_S)


def _take_end() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END)


def _post(url: str, finding: bytes, timeout: float) -> list[str]:
    """Posts the finding without following redirects. Returns why this failed; an empty list if it did not fail."""
    opener = build_opener(ProxyHandler({}), _NoRedirect)
    # The configuration accepts only http and https.
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
        # The text of the error may contain the URL, which may contain a secret.
        return [f"the webhook cannot be reached: {type(reason).__name__}"]


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Context manager that raises TimeoutError in its body after ``seconds``. The timeout of urllib limits each step,
    not all steps together.
    """
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
    # The exception ends the command and the processes that it left; a second signal must not interrupt that.
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(1)


def _variables(header: Mapping[str, Any]) -> dict[str, str]:
    """Returns the environment variables PROBING_*. Their texts, which may come from targets, are escaped."""
    return {
        f"PROBING_{name.upper()}": escape(str(header[name]), MAX_VALUE)
        for name in _VARIABLES
        if header.get(name) is not None
    }


if __name__ == "__main__":
    sys.exit(main())
