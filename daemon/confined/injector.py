"""Runs one piece of code in one process, and ends. The connection at descriptor 0 brings the request.

The request ``eval`` has the fields of ``inject.evaluation.Evaluation``. The payload of its answer is the result of
``inject.evaluation.evaluate`` as JSON.

The injector is the only process of the daemon that may trace other processes. Its only right is CAP_SYS_PTRACE. It
opens no file for writing, makes no socket and starts no process. If it is killed, the traced process goes on unchanged.
"""

from __future__ import annotations

import json
from contextlib import suppress

from probing.api.errors import ProbingError, UsageError
from probing.daemon.confined.sandbox import restrict
from probing.daemon.confined.seccomp import INJECTOR
from probing.daemon.confined.serving import inherit, internal_error
from probing.daemon.inject.evaluation import Evaluation, evaluate
from probing.daemon.ipc import Message

__all__ = ("main",)

RECEIVE_S = 5.0


def main() -> int:
    """Answers one request."""
    channel = inherit(lambda: restrict(INJECTOR))
    try:
        request = channel.receive(RECEIVE_S)
        request.close_fds()
        if request.header.get("op") != "eval":
            raise UsageError(f"an injector has no request {request.header.get('op')!r}")
        found = evaluate(Evaluation.from_dict(request.header))
        answer = Message({}, json.dumps(found).encode())
    except ProbingError as e:
        answer = Message({"error": e.to_dict()})
    except Exception as e:
        answer = Message({"error": internal_error("an injector", e).to_dict()})
    with suppress(ProbingError):
        channel.send(answer.header, answer.payload, timeout=RECEIVE_S)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
