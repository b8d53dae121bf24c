"""A process that is asked to stop twice ends cleanly, also when the second signal comes while it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

TWICE = """
import asyncio, os, signal, sys
from functools import partial
from probing.daemon.supervisor.health import stop_on_signal

async def serve():
    stop = asyncio.Event()
    stop_on_signal(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
    os.kill(os.getpid(), signal.SIG{first})
    await stop.wait()

asyncio.run(serve())
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print("ended")
"""


@pytest.mark.parametrize("first", ["TERM", "INT"])
def test_a_second_signal_is_ignored(first: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWICE.format(first=first)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
