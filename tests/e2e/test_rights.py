"""Exactly the designed rights, nothing left behind, and programs that fall silent when their daemon is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import EXAMPLE, Daemon, end_process, start_ranks
from waiting import until

CAPABILITIES = {"bpf": 39, "perfmon": 38, "sys_ptrace": 19, "dac_read_search": 2, "syslog": 34}
NEEDED = {name: 1 << CAPABILITIES[name] for name in ("bpf", "perfmon", "sys_ptrace", "dac_read_search")}
OPTIONAL = 1 << CAPABILITIES["syslog"]


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {k: v.strip() for k, _, v in (line.partition(":") for line in lines)}


def rights(pid: int) -> tuple[int, int]:
    """(uid, effective capabilities) of a process."""
    status = status_of(pid)
    return int(status["Uid"].split()[1]), int(status["CapEff"], 16)


def bpf_objects() -> dict[str, set[int]]:
    return {
        kind: {entry["id"] for entry in json.loads(subprocess.check_output(["bpftool", "-j", kind, "list"]) or "[]")}
        for kind in ("prog", "map", "link")
    }


def pins(daemon: Daemon) -> list[Path]:
    root = Path("/sys/fs/bpf/probingd") / daemon.instance
    return [p for p in root.rglob("*") if p.is_file()] if root.exists() else []


@pytest.mark.usefixtures("daemon")
def test_each_process_has_its_rights_and_no_more(daemon: Daemon) -> None:
    daemon.rows("SELECT 1 AS one FROM comm.ops")  # so that an SQL worker runs
    until(lambda: daemon.children().get("probing.daemon.confined.reader"), what="readers")
    children = daemon.children()
    uid, caps = rights(children["probing.daemon.collector"][0])
    assert uid != 0
    assert caps & ~OPTIONAL == sum(NEEDED.values())
    for pid in children["probing.daemon.confined.reader"]:
        uid, caps = rights(pid)
        assert uid != 0
        assert caps == NEEDED["sys_ptrace"] | NEEDED["dac_read_search"]
    for module in ("probing.daemon.service", "probing.daemon.confined.sql_worker"):
        for pid in children[module]:
            uid, caps = rights(pid)
            assert uid != 0
            assert caps == 0
            assert status_of(pid)["NoNewPrivs"] == "1"
            assert status_of(pid)["CapBnd"] == "0000000000000000"
    service, worker = (
        rights(children[m][0])[0] for m in ("probing.daemon.service", "probing.daemon.confined.sql_worker")
    )
    assert len({service, worker, rights(children["probing.daemon.collector"][0])[0]}) == 3


@pytest.mark.usefixtures("daemon")
def test_the_key_of_the_node_is_for_its_service_alone(daemon: Daemon) -> None:
    kept = daemon.state / "node.key"
    handed = Path(f"{daemon.socket}.d") / "public" / "node.key"
    service = rights(daemon.children()["probing.daemon.service"][0])[0]
    assert kept.read_bytes() == handed.read_bytes()
    assert len(kept.read_bytes()) == 32
    assert [(path.stat().st_uid, path.stat().st_mode & 0o777) for path in (kept, handed)] == [
        (0, 0o600),
        (service, 0o600),
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[Any]]:
    """Two ranks that train until the last of these tests ends."""
    started = start_ranks(tmp_path_factory.mktemp("job") / "job.log", EXAMPLE, "--steps", "1000000", "--delay-ms", "20")
    yield started
    end_process(started)


def test_stop_leaves_nothing(make_daemon: Callable[..., Daemon], job: subprocess.Popen[Any]) -> None:
    before = bpf_objects()
    daemon = make_daemon().start()
    until(lambda: daemon.rows("SELECT 1 AS one FROM comm.ops LIMIT 1"), what="operations")
    assert pins(daemon)
    assert daemon.stop() == 0
    assert pins(daemon) == []
    # Links and programs are freed by the kernel a moment after their last reference.
    until(lambda: all(bpf_objects()[k] <= before[k] for k in before), what="the kernel to free what was attached")
    assert job.poll() is None
    assert not daemon.socket.exists()


@pytest.mark.usefixtures("job")
def test_restart_keeps_the_pins_and_every_operation(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    until(lambda: daemon.rows("SELECT 1 AS one FROM comm.ops LIMIT 1"), what="operations")
    kept = set(pins(daemon))
    daemon.stop(signal.SIGUSR1)
    assert set(pins(daemon)) == kept
    daemon.start()
    assert set(pins(daemon)) >= kept
    gaps = """
        SELECT max(gap) AS gap FROM (
          SELECT seq - lag(seq) OVER (PARTITION BY job, rank, comm ORDER BY seq) AS gap FROM comm.ops)"""
    first = daemon.rows("SELECT max(seq) AS seq FROM comm.ops")[0]["seq"]
    until(lambda: daemon.rows("SELECT max(seq) AS seq FROM comm.ops")[0]["seq"] > first, what="new operations")
    assert daemon.rows(gaps)[0]["gap"] == 1
    assert daemon.rows("SELECT count(*) - count(DISTINCT (pid, start_ns, comm, seq)) AS twice FROM comm.ops") == [
        {"twice": 0}
    ]


@pytest.mark.usefixtures("job")
def test_programs_of_a_dead_daemon_do_nothing(make_daemon: Callable[..., Daemon]) -> None:
    """The heartbeat is set back by 61 s instead of waiting for a minute: it is all that the programs look at."""
    daemon = make_daemon().start()
    until(lambda: daemon.rows("SELECT 1 AS one FROM comm.ops LIMIT 1"), what="operations")
    assert daemon.process is not None
    # The supervisor first, so that nobody starts another collector.
    for pid in (daemon.process.pid, *daemon.children()["probing.daemon.collector"]):
        os.kill(pid, signal.SIGKILL)
    (control,) = (p for p in pins(daemon) if p.name == "map_control")
    (loss,) = (p for p in pins(daemon) if p.name == "map_collectives_loss")

    def pushed() -> int:
        dump = json.loads(subprocess.check_output(["bpftool", "-j", "map", "dump", "pinned", str(loss)]))
        return sum(cpu["value"]["pushed"] for entry in dump for cpu in entry["formatted"]["values"])

    first = pushed()
    until(lambda: pushed() > first, what="programs that still work without a daemon")
    late = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 61_000_000_000
    shown = json.loads(subprocess.check_output(["bpftool", "-j", "map", "show", "pinned", str(control)]))
    value = [f"{byte:#04x}" for byte in late.to_bytes(8, "little") + bytes(shown["bytes_value"] - 8)]
    subprocess.check_call(["bpftool", "map", "update", "pinned", str(control), "key", *["0"] * 4, "value", *value])
    silent = pushed()
    runs = program_runs(daemon)
    until(lambda: program_runs(daemon) > runs + 23, what="programs that are run in vain")
    assert pushed() == silent


def program_runs(daemon: Daemon) -> int:
    """How often the job called what a probe is on: the kernel's own count, for as long as this switches it on."""
    (program,) = (p for p in pins(daemon) if p.name == "prog_gloo_execute")
    Path("/proc/sys/kernel/bpf_stats_enabled").write_text("1")
    return int(
        json.loads(subprocess.check_output(["bpftool", "-j", "prog", "show", "pinned", str(program)])).get("run_cnt", 0)
    )


def test_each_process_has_a_filter_of_system_calls(daemon: Daemon) -> None:
    """Readers and the service have one whatever starts them; their own answers are those of the unit test."""
    daemon.rows("SELECT 1 AS one FROM comm.ops")
    until(lambda: daemon.children().get("probing.daemon.confined.reader"), what="readers")
    found = {module: {status_of(pid)["Seccomp"] for pid in pids} for module, pids in daemon.children().items()}
    for module in ("collector", "service", "confined.reader", "confined.parser", "confined.sql_worker"):
        assert found[f"probing.daemon.{module}"] == {"2"}, module
