"""The kernel log: records, what lines mean, and the rows of process.kmsg."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fakes import Sink

from probing.daemon.clock import FakeClock
from probing.daemon.host.kernel_log.records import KINDS, KernelLog, Meaning, meaning_of, parse_records
from probing.daemon.host.kernel_log.source import BURST, Allowance, KernelLogSource
from probing.daemon.source import Identity
from probing.daemon.source_state import Totals

SECOND = 1_000_000_000
BUS = "0000:3b:00"
LINES = {
    f"NVRM: Xid (PCI:{BUS}): 79, pid=4711, name=python, GPU has fallen off the bus.": Meaning(
        "xid", 4711, "python", BUS, 79
    ),
    f"NVRM: Xid (PCI:{BUS}): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception": Meaning(
        "xid", None, "<unknown>", BUS, 13
    ),
    f"NVRM: Xid (PCI:{BUS}): 31, Ch 00000010, intr 10000000. MMU Fault": Meaning("xid", None, None, BUS, 31),
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up": Meaning(
        "sxid", None, None, "0000:c1:00.0", 20034
    ),
    f"NVRM: GPU {BUS}.0: GPU has fallen off the bus.": Meaning("gpu", None, None, f"{BUS}.0"),
    f"NVRM: GPU {BUS}.0: RmInitAdapter failed! (0x62:0x40:2477)": Meaning("gpu"),
    "Out of memory: Killed process 4711 (python) total-vm:94160kB, anon-rss:82176kB": Meaning(
        "oom_kill", 4711, "python"
    ),
    "Memory cgroup out of memory: Killed process 4711 (python) total-vm:94160kB": Meaning("oom_kill", 4711, "python"),
    "Memory cgroup out of memory: Kill process 4711 (python) score 977 or sacrifice child": Meaning(
        "oom_kill", 4711, "python"
    ),
    "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/a,task_memcg=/a,task=python,pid=4711,uid=60001": Meaning(
        "oom", 4711, "python"
    ),
    "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0": Meaning("oom", None, "python"),
    "oom_reaper: reaped process 4711 (python), now anon-rss:0kB": Meaning("oom", 4711, "python"),
    "EDAC MC0: 3 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0": Meaning("memory_error", code=3),
    "EDAC skx MC2: 1 UE memory read error on DIMM": Meaning("memory_error", code=1),
    "mce: [Hardware Error]: Machine check events logged": Meaning("machine_check"),
    "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 0": Meaning("machine_check"),
    "pcieport 0000:3a:00.0: AER: Corrected error received: 0000:3b:00.0": Meaning("pcie_error", device="0000:3a:00.0"),
    "mlx5_core 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)": Meaning(
        "pcie_error", device="0000:3b:00.0"
    ),
    "pcieport 0000:3a:00.0: pciehp: Slot(5): Link Down": Meaning("pcie_error", device="0000:3a:00.0"),
    "mlx5_core 0000:3b:00.0 eth0: Link down": Meaning("link_down", device="eth0"),
    "mlx5_core 0000:3b:00.0 ib0: Link up": Meaning("link_up", device="ib0"),
    "ixgbe 0000:3b:00.0 ens1f0: NIC Link is Up 10 Gbps, Flow Control: RX/TX": Meaning("link_up", device="ens1f0"),
    "e1000e: eno1 NIC Link is Down": Meaning("other"),
    "bond0: (slave eth2): link status definitely down, disabling slave": Meaning("link_down", device="eth2"),
    "infiniband mlx5_0: Port: 1 Link DOWN": Meaning("link_down", device="mlx5_0", code=1),
    "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out": Meaning("nic_error", device="eth0"),
    "mlx5_core 0000:3b:00.0: poll_health:800: device's health compromised - reached miss count": Meaning(
        "nic_error", device="0000:3b:00.0"
    ),
    "blk_update_request: I/O error, dev sda, sector 17 op 0x0:(READ)": Meaning("disk_error", device="sda"),
    "I/O error, dev nvme0n1, sector 17 op 0x1:(WRITE)": Meaning("disk_error", device="nvme0n1"),
    "critical medium error, dev sdb, sector 23": Meaning("disk_error", device="sdb"),
    "nvme nvme0: I/O 5 QID 3 timeout, aborting": Meaning("disk_error", device="nvme0"),
    "EXT4-fs error (device sda1): ext4_lookup:1785: inode #2": Meaning("fs_error", device="sda1"),
    "XFS (nvme0n1p1): Corruption of in-memory data detected.  Shutting down filesystem": Meaning(
        "fs_error", device="nvme0n1p1"
    ),
    "nfs: server 10.0.0.1 not responding, still trying": Meaning("file_server", device="10.0.0.1"),
    "INFO: task python:4711 blocked for more than 122 seconds.": Meaning("hung_task", 4711, "python"),
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4711]": Meaning("lockup", 4711, "python", code=3),
    "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:": Meaning("lockup"),
    "CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)": Meaning("thermal"),
    "python[4711]: segfault at 0 ip 00007f0 sp 00007ff error 4 in libc.so.6": Meaning("segfault", 4711, "python"),
    "traps: python[4711] general protection fault ip:7f sp:7f error:0 in libc": Meaning("segfault", 4711, "python"),
    "python: page allocation failure: order:4, mode:0x40dc0": Meaning("page_allocation", None, "python", code=4),
    "BUG: unable to handle page fault for address: 0000": Meaning("kernel_bug"),
    "Kernel panic - not syncing: Fatal exception": Meaning("kernel_bug"),
    "NET: Registered PF_VSOCK protocol family": Meaning("other"),
    "[  14736]     0 14736     5448     4394     2649     1745  0    86016 0 0 python": Meaning("other"),
}


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_means(line: str) -> None:
    assert meaning_of(line) == LINES[line]
    assert LINES[line].kind in KINDS


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 4711 (a) b (1)) total-vm:94160kB",
        "x[1]: segfault [4711]: segfault at 0 ip 0",
        "INFO: task x:1 blocked:4711 blocked for more than 122 seconds.",
        "oom-kill:task=x,task=y,pid=1,uid=,pid=4711,uid=0",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [x:1]:4711]",
    ],
)
def test_a_hostile_name_accuses_no_other_process(line: str) -> None:
    assert meaning_of(line).pid == 4711


@pytest.mark.parametrize(
    "line",
    [
        # The names of processes, of 15 bytes at most, in a line that memfd_create(2) writes for everybody.
        "EDAC MC0: 1 CE [4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
        "eth0: Link Down[4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
        "ata1: SError[4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
        "XFS (md): error[4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
        "Kernel panic[4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
        r"eth0: Link Up \xff[4711]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
        "eth0: Link Down (4711): /proc/4711/oom_adj is deprecated, please use /proc/4711/oom_score_adj instead.",
        "process '/tmp/[Hardware Error]' started with executable stack",
    ],
)
def test_the_name_of_a_process_is_no_fault_of_the_hardware(line: str) -> None:
    assert meaning_of(line) == Meaning("other")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        # A memory fault names the file in which it was.
        ("python[4711]: segfault at 0 ip 0 sp 0 error 4 in [Hardware Error][7f0+1000]", "segfault"),
        ("traps: python[4711] general protection fault ip:7f sp:7f error:0 in [Hardware Error][7f0+1000]", "segfault"),
        ("XFS (md): error invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0", "oom"),
        ("eth0: Link Down: page allocation failure: order:4, mode:0x40dc0", "page_allocation"),
    ],
)
def test_a_fault_of_a_process_is_no_fault_of_the_hardware(line: str, kind: str) -> None:
    assert meaning_of(line).kind == kind


def test_long_lines_of_any_text_take_no_time() -> None:
    for part in ("NVRM: ", "a[1", "link ", "mlx5_core 0000:3b:00.0: ", "(((", "task ", "[Hardware", "x" * 3):
        meaning_of(part * (2_048 // len(part)))


def test_records_and_their_properties() -> None:
    data = b"6,339,5140900,-;NET: Registered\\x0a\x1b[31m\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00:1c.0\n"
    data += b"30,340,9,c,caller=T1;udevd\n"
    first, second = parse_records(data)
    assert (first.seq, first.boot_us, first.facility, first.level) == (339, 5_140_900, "kern", "info")
    assert first.text == "NET: Registered\\x0a\\x1b[31m"
    assert (second.facility, second.level, second.text) == ("daemon", "info", "udevd")


@pytest.mark.parametrize(
    "data", [b"", b"\n", b";", b"x,1,2,-;y", b"6,1,2;y", b"99999,1,2,-;y", b" 6,1,2,-;y", b"\xff" * 99]
)
def test_what_is_no_record_is_left_out(data: bytes) -> None:
    assert list(parse_records(data)) == []


def test_an_allowance_is_a_burst_and_then_a_rate() -> None:
    allowance = Allowance(3, 1.0)
    assert [allowance.take("a", 0) for _ in range(5)] == [0, 0, 0, None, None]
    assert allowance.take("b", 0) == 0
    assert allowance.take("a", SECOND) == 2
    assert allowance.take("a", SECOND) is None
    assert allowance.take("a", 0) is None


class Log:
    """A source over a pipe in which the test writes records."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        os.mkfifo(path)
        self.rows, self.clock = Sink(), clock
        self.source = KernelLogSource(str(path), self.rows, clock, "n1")
        # A pipe needs a reader before a writer can open it without waiting.
        self.keeps = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    def write(self, seq: int, text: str, us: int | None = None, priority: int = 4) -> None:
        at = self.clock.mono_ns // 1000 if us is None else us
        os.write(self.end, f"{priority},{seq},{at},-;{text}\n".encode())

    def tick(self) -> list[dict[str, Any]]:
        self.source.tick()
        return self.rows.take("process.kmsg")

    def close(self) -> None:
        self.source.stop()
        os.close(self.end)
        os.close(self.keeps)


@pytest.fixture
def log(tmp_path: Path) -> Any:
    made = Log(tmp_path / "kmsg", FakeClock(mono_ns=100 * SECOND, real_ns=1_000 * SECOND))
    yield made
    made.close()


XID = f"NVRM: Xid (PCI:{BUS}): 79, pid=4711, name=python, GPU has fallen off the bus."


def test_a_row_names_the_rank_whose_process_the_line_names(log: Log) -> None:
    assert log.tick() == []
    log.source.process_identified(Identity(4711, 7 * SECOND, "j", "r", "trainer", 3))
    log.clock.advance(SECOND)
    log.write(5, XID)
    (row,) = log.tick()
    assert (row["kind"], row["code"], row["device"], row["pid"], row["process"]) == ("xid", 79, BUS, 4711, "python")
    assert (row["job"], row["rank"], row["start_ns"]) == ("j", 3, 7 * SECOND)
    assert (row["facility"], row["level"], row["message"], row["seq"]) == ("kern", "warn", XID, 5)
    assert row["ts"] == 1_001 * SECOND


def test_a_pid_that_was_used_again_gives_no_rank(log: Log) -> None:
    log.source.process_identified(Identity(4711, 90 * SECOND, "j", "r", "trainer", 3))
    log.write(5, XID, us=50_000_000)
    (row,) = log.tick()
    assert (row["pid"], row["job"], row["rank"]) == (4711, None, None)
    assert row["ts"] == 950 * SECOND


def test_what_a_program_wrote_is_of_no_kind(log: Log) -> None:
    log.tick()
    log.write(5, XID, priority=12)
    assert [(row["facility"], row["kind"], row["pid"]) for row in log.tick()] == [("user", "other", None)]


def test_a_log_whose_clock_is_behind_is_not_history(log: Log) -> None:
    log.write(3, "NET: Registered", us=1)
    assert log.tick() == []
    log.source.process_identified(Identity(4711, 90 * SECOND, "j", "r", "trainer", 3))
    log.write(4, "NET: Registered", us=1)
    log.write(5, XID, us=2)
    rows = log.tick()
    assert [(row["seq"], row["rank"], row["ts"]) for row in rows] == [(4, None, 1_000 * SECOND), (5, 3, 1_000 * SECOND)]


def test_of_the_time_before_only_what_is_of_a_kind(log: Log) -> None:
    log.write(3, "NET: Registered", us=1)
    log.write(4, XID, us=2)
    assert [row["seq"] for row in log.tick()] == [4]


def test_a_restart_stores_nothing_twice(log: Log) -> None:
    columns, restore = log.source.restored_tables["process.kmsg"]
    boot = [log.clock.boot_id, log.clock.boot_id, "another", None]
    restore(pa.table(dict(zip(columns, ([3, 4, 99, 98], boot), strict=True))))
    for seq in (3, 4, 5):
        log.write(seq, XID, us=seq)
    assert [row["seq"] for row in log.tick()] == [5]


def test_a_flood_is_bounded_and_counted(log: Log) -> None:
    log.tick()
    for seq in range(137):
        log.write(seq, XID)
    rows = log.tick()
    assert len(rows) == BURST
    assert [(loss.count, loss.stage) for loss in log.rows.losses] == [(37, "suppress")]
    log.clock.advance(2 * SECOND)
    log.write(137, XID)
    assert [row["suppressed"] for row in log.tick()] == [37]


def test_records_that_the_kernel_overwrote_are_a_loss(log: Log) -> None:
    log.tick()
    for seq in (5, 12):
        log.write(seq, XID)
    assert len(log.tick()) == 2
    assert [(loss.count, loss.stage, loss.table) for loss in log.rows.losses] == [(6, "read", "process.kmsg")]


def test_a_log_that_may_not_be_read_is_said_and_tried_again(tmp_path: Path) -> None:
    rows = Sink()
    source = KernelLogSource(str(tmp_path / "none"), rows, FakeClock(), "n1")
    source.tick()
    state = source.states(Totals("running", {}, {}))[0]
    assert state.state == "stopped"
    assert "No such file" in state.reason
    (tmp_path / "none").write_bytes(f"4,1,1,-;{XID}\n".encode())
    for _ in range(60):
        source.tick()
    assert [row["kind"] for row in rows.take("process.kmsg")] == ["xid"]
    assert source.states(Totals("running", {}, {}))[0].state == "running"
    source.stop()


def test_the_kernel_log_can_be_switched_off() -> None:
    source = KernelLogSource("", Sink(), FakeClock(), "n1")
    source.tick()
    assert source.states(Totals("running", {}, {}))[0].state == "stopped"


def test_a_reader_of_the_log_reads_a_pipe_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"6,%d,%d,-;line\n" % (n, n) for n in range(2_000)))
    log = KernelLog(str(path))
    seen = 0
    while (chunk := log.read(2)).records:
        seen += len(chunk.records)
    log.close()
    assert seen == 2_000
