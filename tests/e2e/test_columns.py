"""Each column of each table is filled by real sources, and each metric, alert and panel has figures.

One daemon with everything on watches jobs that do everything that needs no hardware: doubles stand for the libraries of
GPUs. What is left is in ``filled_columns`` with the test that fills it and the hardware that it needs.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from double_jobs import SIZE, Job, ready
from doubles.nvml_double import NvmlDouble, build_nvml, recorded
from e2e_support import ROOT, Daemon
from filled_columns import ELSEWHERE, METRICS_ELSEWHERE, NEVER
from infiniband import make_port
from long import long
from ports import free_port
from test_flight_dumps import job_of
from test_metrics_of_a_daemon import TOKEN, Samples, scraped
from waiting import asking, until

from probing.api.tables import TABLES
from probing.client.cluster import Cluster

ALERTS = (ROOT / "packaging" / "prometheus" / "probingd-alerts.yml").read_text()
DASHBOARD = json.loads((ROOT / "packaging" / "grafana" / "probingd.json").read_text())
STALL_S = 3
# It imports torch, so that it is taken for a trainer.
CRASH = """
import sys
import torch
print("CUDA error: made up", file=sys.stderr, flush=True)
sys.stdin.read()
raise ValueError("shard 17 is corrupt")
"""
Row = dict[str, Any]


class Scene:
    """A daemon and its jobs."""

    def __init__(self, make_daemon: Callable[..., Daemon], base: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.page: Samples = {}
        self.in_flight: set[str] = set()
        (base / "nvml").mkdir(mode=0o755)
        self.gpus = NvmlDouble(build_nvml(base / "nvml"), recorded(2))
        self.kernel_log = base / "kmsg"
        self.kernel_log.touch(mode=0o644)
        make_port(base / "sys" / "class" / "infiniband", "mlx5_0", 1)
        self.daemon = make_daemon(
            "n1",
            *("--http", self.address, "--token-file", str(_token(base)), f"--query.views_dir={_views(base)}"),
            *(f"--gpu.library={self.gpus.library}", f"--gpu.sysfs={base}/sys", "--gpu.interval_s=0.2"),
            *("--gpu.links_interval_s=1", "--logs.enabled=true", f"--host.kernel_log={self.kernel_log}"),
            *("--host.memory_interval_s=1", "--host.node_interval_s=1", "--net.interval_s=1", "--net.tcp_interval_s=1"),
            *(f"--net.sysfs={base}/sys", f"--diagnose.stall_s={STALL_S}", "--store.part_bytes=65536"),
        ).start()

    def filled(self) -> dict[str, set[str]]:
        """The columns of each table that are not NULL in some row."""
        statements = {
            name: f"SELECT {', '.join(f'count({c.name}) AS {c.name}' for c in table.columns)} FROM {name}"
            for name, table in TABLES.items()
        }
        with asking(), Cluster(self.daemon.target) as cluster:
            counts = {name: found.to_pylist()[0] for name, found in cluster.query_all(statements).items()}
        return {name: {column for column, count in row.items() if count} for name, row in counts.items()}

    def pids(self) -> set[int]:
        return {row["pid"] for row in self.daemon.json("ps")}


def _token(base: Path) -> Path:
    token = base / "token"
    token.write_text(TOKEN)
    token.chmod(0o640)
    os.chown(token, 0, pwd.getpwnam("probing-service").pw_gid)
    return token


def _views(base: Path) -> Path:
    folder = base / "views"
    folder.mkdir(mode=0o755)
    for name, text in (("good", "-- Ranks.\nSELECT rank FROM comm.ops\n"), ("bad", "SELECT nope FROM comm.ops\n")):
        path = folder / f"{name}.sql"
        path.write_text(text)
        path.chmod(0o644)
    return folder


@pytest.fixture
def scene(
    make_daemon: Callable[..., Daemon],
    base: Path,
    tmp_path: Path,
    start_job: Callable[..., Job],
    run_job: Callable[..., subprocess.Popen[Any]],
    torchrun: Callable[..., subprocess.Popen[Any]],
) -> Scene:
    # The training begins before the daemon.
    torchrun("--steps", "1000000", "--delay-ms", "20", "--workers", "1", "--report-every", "1")
    until(lambda: "step" in (tmp_path / "job.log").read_text(), what="a step")
    made = Scene(make_daemon, base)
    daemon = made.daemon
    # Gaps. A pause closes the operations that are open.
    daemon.ctl("pause")
    daemon.ctl("pause", "--resume")
    _use_nccl(start_job(), daemon)
    crash = run_job(
        sys.executable,
        "-c",
        CRASH,
        env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    dumping, _ = job_of(run_job, tmp_path / "dumps", "wait")
    until(lambda: {crash.pid, dumping.pid} <= made.pids(), what="the jobs")
    made.gpus.set({"gpu1.compute.count": 1, "gpu1.compute.0": f"{crash.pid},1009000000"})
    made.gpus.event(1, 8, 79)
    xid = "NVRM: Xid (PCI:0000:18:00): 79, pid={}, name=python, GPU has fallen off the bus."
    made.kernel_log.write_text(f"3,901,{time.monotonic_ns() // 1000},-;{xid.format(crash.pid)}\n")
    # Settings of a job, variables, an exit with a status.
    steps = "SELECT job FROM train.steps WHERE wait_ns IS NOT NULL LIMIT 1"
    (row,) = until(lambda: daemon.rows(steps), what=lambda: f"steps: {daemon.tail()}")
    daemon.ctl("vars", "--job", row["job"], "step", "loss", "--watch")
    daemon.ctl("config", "logs.enabled=false", "--job", row["job"])
    assert crash.stdin is not None
    crash.stdin.close()
    until(lambda: daemon.rows("SELECT 1 AS x FROM python.training_metrics WHERE loss IS NOT NULL LIMIT 1"), what="loss")
    with pytest.raises(HTTPError):
        urlopen(f"http://{made.address}/metrics", timeout=60)
    made.page = until(lambda: _page_of_all(made.address), what="a page with steps and segments")
    # One rank of the training stands still: a finding, with the time-out that will end it.
    ranks = daemon.rows(f"SELECT pid FROM process.processes WHERE job = '{row['job']}' AND rank = 1")
    os.kill(ranks[0]["pid"], signal.SIGSTOP)
    found = "SELECT 1 AS x FROM diagnosis.findings WHERE ends IS NOT NULL LIMIT 1"
    until(lambda: daemon.rows(found), what=lambda: f"the finding: {daemon.tail()}")
    # What its peers have in flight is only seen while they wait.
    made.in_flight = made.filled()["comm.inflight"]
    os.kill(ranks[0]["pid"], signal.SIGCONT)
    return made


def _page_of_all(address: str) -> Samples | None:
    page = scraped(address)
    names = {name for name, _ in page}
    return page if {"probingd_rank_lag_seconds", "probingd_table_bytes"} <= names else None


def _use_nccl(job: Job, daemon: Daemon) -> None:
    """Calls of all kinds; one of them fails, and one stays open."""
    ready(daemon, job)
    for command in (
        *("do 5 all_reduce 1000 7 4", "do 3 broadcast 100 6 0 2", "group 4 all_reduce 23 8 1", "ring 3 10"),
        *("sync stream", "sync event", "sync device", "drain", "fail 2", "do 1 all_reduce 9 7"),
    ):
        job.ranks.do(command)
    job.ranks.do("duration 1000000000000")
    for command in ("do 1 all_reduce 7 7 4", "do 1 broadcast 100 6 0 2", "ring 1 10"):
        job.ranks.do(command, range(SIZE - 1))
    # The last rank ends while the others wait for it.
    job.ranks.do("cuda 700", [SIZE - 1])
    job.ranks.do("sync device", [SIZE - 1])
    job.ranks.ranks[SIZE - 1].kill()


@long
def test_each_column_is_filled_and_each_metric_shown(scene: Scene) -> None:
    def missing() -> dict[str, list[str]]:
        have = scene.filled()
        have["comm.inflight"] |= scene.in_flight
        left = {
            name: sorted({c.name for c in table.columns} - have[name] - _excused(name))
            for name, table in TABLES.items()
        }
        return {name: columns for name, columns in left.items() if columns}

    until(lambda: not missing(), 45, what=lambda: f"values, or lines in tests/filled_columns.py: {missing()}")
    # THEN every metric that the page of the documentation lists has figures
    documented = set(re.findall(r"^\| `(probingd_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    shown = _families(scene.page)
    assert documented - shown - METRICS_ELSEWHERE.keys() == set()
    # AND so has every alert and every panel
    assert _names(ALERTS) - shown - METRICS_ELSEWHERE.keys() == set()
    panels = [target["expr"] for panel in _panels(DASHBOARD) for target in panel.get("targets", ())]
    assert panels
    assert set().union(*map(_names, panels)) - shown - METRICS_ELSEWHERE.keys() == set()


def _excused(table: str) -> set[str]:
    every = {column.name for column in TABLES[table].columns}
    elsewhere = [set(entry.columns) or every for entry in ELSEWHERE.get(table, ())]
    return set(NEVER.get(table, ())).union(*elsewhere)


def _families(page: Mapping[tuple[str, Any], float]) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in page} | {name for name, _ in page}


def _names(text: str) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"probingd_[a-z_]+", text)}


def _panels(board: Row) -> list[Row]:
    own = list(board.get("panels", ()))
    return own + [inner for panel in own for inner in _panels(panel)]
