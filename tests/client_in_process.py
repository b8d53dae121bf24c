"""``probingctl`` within the process of the tests, which takes a twentieth of the CPU time of a process of its own."""

from __future__ import annotations

import io
import subprocess
import threading
import unittest.mock

from costs import spent
from waiting import asking

from probing.client import interrupt
from probing.client.main import main

__all__ = ("probingctl",)

# The output of the process is redirected for one command at a time.
_one_at_a_time = threading.Lock()


def probingctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without terminal and input; returns exit code, stdout and stderr. Ctrl-C ends the tests, too."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    streams = unittest.mock.patch.multiple("sys", stdin=io.StringIO(), stdout=out, stderr=err)
    with spent("probingctl in the process"), asking(), _one_at_a_time, streams:
        code = main(list(arguments))
    if code == interrupt.CODE:
        raise KeyboardInterrupt
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(list(arguments), code, *texts)
