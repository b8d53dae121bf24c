"""Hardware: which parts of a node are at fault, which ranks use them, and what that explains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import ago, elsewhere, facts, history, in_collective, node, op, rank
from test_slow_ranks import data_parallel

from probing.diagnosis.facts import Facts, Rank
from probing.diagnosis.facts_file import from_json, to_json
from probing.diagnosis.hardware_facts import (
    Disk,
    FileSystem,
    Gpu,
    Hardware,
    HardwareEvent,
    NetworkPath,
    NetworkPort,
)
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, NOTE, WARNING, Finding
from probing.diagnosis.xids import xid

H100 = Gpu(
    0, (0,), "NVIDIA H100", busy=0.9, clock_mhz=1900, max_clock_mhz=1980, lanes=16, max_lanes=16, total_bytes=80 << 30
)


def advancing(ranks: int = 2) -> list[Rank]:
    return [rank(n, *history(40, ago=0.5, every=0.1)) for n in range(ranks)]


def job(hardware: Hardware, *ranks: Rank) -> Facts:
    return facts(*(ranks or advancing()), nodes=[replace(node("a"), hardware=hardware)])


def found(hardware: Hardware, *ranks: Rank) -> list[Finding]:
    return list(diagnose(job(hardware, *ranks)).findings)


def xid_of(code: int, *, gpu: int | None = 0, since: float = 30, source: str = "gpu") -> HardwareEvent:
    return HardwareEvent(source, "xid", ago(since), ago(since), 1, f"Xid {code}", gpu, "0000:17:00.0", code)


def test_a_healthy_node_has_no_symptom() -> None:
    hardware = Hardware(
        gpus=(H100, replace(H100, device=1, ranks=(1,), power_capped=0.6, thermal=0.0)),
        events=(HardwareEvent("gpu", "pstate", ago(9), ago(9)), HardwareEvent("kernel", "link_up", ago(9), ago(9))),
        ports=(NetworkPort("mlx5_0", 1, (0, 1), state="ACTIVE", risen=(("port_xmit_wait", 900),), seconds=120),),
        paths=(NetworkPath(0, "10.0.0.2", 100_000, 12), NetworkPath(1, "10.0.0.2", 90_000, 3)),
        disks=(Disk("nvme0n1", 0.9, 200_000.0, 300_000.0, 4), Disk("sda", 0.1, 90_000_000.0, None, 0)),
        file_systems=(
            FileSystem("/", "ext4", None, 0.97, 40 << 30, True, False),
            FileSystem("/dev/shm", "tmpfs", used=0.4, available_bytes=1 << 20),
        ),
    )
    assert found(hardware) == []


def test_a_gpu_that_fails_is_an_error_of_the_ranks_that_use_it() -> None:
    lost = replace(H100, device=1, ranks=(1,), state="lost", reason="GPU is lost")
    (finding,) = found(Hardware(gpus=(H100, lost), events=(xid_of(79, gpu=1),)))
    assert (finding.verdict.id, finding.severity, [c.rank for c in finding.culprits]) == ("gpu_fault", ERROR, [1])
    assert finding.sentence == "node a: GPU 1 is lost: GPU is lost, which rank 1 uses"
    assert finding.culprits[0].why == "its GPU 1 is lost: GPU is lost"
    assert "GPU 1 reported XID 79, the GPU has fallen off the bus" in finding.evidence
    # No rank of this job uses it.
    (other,) = found(Hardware(gpus=(H100, replace(lost, ranks=()))))
    assert (other.severity, other.culprits) == (WARNING, ())


@pytest.mark.parametrize("code", [13, 48, 61, 63, 64, 74, 79, 94, 95, 119, 120, 140])
def test_classes_of_xids(code: int) -> None:
    fails = code not in (13, 61, 63, 94)
    assert xid(code).fails is fails
    (finding,) = found(Hardware(gpus=(H100,), events=(xid_of(code),)))
    assert (finding.severity, finding.confidence) == ((ERROR, 0.95) if fails else (WARNING, 0.8))
    assert f"XID {code}, " in finding.sentence


def test_an_error_of_an_earlier_program_is_not_of_this_job() -> None:
    ranks = [replace(one, started_ns=ago(20)) for one in advancing()]
    assert found(Hardware(gpus=(H100,), events=(xid_of(31, since=30),)), *ranks) == []
    assert len(found(Hardware(gpus=(H100,), events=(xid_of(31, since=10),)), *ranks)) == 1
    assert len(found(Hardware(gpus=(H100,), events=(xid_of(48, since=30),)), *ranks)) == 1


def test_worn_memory_and_a_narrow_link_are_named() -> None:
    worn = replace(H100, remap_failed=True, remap_pending=True, retired_pages=63, recovery="reset", lanes=8)
    (finding,) = found(Hardware(gpus=(worn,)))
    assert finding.sentence == "node a: GPU 0 has a row of memory that could not be remapped, which rank 0 uses"
    assert set(finding.evidence) == {
        "GPU 0 has retired 63 pages of memory",
        "GPU 0 wants recovery: reset",
        "GPU 0 has 8 of 16 lanes of PCIe",
        "GPU 0 waits for a reset to remap a row of memory",
    }


def test_a_clock_that_the_power_limit_lowers_is_compared_with_the_other_gpus() -> None:
    gpus = [replace(H100, device=n, ranks=(n,), power_capped=0.7, clock_mhz=1500.0) for n in range(4)]
    assert found(Hardware(gpus=tuple(gpus))) == []
    gpus[2] = replace(gpus[2], clock_mhz=1200.0)
    (finding,) = found(Hardware(gpus=tuple(gpus)), *advancing(4))
    assert finding.sentence == (
        "node a: GPU 2 is held down at 1200 of 1980 MHz by its power limit 70% of the time, which rank 2 uses"
    )


def test_a_throttled_gpu_is_why_its_rank_is_slow() -> None:
    slow = data_parallel(4, {2: 1.6})
    ranks = [rank(n, *slow.operations(n)) for n in range(4)]
    gpus = [replace(H100, device=n, ranks=(n,)) for n in range(4)]
    gpus[2] = replace(gpus[2], thermal=0.92, clock_mhz=1095.0, temperature_c=91.0)
    findings = {one.verdict.id: one for one in found(Hardware(gpus=tuple(gpus)), *ranks)}
    (culprit,) = findings["slow_rank"].culprits
    assert (culprit.rank, culprit.activity) == (2, "bad_hardware")
    assert culprit.why == "its GPU 2 is held down at 1095 of 1980 MHz by heat 92% of the time"
    assert "it is at 91 degrees" in findings["slow_rank"].evidence
    assert [c.rank for c in findings["gpu_throttled"].culprits] == [2]
    # What all have explains no difference.
    hot = tuple(replace(gpu, thermal=0.92, clock_mhz=1095.0) for gpu in gpus)
    shared = {one.verdict.id: one for one in found(Hardware(gpus=hot), *ranks)}
    assert shared["slow_rank"].culprits[0].activity == "unknown"


def test_a_port_with_errors_is_named_with_its_ranks() -> None:
    port = NetworkPort("mlx5_3", 1, (1,), state="ACTIVE", risen=(("symbol_error", 23), ("link_downed", 2)), seconds=120)
    (finding,) = found(Hardware(ports=(port,)))
    assert finding.sentence == (
        "node a: port 1 of mlx5_3 counts errors: 23 symbol errors, 2 link downs, which rank 1 uses"
    )
    assert finding.evidence == ("23 symbol errors in 120 s", "2 link downs in 120 s")
    (down,) = found(Hardware(ports=(replace(port, risen=(), state="DOWN", physical_state="Polling"),)))
    assert (down.severity, down.sentence) == (ERROR, "node a: port 1 of mlx5_3 is DOWN (Polling), which rank 1 uses")
    # A port that nobody uses may be down.
    assert found(Hardware(ports=(replace(port, risen=(), state="DOWN", ranks=()),))) == []


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1"])
def test_loopback_loses_no_packets(peer: str) -> None:
    assert found(Hardware(paths=(NetworkPath(0, peer, 885, 9), NetworkPath(1, peer, 885, 9, timeouts=7)))) == []


def test_a_path_that_loses_packets_is_named() -> None:
    paths = (NetworkPath(0, "10.0.0.2", 50_000, 20), NetworkPath(1, "10.0.0.2", 20_000, 1_400))
    (finding,) = found(Hardware(paths=paths))
    assert finding.sentence == (
        "node a: the path to 10.0.0.2 of rank 1 loses packets: 7% of 20000 segments were sent again"
    )
    assert finding.evidence == ("the other ranks of the node 0%",)
    silent = NetworkPath(1, "10.0.0.2", 40, 4, timeouts=4)
    (finding,) = found(Hardware(paths=(paths[0], silent)))
    assert "gives no answer: 4 retransmissions in a row" in finding.sentence


def test_a_full_shared_memory_is_named() -> None:
    full = FileSystem("/dev/shm", "tmpfs", 1, 1.0, 0, True, False)
    (finding,) = found(Hardware(file_systems=(full,)))
    assert (finding.severity, [c.rank for c in finding.culprits]) == (ERROR, [1])
    assert finding.sentence == "node a: /dev/shm is full: 100%, 0 B are left, which rank 1 uses"
    assert finding.next_steps[0] == "Give the container more shared memory, as by --shm-size."


def test_slow_disks_and_servers_without_an_answer() -> None:
    disk, server = Disk("sdb", 0.99, None, 180e6, 31), FileSystem("/mnt/ckpt", "nfs4", answers=False)
    findings = {one.about: one for one in found(Hardware(disks=(disk,), file_systems=(server,)))}
    assert findings["a/disk sdb"].sentence == (
        "node a: disk sdb is slow: a request takes 180 ms, and it is busy 99% of the time"
    )
    assert findings["a//mnt/ckpt"].sentence == "node a: /mnt/ckpt does not answer"


def test_what_the_kernel_reports_is_a_warning() -> None:
    events = (
        HardwareEvent("kernel", "memory_error", ago(300), ago(3), 7, "EDAC MC0: 1 CE", part="MC0"),
        HardwareEvent("kernel", "disk_error", ago(9), ago(9), 1, "I/O error, dev sda, sector 8", part="sda"),
        HardwareEvent("kernel", "segfault", ago(9), ago(9)),
    )
    findings = found(Hardware(events=events))
    assert {one.severity for one in findings} == {WARNING}
    assert {one.sentence for one in findings} == {
        "node a: the memory controller reports errors (MC0)",
        "node a: sda failed to read or write (once in the kernel's log in the last hour)",
    }


def test_gpus_of_two_models_are_a_note() -> None:
    other = replace(H100, device=1, ranks=(1,), name="NVIDIA A100", total_bytes=40 << 30)
    (finding,) = found(Hardware(gpus=(H100, other)))
    assert (finding.verdict.id, finding.severity) == ("mixed_devices", NOTE)
    assert finding.sentence == (
        "the GPUs of the job differ: NVIDIA H100 with 80 GiB on rank 0, NVIDIA A100 with 40 GiB on rank 1"
    )


def test_a_hang_has_the_symptoms_of_its_culprit_as_evidence() -> None:
    gpus = (H100, replace(H100, device=1, ranks=(1,)))
    ranks = (
        rank(0, *history(6, ago=40), op(7, ago=39), stack=in_collective()),
        rank(1, *history(6, ago=40), stack=elsewhere()),
    )
    hang = next(f for f in found(Hardware(gpus=gpus, events=(xid_of(79, gpu=1),)), *ranks) if f.verdict.group == "hang")
    assert [c.rank for c in hang.culprits] == [1]
    assert "node a: GPU 1 reported XID 79, the GPU has fallen off the bus" in hang.evidence


def test_texts_of_a_target_are_clean_and_facts_survive_a_file() -> None:
    evil = FileSystem("/mnt/\x1b[2Jx", "nfs\n4", answers=False)
    hardware = Hardware(
        gpus=(replace(H100, state="lost", reason="\x1b]0;x\x07"),),
        file_systems=(evil,),
        events=(xid_of(79), xid_of(48, gpu=None, source="kernel")),
    )
    whole = job(hardware)
    assert from_json(to_json(whole)) == whole
    text = "".join(f.sentence + "".join((*f.evidence, *f.next_steps)) for f in diagnose(whole).findings)
    assert text.isprintable()
