"""What keeps the daemon from working is one line in the journal and in `systemctl status`, and nothing loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from host import Host
from waiting import until

CONFIG = "/etc/probingd/probingd.toml"
STATE = "/var/lib/probingd"
# sysexits.h
DATA, UNAVAILABLE, TEMPORARY, CONFIGURATION = "65", "69", "75", "78"
DEADLINE_S = 240.0


@pytest.fixture
def broken(host: Host) -> Callable[[str, str], AbstractContextManager[None]]:
    """Runs one command before the block, and another one after it; the daemon is stopped before both."""

    @contextmanager
    def changed(before: str, after: str) -> Iterator[None]:
        host.guest.run(f"systemctl stop probingd; {before}")
        try:
            yield
        finally:
            host.guest.run(f"systemctl stop probingd; systemctl stop probingd.target; {after}; systemctl reset-failed")

    return changed


def check_for_good(host: Host, unit: str, status: str, line: str) -> None:
    """`systemctl start` fails soon, and the unit has ended for good with ``status`` and ``line``."""
    begun = time.monotonic()
    assert host.guest.result("systemctl start probingd")[0] == 1
    assert time.monotonic() - begun < DEADLINE_S
    for name in ("probingd", unit):
        assert line in host.show(name, "StatusText")
        assert host.show(name, "ActiveState") == "failed"
        assert host.show(name, "ExecMainStatus") == status
    assert host.show(unit, "NRestarts") == "0"
    journal = host.guest.run(f"journalctl --no-pager -o cat -p err -b -u {unit} _PID=$(systemctl show --value -p ExecMainPID {unit})")
    assert [text for text in journal.splitlines() if text.startswith("error: ")] == journal.splitlines()
    assert line in journal


def test_a_wrong_configuration(host: Host, broken: Callable[[str, str], AbstractContextManager[None]]) -> None:
    with broken(f"cp {CONFIG} /root/kept; sed -i '1i lisen = 7' {CONFIG}", f"mv /root/kept {CONFIG}"):
        for unit in ("probingd-collector", "probingd-service"):
            check_for_good(host, unit, CONFIGURATION, "error: unknown configuration key 'lisen'; hint: did you mean listen?")


def test_a_missing_library(host: Host, broken: Callable[[str, str], AbstractContextManager[None]]) -> None:
    with broken("mkdir /root/kept; mv /usr/lib/*/libbpf.so.1* /root/kept", "mv /root/kept/* /usr/lib/$(uname -m)-linux-gnu"):
        check_for_good(host, "probingd-collector", UNAVAILABLE, "error: there is no usable libbpf")
