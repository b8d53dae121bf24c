"""A fault that stops the daemon is one line in the journal and in `systemctl status`, and no unit restarts forever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from host import Host

CONFIG = "/etc/probingd/probingd.toml"
STATE = "/var/lib/probingd"
# sysexits.h
UNAVAILABLE, CONFIGURATION = "69", "78"
# A stop of probingd.service alone returns while the other units stop.
STOP = "systemctl stop 'probingd*'"
Broken = Callable[[str, str], AbstractContextManager[None]]


@pytest.fixture
def broken(host: Host) -> Broken:
    """Runs one command before the block, and another one after it; the daemon is stopped before both."""

    @contextmanager
    def changed(before: str, after: str) -> Iterator[None]:
        host.guest.run(f"set -e; {STOP}; {before}")
        try:
            yield
        finally:
            host.guest.run(f"set -e; {STOP}; {after}; systemctl reset-failed")

    return changed


def check_failed(host: Host, unit: str, status: str, line: str) -> None:
    """`systemctl start` fails, and both units have ended for good with ``line``."""
    assert host.guest.result("systemctl start probingd")[0] == 1
    for name in ("probingd", unit):
        assert line in host.show(name, "StatusText")
        assert host.show(name, "ActiveState") == "failed"
        assert host.show(name, "ExecMainStatus") == status
    assert host.show(unit, "NRestarts") == "0"
    start = f"_SYSTEMD_INVOCATION_ID={host.show(unit, 'InvocationID')}"
    journal = host.guest.run(f"journalctl --no-pager -o cat -p err {start}")
    assert len([text for text in journal.splitlines() if line in text]) == 1, journal


def wait_for(host: Host, name: str, start: str) -> None:
    """Waits until a property of the collector begins with ``start``."""
    host.until(
        lambda: host.show("probingd-collector", name).startswith(start),
        what=lambda: f"{start!r}; {name} is {host.show('probingd-collector', name)!r}",
    )


def wait_for_line(host: Host, text: str) -> None:
    """Waits until the collector has written a line with ``text``."""
    host.until(lambda: text in _journal(host), what=lambda: f"{text!r} in\n{_journal(host)}")


def _journal(host: Host) -> str:
    return host.guest.run("journalctl --no-pager -o cat -b -u probingd-collector")


def test_a_wrong_configuration(host: Host, broken: Broken) -> None:
    with broken(f"cp {CONFIG} /root/kept; sed -i '1i lisen = 7' {CONFIG}", f"mv /root/kept {CONFIG}"):
        line = "error: unknown configuration key 'lisen'; hint: did you mean listen?"
        check_failed(host, "probingd-collector", CONFIGURATION, line)
        assert line in host.show("probingd-service", "StatusText")


@pytest.mark.long
def test_a_missing_library(host: Host, broken: Broken) -> None:
    folder = "/usr/lib/$(uname -m)-linux-gnu"
    away = f"mkdir /root/libbpf; mv {folder}/libbpf.so.1* /root/libbpf"
    with broken(away, f"mv /root/libbpf/* {folder}; rmdir /root/libbpf"):
        check_failed(host, "probingd-collector", UNAVAILABLE, "error: there is no usable libbpf")


@pytest.mark.long
def test_a_full_disk_at_the_start(host: Host, broken: Broken) -> None:
    """A restart may find space, so the unit is tried again, slowly."""
    mount = f"mount -t tmpfs -o nr_inodes=1 tmpfs {STATE}; chown probing:probing {STATE}"
    with broken(mount, f"umount {STATE}"):
        assert host.guest.result("systemctl start probingd")[0] == 1
        line = f"error: the state directory {STATE} is full"
        assert line in host.show("probingd", "StatusText")
        wait_for(host, "StatusText", line)
        host.guest.run(f"mount -o remount,nr_inodes=9999 {STATE}")
        wait_for(host, "ActiveState", "active")
        assert int(host.show("probingd-collector", "NRestarts")) < 23


@pytest.mark.long
def test_a_disk_that_becomes_full(host: Host, broken: Broken) -> None:
    with broken(f"mount -t tmpfs -o size=64m tmpfs {STATE}; chown probing:probing {STATE}", f"umount {STATE}"):
        host.start()
        wait_for(host, "StatusText", "collecting from ")
        host.guest.run(f"head -c 64M /dev/zero >{STATE}/filler", check=False)
        wait_for(host, "StatusText", "degraded: nothing is stored")
        # Without a job it takes a while until there are rows to store.
        wait_for_line(host, "the log takes no rows")
        host.guest.run(f"rm {STATE}/filler")
        wait_for(host, "StatusText", "collecting from ")
        wait_for_line(host, "the log takes rows again")
        journal = _journal(host)
        assert journal.count("the log takes no rows") == journal.count("the log takes rows again") == 1


@pytest.mark.long
def test_a_reload_refuses_a_wrong_configuration(host: Host, broken: Broken) -> None:
    with broken(f"cp {CONFIG} /root/kept", f"mv /root/kept {CONFIG}"):
        host.start()
        collector = host.show("probingd-collector", "MainPID")
        host.guest.run(f"sed -i '1i lisen = 7' {CONFIG}")
        assert host.guest.result("systemctl reload probingd")[0] == 1
        assert "unknown configuration key 'lisen'" in host.show("probingd", "StatusText")
        assert host.show("probingd-collector", "MainPID") == collector
        host.guest.run(f"sed -i '1s/.*/node_name = \"other\"/' {CONFIG}; systemctl reload probingd")
        assert host.show("probingd-collector", "MainPID") != collector
        assert host.rows("SELECT value FROM probing.config WHERE key = 'node_name'") == [{"value": "other"}]


@pytest.mark.long
def test_a_locked_kernel(host: Host, broken: Broken) -> None:
    """The last test, as only a reboot undoes it. A kernel that may not be read is refused, in one line."""
    with broken("echo integrity >/sys/kernel/security/lockdown", "true"):
        host.start()
        assert host.show("probingd-collector", "ActiveState") == "active"
    with broken("echo confidentiality >/sys/kernel/security/lockdown", "true"):
        check_failed(host, "probingd-collector", UNAVAILABLE, "error: the kernel is locked down (confidentiality)")
    host.guest.shut_down()
    host.guest.boot()
