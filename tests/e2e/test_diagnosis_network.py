"""Diagnosis with the network: a rank whose path loses packets, and a port of an RDMA device that counts errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from diagnosis_corpus import watching
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import Daemon
from infiniband import make_port, write
from long import long
from network_namespaces import Pair, may_make_namespaces, namespaces
from waiting import until

ERRORS = "ports/1/counters/symbol_error"


@contextmanager
def job(daemon: Daemon, pair: Pair) -> Iterator[Ranks]:
    """Rank 0 is in namespace ``near``, rank 1 in ``far``."""
    with folder_of_job() as folder:
        ranks = Ranks(daemon.name, folder, "slow.py", "bigger_batch", 2)
        ranks.job = f"10.77.0.1:{ranks.port}"
        where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(ranks.port), "GLOO_SOCKET_IFNAME": "eth0"}
        try:
            for rank, namespace in enumerate((pair.near, pair.far)):
                own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
                ranks.run(["ip", "netns", "exec", namespace, *ranks.command], {**where, **own})
            yield ranks
        finally:
            ranks.kill()
            ranks.wait()


def found(daemon: Daemon, verdict: str) -> dict[str, Any] | None:
    """Returns the newest row of the findings with this verdict."""
    sql = f"SELECT ranks, sentence FROM diagnosis.findings WHERE verdict = '{verdict}' ORDER BY ts DESC LIMIT 1"
    return next(iter(daemon.rows(sql)), None)


@long
@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")
def test_the_rank_whose_path_loses_packets_is_named(make_daemon: Callable[..., Daemon]) -> None:
    with namespaces() as pair:
        daemon = watching(make_daemon("n1", "--net.tcp_interval_s=0.5"))
        # The node is that of rank 1: the peers of connections in other namespaces are not read without CAP_SYS_ADMIN.
        daemon.before = ("nsenter", f"--net=/run/netns/{pair.far}")
        daemon.start()
        with job(daemon, pair) as ranks:
            until(lambda: daemon.rows("SELECT 1 FROM train.steps LIMIT 1"), what=ranks.output)
            assert found(daemon, "packet_loss") is None
            pair.drop_some(pair.near, 0.05)
            loss = until(lambda: found(daemon, "packet_loss"), 90, what=lambda: known(daemon, ranks))
            assert loss["ranks"] == "1"
            assert loss["sentence"].startswith("node n1: the path to 10.77.0.1 of rank 1 loses packets: ")
            shown = daemon.ctl("diagnose", "--job", ranks.job, check=None)
            assert shown.returncode == 3
            assert "of rank 1 loses packets" in " ".join(shown.stdout.split())


def known(daemon: Daemon, ranks: Ranks) -> str:
    words = (("net",), ("diagnose", "--job", ranks.job), ("health",))
    return "\n".join([daemon.tail(), ranks.output(), *(daemon.ctl(*one, check=None).stdout for one in words)])


def test_a_port_that_counts_errors_is_named(base: Path, make_daemon: Callable[..., Daemon]) -> None:
    devices = base / "sys" / "class" / "infiniband"
    for device in ("mlx5_0", "mlx5_1"):
        make_port(devices, device, 1)
    daemon = watching(make_daemon("n1", f"--net.sysfs={base}/sys", "--net.interval_s=0.2")).start()
    until(lambda: len(daemon.rows("SELECT DISTINCT hca FROM rdma.ports")) == 2, what=daemon.tail)

    def health() -> list[dict[str, Any]]:
        [node] = json.loads(daemon.ctl("-f", "json", "health", check=None).stdout)
        return [one for one in node["findings"] if one["verdict"] == "network_fault"]

    assert health() == []
    with rising(devices / "mlx5_1" / ERRORS):
        [fault] = until(health, what=daemon.tail)
        assert "port 1 of mlx5_1 counts errors: " in fault["sentence"]
        assert "symbol errors" in fault["sentence"]


@contextmanager
def rising(counter: Path) -> Iterator[None]:
    """Counts 7 errors more, ten times a second."""
    ended = threading.Event()

    def count() -> None:
        errors = 0
        while not ended.wait(0.1):
            errors += 7
            write(counter, f"{errors}\n")

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
