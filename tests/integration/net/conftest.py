"""Time-outs for a busy machine."""

from __future__ import annotations

import pytest

from probing.daemon.net.interfaces import addresses
from probing.daemon.net.interfaces import source as interfaces
from probing.daemon.net.rdma import qps
from probing.daemon.net.rdma import source as ports
from probing.daemon.net.tcp import sockets

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (addresses, interfaces, qps, ports):
        monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(sockets, "OWNERS_TIMEOUT_S", PATIENCE_S)
