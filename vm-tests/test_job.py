"""What a stock host's administrator sees of a job that ran before the daemon: at the start, kills and upgrades."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import JOB, RANKS, Host
from verifier_record import RECORD, grown

# Bits of linux/capability.h.
DAC_READ_SEARCH, SYS_PTRACE, SYS_ADMIN, SYSLOG, PERFMON, BPF = 1 << 2, 1 << 19, 1 << 21, 1 << 34, 1 << 38, 1 << 39
READER = SYS_PTRACE | DAC_READ_SEARCH
COLLECTOR = READER | SYSLOG | PERFMON | BPF
# The first kernel that has each feature.
SINCE = {"uprobe_multi": (6, 6), "attach_cookie": (5, 15), "perf_link": (5, 15), "preempt": (6, 15)}
KINDS = {"collector", "reader", "parser", "service", "sql"}
USERS = {"collector": "probing", "reader": "probing", "service": "probing-service"}


@pytest.fixture(scope="session")
def watched(host: Host) -> Iterator[Host]:
    """The host with a job, and with the daemon, which started after the job."""
    host.start_job()
    host.figures["start, s"] = round(host.start(), 1)
    yield host
    host.guest.run("systemctl stop probingd", check=False)
    host.stop_job()


def test_check_names_what_the_kernel_lacks(host: Host) -> None:
    found = host.check()
    for name, since in SINCE.items():
        assert (found[name]["state"] == "ok") == (host.guest.kernel.numbers >= since), found[name]
        if found[name]["state"] != "ok":
            assert found[name]["cost"]
            assert found[name]["remedy"]


def test_no_program_grew(host: Host, counted: Path) -> None:
    """Against docs/verifier.json; the counts stay in .build/vm-tests for `make verifier-record`."""
    found = host.guest.run("/opt/probingd/bin/python -I -m probing.daemon.bpf.verifier_statistics")
    counted.write_text(found)
    recorded = json.loads(RECORD.read_text())
    assert host.guest.kernel.series in recorded, "run `make verifier-record` on what this test has kept"
    assert list(grown(json.loads(found)["objects"], recorded[host.guest.kernel.series])) == []


def test_each_process_has_its_user_and_rights(watched: Host) -> None:
    old = watched.guest.kernel.numbers < SINCE["uprobe_multi"]
    wanted = {"collector": COLLECTOR | SYS_ADMIN * old, "reader": READER}

    def all_kinds() -> list[dict[str, str]] | None:
        # A reader that was too slow is replaced.
        found = watched.processes()
        return found if {process["kind"] for process in found} >= KINDS else None

    for process in watched.until(all_kinds, what=f"a process of each of {KINDS}"):
        kind = process["kind"]
        assert process["user"] == USERS.get(kind, "probing-worker"), process
        for name in ("permitted", "bounding"):
            assert int(process[name], 16) == wanted.get(kind, 0), process
    for unit in ("probingd", "probingd-collector", "probingd-service", "probingd-reader.socket"):
        assert f"active ({'exited' if unit == 'probingd' else ''}" in watched.guest.run(f"systemctl status {unit}")


@pytest.mark.smoke
def test_a_job_that_ran_before_is_known(watched: Host) -> None:
    watched.wait_for_rows()
    found = sorted((row["rank"], row["world_size"], row["role"]) for row in watched.ctl(f"ps --job {JOB}"))
    assert found == [(rank, len(RANKS), "trainer") for rank in RANKS]


def test_stacks_and_operations_of_a_job_are_shown(watched: Host) -> None:
    watched.wait_for_rows()
    functions = {
        (thread["rank"], frame["func"])
        for thread in watched.ctl(f"stacks --job {JOB}")
        for frame in thread["frames"]
        if thread["tid"] == thread["pid"]
    }
    assert {(rank, "main") for rank in RANKS} <= functions
    (communicator,) = (one for one in watched.ctl(f"nccl --job {JOB}") if one["ops"])
    assert (communicator["size"], communicator["backend"]) == (len(RANKS), "nccl")
    assert [op["op"] for op in communicator["ops"]] == ["all_reduce"]


@pytest.mark.smoke
def test_the_rank_that_stalls_is_named(watched: Host) -> None:
    watched.guest.run("touch /run/job/stall-1")
    begun = time.monotonic()

    # The daemon finds it by itself.
    found = f"SELECT culprits FROM diagnosis.findings WHERE job = '{JOB}' AND closed IS NULL"

    def culprits() -> list[list[int]]:
        return [[culprit["rank"] for culprit in json.loads(row["culprits"])] for row in watched.rows(found)]

    watched.until(lambda: [1] in culprits(), what=culprits)
    watched.figures["a stall named, s"] = round(time.monotonic() - begun, 1)
    watched.guest.run("rm /run/job/stall-1")
    watched.check_no_gap()


@pytest.mark.parametrize("unit", ["probingd-collector", pytest.param("probingd-service", marks=pytest.mark.long)])
def test_a_killed_process_comes_back(watched: Host, unit: str) -> None:
    watched.kill(unit)
    watched.check_no_gap()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["reader", "sql", "parser"])
def test_a_killed_helper_comes_back(watched: Host, kind: str) -> None:
    units = watched.guest.run(f"systemctl list-units --plain --no-legend 'probingd-{kind}@*' | cut -d' ' -f1").split()
    assert units
    for unit in units:
        watched.guest.run(f"systemctl kill -s KILL {unit}", check=False)
    if kind == "sql":
        # A guest may need most of the deadline of a request to start another.
        watched.until(lambda: watched.guest.result("probingctl query 'SELECT 1'")[0] == 0, what="a SQL worker")
    assert watched.ctl(f"stacks --job {JOB}")
    watched.check_no_gap()


@pytest.mark.long
def test_a_restart_keeps_collecting(watched: Host) -> None:
    watched.guest.run("systemctl restart probingd")
    watched.check_no_gap()


@pytest.mark.long
def test_an_upgrade_keeps_collecting(watched: Host) -> None:
    begun = time.monotonic()
    watched.guest.run("apt-get install -q -y /payload/new.deb")
    watched.figures["upgrade, s"] = round(time.monotonic() - begun, 1)
    watched.check_no_gap()


def test_memory_at_rest(watched: Host) -> None:
    """Checks nothing: measures figures for docs/benchmarks.md."""
    for unit in ("probingd.slice", "probingd-collector", "probingd-service"):
        watched.figures[f"memory of {unit}, MB"] = round(int(watched.show(unit, "MemoryCurrent")) / 1e6)
