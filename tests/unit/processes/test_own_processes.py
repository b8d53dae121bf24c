"""The daemon's own processes are those of its users beside it."""

from __future__ import annotations

import pytest

from probing.daemon.processes import liveness
from probing.daemon.processes.liveness import OwnProcesses

COLLECTOR = b"0::/probingd.slice/probingd-collector.service\n"


@pytest.mark.parametrize(
    ("ours", "its", "user", "found"),
    [
        (b"0::/\n", b"0::/\n", 23, True),
        (b"0::/\n", b"0::/\n", 7, False),
        (b"0::/\n", b"0::/\n", None, False),
        # A job in another container whose user has the number of ours.
        (b"0::/\n", b"0::/../../kubepods-pod7.slice/x.scope\n", 23, False),
        (COLLECTOR, b"0::/probingd.slice/probingd-reader@5-7-11.service\n", 23, True),
        (COLLECTOR, b"0::/system.slice/rank0.service\n", 23, False),
        # Hierarchies of version 1, and files that cannot be read.
        (b"2:cpu:/a\n1:name=systemd:/b\n", b"2:cpu:/a\n1:name=systemd:/b\n", 23, True),
        (b"2:cpu:/a\n1:name=systemd:/b\n", b"2:cpu:/a\n1:name=systemd:/c\n", 23, False),
        (b"", b"", 23, False),
    ],
)
def test_own_processes(monkeypatch: pytest.MonkeyPatch, ours: bytes, its: bytes, user: int | None, found: bool) -> None:
    monkeypatch.setattr(liveness, "_read_cgroup", {"self": ours, "5": its}.__getitem__)
    monkeypatch.setattr(liveness, "real_user", {5: user}.get)
    assert (5 in OwnProcesses(frozenset({23}))) is found
