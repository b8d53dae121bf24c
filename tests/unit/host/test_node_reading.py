"""What a reader finds of the node and of control groups, from files as kernels write them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from probing.daemon.host.node.kernel_files import (
    Groups,
    parse_diskstats,
    parse_io_counters,
    parse_kilobytes,
    parse_named,
    parse_pressure,
)
from probing.daemon.host.node.reading import NodeReader
from probing.daemon.host.node.space import answer_space, chosen_mounts, space_of
from probing.daemon.processes.conditions.mounts import parse_mounts
from probing.daemon.processes.target import Target
from tests.host_support import group_tree

PSI = "some avg10=1.50 avg60=0.25 avg300=0.00 total=17\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=5\n"
# Linux 3.10 has 11 fields, 4.18 has 15, 5.5 and later 17.
DISKSTATS = """\
   8       0 sda 17 2 136 19 23 3 184 29 1 31 37
 259       0 nvme0n1 41 0 328 43 47 0 376 53 2 59 61 67 0 71 73
 259       1 nvme0n1p1 41 0 328 43 47 0 376 53 2 59 61 67 0 71 73 79 83
   7       0 loop0 1 0 1 1 0 0 0 0 0 0 0
 253       0 dm-0 5 0 5 5 5 0 5 5 0 5 5 5 0 5 5 89 97
broken line
   8      16 sdb x y z 1 2 3 4 5 6 7 8
"""


def test_diskstats_of_old_and_new_kernels() -> None:
    disks = parse_diskstats(DISKSTATS.encode())
    assert set(disks) == {"sda", "nvme0n1", "nvme0n1p1", "loop0", "dm-0"}
    assert (disks["sda"]["reads"], disks["sda"]["write_sectors"], disks["sda"]["queue_ms"]) == (17, 184, 37)
    assert "flushes" not in disks["sda"]
    assert (disks["dm-0"]["flushes"], disks["dm-0"]["flush_ms"]) == (89, 97)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff" * 99, b"some avg10=x total=1\n", b"1 2 3"])
def test_files_that_say_nothing_give_nothing(data: bytes) -> None:
    assert parse_diskstats(data) == {}
    assert parse_pressure(data) == {}
    assert parse_kilobytes(data, ("MemTotal",)) == {}
    assert parse_named(data, ("oom_kill",)) == {}
    assert parse_io_counters(data) == {}


def test_pressure_with_and_without_full() -> None:
    assert parse_pressure(PSI.encode()) == {"some": [1.5, 0.25, 0.0, 17.0], "full": [0.5, 0.0, 0.0, 5.0]}
    assert parse_pressure(PSI.encode().split(b"\n")[0]) == {"some": [1.5, 0.25, 0.0, 17.0]}
    assert parse_pressure(b"full avg10=100.00 avg60=0.00 avg300=0.00 total=99999999999999999999\n")["full"][0] == 100.0


V2 = {
    "memory.current": "900\n",
    "memory.max": "1000\n",
    "memory.high": "max\n",
    "memory.swap.current": "7\n",
    "memory.swap.max": "max\n",
    "memory.events": "low 0\nhigh 0\nmax 13\noom 2\noom_kill 1\n",
    "memory.stat": "anon 500\nfile 300\nshmem 11\nfile_dirty 3\nfile_writeback 2\nslab 17\n",
    "cpu.pressure": PSI,
    "memory.pressure": PSI,
    "io.pressure": PSI,
}
V1 = {
    "memory.usage_in_bytes": "900\n",
    "memory.limit_in_bytes": "1000\n",
    "memory.failcnt": "13\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    "memory.stat": "cache 1\ntotal_rss 500\ntotal_cache 300\ntotal_shmem 11\ntotal_dirty 3\ntotal_writeback 2\n"
    "total_swap 7\n",
}


@pytest.mark.parametrize(("version", "files"), [(2, V2), (1, V1)])
def test_groups_of_both_versions(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    mountinfo, member = group_tree(tmp_path, version, files)
    groups = Groups(parse_mounts(mountinfo.encode()))
    memory, pressure = groups.add(member.encode())
    assert groups.add(member.encode()) == (memory, pressure)
    assert memory is not None
    found = groups.memory[memory]
    assert found == {
        "path": "/job/rank",
        "used_bytes": 900,
        "limit_bytes": 1000,
        "limit_hits": 13,
        "oom_kills": 1,
        "anon_bytes": 500,
        "cached_bytes": 300,
        "shmem_bytes": 11,
        "dirty_bytes": 3,
        "writeback_bytes": 2,
        "swap_used_bytes": 7,
        **({"slab_bytes": 17} if version == 2 else {}),
    }
    if version == 2:
        assert pressure is not None
        assert groups.pressure[pressure]["path"] == "/job/rank"
        assert set(groups.pressure[pressure]["resources"]) == {"cpu", "memory", "io"}
    else:
        assert (pressure, groups.pressure) == (None, {})


def test_the_group_whose_limit_is_closest_is_shown(tmp_path: Path) -> None:
    mountinfo, member = group_tree(tmp_path, 2, {"memory.current": "5\n", "memory.max": "max\n"})
    (tmp_path / "job" / "memory.current").write_text("70\n")
    (tmp_path / "job" / "memory.max").write_text("100\n")
    groups = Groups(parse_mounts(mountinfo.encode()))
    groups.add(member.encode())
    assert [(found["path"], found["used_bytes"]) for found in groups.memory.values()] == [("/job", 70)]


def test_a_group_that_is_removed_has_no_values(tmp_path: Path) -> None:
    mountinfo, member = group_tree(tmp_path, 2, {})
    groups = Groups(parse_mounts(mountinfo.encode()))
    assert groups.add(member.encode()) == (None, None)
    assert groups.add(b"0::/gone\n") == (None, None)
    assert groups.add(b"0::/../escape\n") == (None, None)
    assert groups.add(b"") == (None, None)


def own() -> list[int]:
    with Target(os.getpid()) as target:
        return [os.getpid(), target.start_ns]


def node(reader: NodeReader, **request: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reader.answer(request).payload)
    return found


def test_a_look_at_a_made_up_node(tmp_path: Path) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    for name in ("sda", "nvme0n1", "dm-0", "loop0"):
        (sys / "block" / name).mkdir(parents=True)
    (sys / "block" / "sda" / "diskseq").write_text("9\n")
    (proc / "pressure").mkdir(parents=True)
    (proc / "pressure" / "cpu").write_text(PSI)
    (proc / "meminfo").write_text("MemTotal:       1000 kB\nMemAvailable:    300 kB\nHugePages_Total:  2\n")
    (proc / "vmstat").write_text("pswpin 3\npswpout 5\noom_kill 7\n")
    (proc / "diskstats").write_text(DISKSTATS)
    found = node(NodeReader(str(proc), str(sys)), targets=[own(), [os.getpid(), 7]])
    assert (found["memory"], found["vm"]) == (
        {"total_bytes": 1000 << 10, "available_bytes": 300 << 10},
        {"swap_in_pages": 3, "swap_out_pages": 5, "oom_kills": 7},
    )
    assert set(found["disks"]) == {"sda", "nvme0n1", "dm-0"}
    assert (found["disks"]["sda"]["life"], found["disks"]["dm-0"]["life"]) == (9, 0)
    assert list(found["pressure"]) == ["cpu"]
    ours, ended = found["processes"]
    assert ended is None
    assert ours["io"]["rchar"] > 0


def test_a_node_without_any_of_it(tmp_path: Path) -> None:
    found = node(NodeReader(str(tmp_path), str(tmp_path)))
    assert (found["memory"], found["vm"], found["pressure"], found["disks"], found["processes"]) == ({}, {}, {}, {}, [])


MOUNTS = """\
1 0 253:0 / / rw - ext4 /dev/vda1 rw
2 1 0:5 / /proc rw - proc proc rw
3 1 0:22 / /dev/shm rw - tmpfs tmpfs rw
12 3 0:23 / /dev/shm rw - tmpfs tmpfs rw
4 1 253:0 /var/lib/kubelet/x /var/lib/kubelet/x rw - ext4 /dev/vda1 rw
5 1 0:30 / /mnt/data rw - nfs4 server:/export rw
6 1 0:30 /sub /mnt/data/again rw - nfs4 server:/export rw
7 1 7:1 / /snap/core ro - squashfs /dev/loop1 ro
8 1 0:40 / /run/containerd/x/rootfs rw - overlay overlay rw
9 1 259:3 / /data rw - xfs /dev/nvme0n1p3 rw
10 1 0:50 / /home/x/.cache/doc rw - fuse.portal portal rw
11 1 0:51 / /mnt/lustre rw - lustre 10.0.0.1@o2ib:/fs rw
"""


def test_each_file_system_is_asked_once_and_those_of_others_apart() -> None:
    local, served = chosen_mounts(parse_mounts(MOUNTS.encode()))
    assert [(mount.point, mount.number) for mount in local] == [(b"/", 1), (b"/data", 9), (b"/dev/shm", 12)]
    assert [mount.point for mount in served] == [b"/mnt/data", b"/mnt/lustre"]


def test_what_a_user_mounts_hides_no_file_system_of_the_node() -> None:
    fuse = "{n} 1 0:{n} / {point} rw - fuse.sshfs {source} rw,user_id={user},group_id=100"
    texts = ["1 0 0:1 / /mnt/checkpoints rw - nfs4 server:/ckpt rw"]
    # GIVEN users who mount file systems at short paths, also under the name of the node's
    texts += [fuse.format(n=2, point="/a", source="server:/ckpt", user=1000)]
    texts += [fuse.format(n=3 + n, point=f"/b{n}", source=f"x{n}", user=1000) for n in range(30)]
    texts += [fuse.format(n=40, point="/home/other/data", source="y", user=1001)]
    _, served = chosen_mounts(parse_mounts("\n".join(texts).encode()))
    points = [mount.point for mount in served]
    # THEN the file system of the node comes first, and the users take turns
    assert points[:4] == [b"/mnt/checkpoints", b"/a", b"/home/other/data", b"/b0"]
    assert len(points) == 16


def test_the_space_of_a_folder_is_that_of_statvfs(tmp_path: Path) -> None:
    found, seen = space_of(bytes(tmp_path)), os.statvfs(tmp_path)
    assert found is not None
    assert (found["size_bytes"], found["inodes"]) == (seen.f_blocks * seen.f_frsize, seen.f_files)
    assert found["used_bytes"] + found["available_bytes"] <= found["size_bytes"]
    assert space_of(b"/not/there") is None
    assert space_of(b"/a\0b") is None


def test_an_answer_about_this_machine() -> None:
    found = json.loads(answer_space({"targets": [own(), [os.getpid(), 7]]}).payload)
    assert "/" in [space["mount_point"] for space in found["local"]]
    assert found["shared"][1] is None
    assert json.loads(answer_space({"point": "/not/there"}).payload) is None
