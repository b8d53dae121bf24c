"""A stop ends all probes; a removal leaves the rows and the configuration, a purge leaves nothing."""

from __future__ import annotations

import pytest
from host import Host

KEPT = ("/etc/probingd", "/var/lib/probingd")


def test_a_stop_ends_everything(host: Host) -> None:
    host.start()
    assert host.processes()
    host.guest.run("systemctl stop probingd")
    host.until(lambda: not host.processes(), what="the end of all processes", poll_s=0.5)
    # bpffs has directories of ours, without a pin in them.
    host.until(lambda: not host.guest.run("find /sys/fs/bpf/probingd -type f"), what="the end of all pins", poll_s=0.5)


@pytest.mark.smoke
def test_a_removal_leaves_the_rows(host: Host) -> None:
    host.start()
    host.guest.run("apt-get remove -q -y probingd")
    left = host.files() - host.files_before
    for kept in KEPT:
        assert any(path.startswith(f"{kept}/") for path in left), kept
    assert {path for path in left if not path.startswith(KEPT)} == set()
    assert not host.processes()
    assert not host.guest.run("systemctl list-units --all --plain --no-legend 'probing*'")


def test_a_purge_leaves_nothing(host: Host) -> None:
    host.guest.run("apt-get purge -q -y probingd")
    assert host.files() - host.files_before == set()
