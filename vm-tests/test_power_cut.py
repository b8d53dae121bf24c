"""The power is cut in mid-write: the next start has all rows up to the sync interval, each once.

A cut ends QEMU by SIGKILL: the disk has what the guest's kernel had written by then, whole or torn, and nothing else.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_root import root_image
from figures import Figures
from guest import Guest
from host import RANKS, Host
from kernels import kernel

# The configured interval between syncs, and what a guest of the usual speed may take to drain, write and sync, s.
SYNC_S, WRITE_S = 1.0, 2.0


@pytest.fixture
def cut(request: pytest.FixtureRequest, cache: Path, place: Path, payload: Path) -> Iterator[Host]:
    """A guest that is off; the daemon and a job start when it boots."""
    series = request.config.getoption("kernels").replace(",", " ").split()[-1]
    guest = Guest(place / "power", kernel(series, cache), root_image(cache), payload, durable=True)
    try:
        guest.boot()
        host = Host(guest, Figures(series))
        for rank in RANKS:
            guest.write(f"/etc/systemd/system/rank{rank}.service", host.job_unit(rank))
        guest.run("systemctl enable probingd rank0 rank1")
        guest.shut_down()
        yield host
    finally:
        guest.close()


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_rows_outlive_cuts_of_power(cut: Host, request: pytest.FixtureRequest) -> None:
    chance = random.Random(23)
    before: tuple[float, list[int]] | None = None
    for _ in range(request.config.getoption("cuts") + 1):
        # The guest's clock begins with the host's.
        begun = time.time()
        cut.guest.boot()
        # Waits for the start that the boot has begun.
        cut.start()
        # Systemd leaves units out of a boot that it cannot order.
        assert cut.guest.run("journalctl -b -q -o cat -t systemd --grep 'ordering cycle' || true") == ""
        cut.until(lambda begun=begun: len(_spans(cut, begun)) == len(RANKS), what="rows of this boot")
        if before is not None:
            _check(cut, *before, until_s=begun)
        calls = cut.calls()
        time.sleep(SYNC_S + WRITE_S * cut.guest.slowness + chance.uniform(0, SYNC_S))
        cut.guest.cut_power()
        before = begun, calls


def _spans(host: Host, since_s: float, until_s: float = 9e9) -> list[dict[str, int]]:
    return host.spans(f"epoch_ns(ts) BETWEEN {since_s * 1e9:.0f} AND {until_s * 1e9:.0f}")


def _check(host: Host, begun: float, calls: list[int], until_s: float) -> None:
    """The calls of a boot that began at ``begun`` and had returned from ``calls`` before the cut are a row each."""
    spans = _spans(host, begun, until_s)
    assert [span["rank"] for span in spans] == list(RANKS)
    for span, returned in zip(spans, calls, strict=True):
        assert span["n"] == span["different"] == span["hi"] - span["lo"] + 1, spans
        assert span["hi"] >= returned - 1, (spans, calls)
