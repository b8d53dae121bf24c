"""The kernel's view of a process: right on what kernels write, bounded and quiet on anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.processes.conditions.cgroups import read_cgroups
from probing.daemon.processes.conditions.counters import (
    Load,
    exec_start_ns,
    neighbours_of,
    parse_io,
    parse_schedstat,
    parse_task_stat,
    status_fields,
    taken_ns,
)
from probing.daemon.processes.conditions.mounts import Mount, mount_of, parse_mounts, waits_for_others
from probing.daemon.processes.conditions.sockets import SocketEnds, ends_of, rows_by_inode
from probing.daemon.processes.conditions.waits import lock_holder, system_call

MOUNTINFO = b"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
60 27 0:50 / /mnt rw - ext4 /dev/vdb rw
61 60 0:51 /sub /mnt/a\\040b\\134c rw,nosuid shared:7 master:1 - fuse.ckpt\x1b[31m ckpt rw,user_id=0
31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
40 23 0:39 / /mnt rw - nfs4 server:/ rw
broken
"""
MIB = 1 << 20


def test_the_mount_of_a_path_is_the_innermost_and_the_last() -> None:
    mounts = parse_mounts(MOUNTINFO)
    assert [mount.number for mount in mounts] == [22, 27, 60, 61, 31, 40]
    inner = mount_of(mounts, path=b"/mnt/a b\\c/file")
    assert inner is not None
    assert inner.text() == "fuse.ckpt\\x1b[31m /mnt/a b\\c"
    found = [mount_of(mounts, path=path) for path in (b"/", b"/mntx", b"/mnt", b"/mnt/x")]
    assert [mount and mount.number for mount in found] == [27, 27, 40, 40]
    assert mount_of(mounts, number=61) == inner
    assert mount_of(mounts, number=7) is None


def test_files_that_others_serve_are_not_looked_at() -> None:
    served = {mount.kind for mount in parse_mounts(MOUNTINFO) if waits_for_others(mount)}
    assert served == {"fuse.ckpt\\x1b[31m", "nfs4"}
    assert waits_for_others(None)


def test_counters_of_a_process() -> None:
    fields = [b"S", *(str(n).encode() for n in range(1, 50))]
    stat = parse_task_stat(b"7 (a) (b\n) " + b" ".join(fields))
    assert stat is not None
    assert (stat.name, stat.state, stat.major_faults) == ("a) (b\\n", "S", 9)
    assert (stat.cpu_ns, stat.processor) == ((11 + 12) * 10_000_000, 36)
    assert parse_task_stat(b"7 (a) S 1 2") is None
    assert parse_schedstat(b"11 13 17\n") == (11, 13)
    assert parse_io(b"rchar: 5\nwchar: 7\nsyscr: 3\n") == (5, 7, None)
    assert parse_io(b"rchar: 5\nwchar: 7\nsyscr: 3\nread_bytes: 4096\nwrite_bytes: 0\n") == (5, 7, 4096)
    sched = b"python (7, #threads: 1)\n---\nse.exec_start         :      26102343.789813\n"
    assert exec_start_ns(sched) == 26_102_343_789_813
    assert exec_start_ns(b"se.vruntime : 1.0") is None
    assert taken_ns(b"cpu  9 9\ncpu0 1 2 3 4 5 6 7 8 0 0\nintr 5\n") == {0: 21 * 10_000_000}


def test_fields_of_status() -> None:
    text = b"Name:\tx\nTracerPid:\t0\nThreads:\t3\nVmRSS:\t 11 kB\nVmSwap:\t 13 kB\nCpus_allowed_list:\t0-2,5\n"
    found = status_fields(text + b"voluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t19\n")
    assert found == {
        "tracer_pid": None,
        "threads": 3,
        "rss_bytes": 11 << 10,
        "swap_bytes": 13 << 10,
        "switches": 36,
        "cpus_allowed": 4,
        "cpu_list": "0-2,5",
    }
    assert set(status_fields(b"").values()) == {None}


@given(st.binary(max_size=600))
def test_any_bytes_are_parsed_without_an_error(data: bytes) -> None:
    for parse in (parse_mounts, parse_task_stat, parse_schedstat, parse_io, exec_start_ns, status_fields, taken_ns):
        parse(data)  # type: ignore[operator]
    for tcp in (True, False):
        for row in rows_by_inode(data, tcp=tcp).values():
            ends_of(row, tcp=tcp)
    read_cgroups(data, parse_mounts(MOUNTINFO))


def ends(table: bytes, inode: bytes = b"4711", *, tcp: bool = True) -> SocketEnds | None:
    row = rows_by_inode(table, tcp=tcp).get(inode)
    return None if row is None else ends_of(row, tcp=tcp)


def test_both_ends_of_a_socket() -> None:
    row = b"   0: 0100007F:1F90 0200000A:01BB 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n"
    assert ends(b"head\n" + row) == ("tcp 127.0.0.1:8080 -> 10.0.0.2:443", False)
    assert ends(row.replace(b" 01 ", b" 0A ")) == ("tcp 127.0.0.1:8080", True)
    six = row.replace(b"0100007F", b"0000000000000000FFFF00000100007F").replace(b"0200000A", b"0" * 31 + b"1")
    assert ends(six) == ("tcp 127.0.0.1:8080 -> [::100:0]:443", False)
    assert ends(row, b"471") is None
    unix = b"0000: 00000002 00000000 00010000 0001 01 4711 /run/\x1bx\n"
    assert ends(unix, tcp=False) == ("unix /run/\\x1bx", True)
    assert ends(unix.replace(b" 00010000 ", b" 00000000 "), tcp=False) == ("unix /run/\\x1bx", False)


@pytest.mark.parametrize(("machine", "openat", "futex"), [("x86_64", 257, 202), ("aarch64", 56, 98)])
def test_system_calls_by_machine(machine: str, openat: int, futex: int) -> None:
    found = system_call(openat, machine)
    assert found is not None
    assert (found.name, found.about) == ("openat", "path1")
    assert (other := system_call(futex, machine)) is not None
    assert (other.name, other.about) == ("futex", "")
    assert system_call(9999, machine) is None
    assert system_call(openat, "other") is None


def _groups(root: Path, levels: dict[str, dict[str, str]]) -> None:
    for path, files in levels.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / path / name).write_text(text)


def test_limits_of_version_2_hold_for_all_levels(tmp_path: Path) -> None:
    _groups(
        tmp_path,
        {
            "a": {
                "cpu.max": "150000 100000\n",
                "cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 5\n",
                "memory.max": f"{64 * MIB}\n",
                "memory.current": f"{63 * MIB}\n",
                "memory.events": "oom 1\noom_kill 0\n",
            },
            "a/b": {
                "cpu.max": "max 100000\n",
                "cpu.stat": "nr_throttled 7\nthrottled_usec 11\n",
                "memory.max": "max\n",
                "memory.current": f"{MIB}\n",
                "memory.events": "oom 1\noom_kill 2\n",
                "cgroup.events": "populated 1\nfrozen 1\n",
            },
        },
    )
    mounts = [Mount(1, b"/", bytes(tmp_path), "cgroup2", "rw")]
    assert read_cgroups(b"0::/a/b\n", mounts) == {
        "cgroup": "/a/b",
        "frozen": True,
        "cpu_quota": 1.5,
        "throttled": 10,
        "throttled_ns": 16_000,
        "memory_limit_bytes": 64 * MIB,
        "memory_used_bytes": 63 * MIB,
        "oom_kills": 2,
    }


def test_limits_of_version_1_come_from_their_own_hierarchies(tmp_path: Path) -> None:
    _groups(
        tmp_path,
        {
            "cpu/j": {
                "cpu.cfs_quota_us": "50000\n",
                "cpu.cfs_period_us": "100000\n",
                "cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 77\n",
            },
            "cpu": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
            "memory/m": {
                "memory.limit_in_bytes": f"{32 * MIB}\n",
                "memory.usage_in_bytes": f"{MIB}\n",
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            },
            "memory": {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": f"{99 * MIB}\n"},
            "freezer/f": {"freezer.state": "FROZEN\n"},
        },
    )
    names = ("cpu", "memory", "freezer")
    mounts = [Mount(n, b"/", bytes(tmp_path / name), "cgroup", f"rw,{name}") for n, name in enumerate(names)]
    found = read_cgroups(b"4:memory:/m\n3:cpu,cpuacct:/j\n2:freezer:/f\n0::/\n", mounts)
    assert found == {
        "cgroup": "/f",
        "frozen": True,
        "cpu_quota": 0.5,
        "throttled": 3,
        "throttled_ns": 77,
        "memory_limit_bytes": 32 * MIB,
        "memory_used_bytes": MIB,
        "oom_kills": 5,
    }
    # The group that holds the process up is the one that is shown.
    groups = (b"4:memory:/m\n3:cpu:/j\n", b"4:memory:/m\n3:cpu:/\n")
    assert [read_cgroups(text, mounts)["cgroup"] for text in groups] == ["/j", "/m"]


@pytest.mark.parametrize("path", [b"/../../etc", b"/a/../../..", b"etc", b"/other/a"])
def test_a_group_outside_of_the_mount_is_not_read(path: bytes, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom_kill 3\n")
    mounts = [Mount(1, b"/docker/x", bytes(tmp_path), "cgroup2", "rw")]
    assert set(read_cgroups(b"0::" + path + b"\n", mounts).values()) == {None}
    assert read_cgroups(b"0::/docker/x\n", mounts)["oom_kills"] == 3


def test_neighbours_are_those_that_used_the_cpus() -> None:
    first = [Load(1, 1, "own", 0, 10), Load(2, 1, "hog", 0, 100), Load(3, 1, "far", 7, 100), Load(4, 1, "still", 0, 5)]
    second = [Load(1, 1, "own", 0, 99), Load(2, 1, "hog", 1, 170), Load(3, 1, "far", 7, 900), Load(4, 1, "still", 0, 5)]
    new = Load(4, 9, "new", 0, 30)
    assert neighbours_of(first, [*second, new], 1, {0, 1}) == [("hog", 2, 70), ("new", 4, 30)]


@pytest.mark.parametrize("path", [b"/../../kubepods/pod7/x", b"/../../kubepods/pod7"])
def test_a_container_reads_groups_of_the_node_where_they_are_mounted(path: bytes, tmp_path: Path) -> None:
    _groups(
        tmp_path,
        {
            "own": {"memory.max": "4096\n", "memory.current": "1\n"},
            "node/kubepods/pod7/x": {},
            "node/kubepods/pod7": {"memory.max": f"{64 * MIB}\n", "memory.current": f"{MIB}\n"},
        },
    )
    own = Mount(1, b"/", bytes(tmp_path / "own"), "cgroup2", "ro")
    node = Mount(2, b"/../..", bytes(tmp_path / "node"), "cgroup2", "ro")
    found = read_cgroups(b"0::" + path + b"\n", [own, node])
    assert found["memory_limit_bytes"] == 64 * MIB
    assert found["cgroup"] == path.decode().removeprefix("/../..")
    # Its own group, one that no mount holds, and the node's without the mount.
    assert read_cgroups(b"0::/\n", [own, node])["memory_limit_bytes"] == 4096
    assert read_cgroups(b"0::/../other\n", [own, node])["memory_limit_bytes"] is None
    assert read_cgroups(b"0::" + path + b"\n", [own])["memory_limit_bytes"] is None


LOCKS = b"""1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF
1: -> FLOCK  ADVISORY  WRITE 23 fe:00:131 0 EOF
1:  -> FLOCK  ADVISORY  WRITE 7 fe:00:131 0 EOF
2: OFDLCK ADVISORY  WRITE -1 fe:00:132 0 EOF
2: -> OFDLCK ADVISORY  WRITE 5 fe:00:132 0 EOF
"""


def test_the_holder_of_a_file_lock() -> None:
    assert [lock_holder(LOCKS, {waiter}) for waiter in (23, 7, 5, 4711, 1)] == [4711, 4711, None, None, None]


@given(st.binary(max_size=300))
def test_any_table_of_locks_is_read(data: bytes) -> None:
    lock_holder(data, {7})
