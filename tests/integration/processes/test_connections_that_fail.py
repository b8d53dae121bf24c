"""Helpers that end at once, as when their Python cannot start."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from probing.daemon.pool import Policy, Pool


def test_ever_fewer_are_started_until_one_works(
    tmp_path: Path, until: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    started: list[float] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def close_each() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return
                started.append(0.0)

        thread = threading.Thread(target=close_each)
        thread.start()
        pool = Pool(str(tmp_path / "s"), Policy("reader", retry_s=(0.001, 30.0)))
        until(lambda: len(started) >= 6)
        # The pause doubles each time, soon after the connection has failed, and the log has it once.
        until(lambda: pool._pause >= 0.001 * 2**5)
        assert len(started) < 23
        assert caplog.text.count("no reader can be started") == 1
        pool.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
