"""A stop ends all probes; a removal leaves the rows and the configuration, a purge leaves nothing."""

from __future__ import annotations

from host import Host

KEPT = {"/etc/probingd", "/etc/probingd/probingd.toml", "/var/lib/probingd"}


def test_a_stop_ends_everything(host: Host) -> None:
    host.start()
    assert host.processes()
    host.guest.run("systemctl stop probingd")
    assert not host.processes()
    # bpffs has directories of ours, without a pin in them.
    assert not host.guest.run("find /sys/fs/bpf/probingd -type f")


def test_a_removal_leaves_the_rows(host: Host) -> None:
    host.start()
    host.guest.run("apt-get remove -q -y probingd")
    left = host.files() - host.files_before
    assert {path for path in left if not path.startswith("/var/lib/probingd/")} == KEPT
    assert not host.processes()
    assert not host.guest.run("systemctl list-units --all --plain --no-legend 'probing*'")


def test_a_purge_leaves_nothing(host: Host) -> None:
    host.guest.run("apt-get purge -q -y probingd")
    assert host.files() - host.files_before == set()
