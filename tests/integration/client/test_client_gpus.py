"""``gpu``, ``memory`` and ``topo`` over two nodes with GPUs."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from client_fake_node import SECOND, FakeNode, process

from probing.api.proto.probing.v1 import node_pb2 as pb

Run = Callable[..., tuple[int, str, str]]
GB = 10**9


def reading(node: str, number: int, **values: Any) -> dict[str, Any]:
    own = {
        "node": node,
        "ts": time.time_ns() - SECOND,
        "device_id": number,
        "uuid": f"GPU-{node}-{number}",
        "gpu_util_pct": 97.0,
        "sm_active_pct": 83.0,
        "tensor_active_pct": 41.0,
        "total_bytes": 80 * GB,
        "used_bytes": 50 * GB,
        "mem_used_pct": 62.5,
        "temperature_c": 61.0,
        "power_w": 653.0,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1755,
        "clock_event_reasons": "sw_power_cap",
    }
    return {**own, **values}


def device(node: str, number: int, **values: Any) -> dict[str, Any]:
    own = {
        "node": node,
        "ts": time.time_ns(),
        "device_id": number,
        "uuid": f"GPU-{node}-{number}",
        "state": "ok",
        "name": "H100",
        "bus_id": f"0000:{0x17 + number:02x}:00.0",
        "numa_node": number // 2,
        "cpu_list": f"{number // 2 * 48}-{number // 2 * 48 + 47}",
        "pcie_width": 16,
        "pcie_width_max": 16,
        "total_bytes": 80 * GB,
    }
    return {**own, **values}


def user(node: str, number: int, rank: int, used: int) -> dict[str, Any]:
    return {
        "node": node,
        "ts": time.time_ns() - SECOND,
        "job": "j1",
        "run": "r1",
        "pid": 1000 + rank,
        "start_ns": SECOND,
        "rank": rank,
        "role": "trainer",
        "device_id": number,
        "uuid": f"GPU-{node}-{number}",
        "source": "driver",
        "kind": "compute",
        "used_bytes": used,
        "sm_pct": 79.0,
    }


def memory(node: str, rank: int, rss: int) -> dict[str, Any]:
    return {
        "node": node,
        "ts": time.time_ns() - SECOND,
        "job": "j1",
        "run": "r1",
        "pid": 1000 + rank,
        "start_ns": SECOND,
        "rank": rank,
        "role": "trainer",
        "rss_bytes": rss,
        "swap_bytes": 0,
    }


def link(node: str, number: int, kind: str, **values: Any) -> dict[str, Any]:
    own = {
        "node": node,
        "ts": time.time_ns() - SECOND,
        "device_id": number,
        "uuid": f"GPU-{node}-{number}",
        "kind": kind,
    }
    return {**own, **values}


def links(node: str) -> list[dict[str, Any]]:
    found = []
    for number in range(4):
        for other in range(4):
            if other != number:
                path = "NV18" if number // 2 == other // 2 else "SYS"
                found.append(link(node, number, "gpu", peer=f"GPU-{node}-{other}", peer_id=other, path=path, p2p="ok"))
        near = number // 2 == 0
        found.append(
            link(
                node,
                number,
                "nic",
                peer="mlx5_0",
                peer_kind="hca",
                numa_node=0,
                generation=5,
                width=16,
                generation_max=5,
                width_max=16,
                path="PIX" if near else "SYS",
            )
        )
        slow = node == "beta" and number == 3
        found.append(
            link(
                node,
                number,
                "pcie",
                width=8 if slow else 16,
                width_max=16,
                generation=5,
                generation_max=5,
                speed_bytes_per_s=31.5e9 if slow else 63e9,
                speed_max_bytes_per_s=63e9,
                state="degraded" if slow else "full",
            )
        )
    found.append(link(node, 1, "nvlink", link=7, state="down" if node == "beta" else "up"))
    return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNode]]:
    """Eight ranks on two nodes; GPU 3 of beta is hot, and rank 5 has twice the memory of the others."""
    nodes = []
    for first, name in enumerate(("alpha", "beta")):
        ranks = [4 * first + number for number in range(4)]
        hot = {"clock_event_reasons": "sw_power_cap,hw_thermal", "ecc_uncorrected": 3}
        nodes.append(
            FakeNode(
                tmp_path,
                name,
                {
                    "process.processes": [process(name, r, 1000 + r) for r in ranks],
                    "gpu.utilization": [
                        # An older reading is not shown.
                        reading(name, 0, ts=time.time_ns() - 5 * SECOND, gpu_util_pct=1.0),
                        *(reading(name, n, **(hot if (name, n) == ("beta", 3) else {})) for n in range(4)),
                    ],
                    "gpu.devices": [device(name, n) for n in range(4)],
                    "gpu.processes": [user(name, r % 4, r, (60 if r == 5 else 30) * GB) for r in ranks],
                    "gpu.links": links(name),
                    "process.memory": [memory(name, r, (9 if r == 2 else 3) * GB) for r in ranks],
                },
            )
        )
    nodes[0].peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in nodes]
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    yield nodes
    for node in nodes:
        node.stop()


def test_gpus_by_rank(cluster: list[FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("gpu", "--all-nodes")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 9
    head = "NODE GPU RANK PID UTIL SM TENSOR MEMORY TEMP POWER CLOCK JOB WHAT IS WRONG"
    assert " ".join(lines[0].split()) == head
    assert " ".join(lines[1].split()) == "alpha 0 0 1000 97% 83% 41% 27.9/74.5 GiB 61 653/700 W 1755 j1 -"
    assert lines[8].endswith("throttled: hw_thermal; 3 uncorrected memory errors")


def test_gpus_as_json_and_rows(cluster: list[FakeNode], ctl: Run) -> None:
    _, out, _ = ctl("gpu", "--all-nodes", "--job", "j1", "-f", "json")
    found = json.loads(out)
    assert [(gpu["node"], gpu["device_id"], [p["rank"] for p in gpu["processes"]]) for gpu in found] == [
        (node, n, [4 * first + n]) for first, node in enumerate(("alpha", "beta")) for n in range(4)
    ]
    assert found[0]["gpu_util_pct"] == 97.0
    assert found[7]["wrong"] == ["throttled: hw_thermal", "3 uncorrected memory errors"]
    code, out, _ = ctl("gpu", "-f", "csv")
    assert code == 0
    assert len(out.splitlines()) == 5


def test_gpus_that_are_lost_or_idle(tmp_path: Path, ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        "gpu.devices": [device("n", 0, state="lost", reason="the GPU has fallen off the bus"), device("n", 1)],
        "gpu.utilization": [reading("n", 1, clock_event_reasons="gpu_idle", gpu_util_pct=0.0)],
    }
    with FakeNode(tmp_path, "n", tables) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        _, out, _ = ctl("gpu")
        lines = out.splitlines()
        assert "lost: the GPU has fallen off the bus" in lines[1]
        assert lines[2].split()[:5] == ["n", "1", "-", "-", "0%"]
        assert lines[2].endswith("-")


def test_a_gpu_that_is_gone_has_nothing_of_the_one_that_has_its_number(
    tmp_path: Path, ctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = device("n", 1, uuid="GPU-gone", state="gone", reason="the driver does not list the device any more")
    tables = {
        "process.processes": [process("n", 0, 1000)],
        "gpu.devices": [device("n", 0), device("n", 1), gone],
        "gpu.utilization": [reading("n", number) for number in range(2)],
        "gpu.processes": [user("n", 1, 0, 30 * GB)],
        "gpu.links": links("n"),
    }
    with FakeNode(tmp_path, "n", tables) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        gpus = {row["uuid"]: row for row in json.loads(ctl("gpu", "-f", "json")[1])}
        (shown,) = json.loads(ctl("topo", "-f", "json")[1])
    assert (gpus["GPU-gone"]["wrong"][0][:5], gpus["GPU-gone"]["processes"]) == ("gone:", [])
    assert gpus["GPU-gone"].get("gpu_util_pct") is None
    assert (gpus["GPU-n-1"]["gpu_util_pct"], len(gpus["GPU-n-1"]["processes"])) == (97.0, 1)
    assert {gpu["uuid"]: gpu["ranks"] for gpu in shown["gpus"]} == {"GPU-n-0": [], "GPU-n-1": [0], "GPU-gone": []}


@pytest.mark.parametrize("lost", [0, 1])
def test_rows_of_a_gpu_without_a_reading(tmp_path: Path, ctl: Run, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    devices = [device("n", number, **({"state": "lost"} if number == lost else {})) for number in range(2)]
    tables = {"gpu.devices": devices, "gpu.utilization": [reading("n", 1 - lost)]}
    with FakeNode(tmp_path, "n", tables) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        code, out, err = ctl("gpu", "-f", "csv")
        assert (code, err) == (0, "")
        shown = list(csv.DictReader(io.StringIO(out)))
        file = tmp_path / "gpus.parquet"
        assert ctl("gpu", "-o", str(file))[0] == 0
        stored = pq.read_table(file).to_pylist()
    # The devices stand in order, and the one that is lost has no reading.
    utils = [None if number == lost else 97.0 for number in range(2)]
    assert [(row["device_id"], row["gpu_util_pct"]) for row in stored] == list(enumerate(utils))
    assert [row["gpu_util_pct"] for row in shown] == ["" if util is None else str(util) for util in utils]
    assert list(stored[0]) == list(shown[0])


def test_a_node_without_gpus_says_so(tmp_path: Path, ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeNode(tmp_path, "n", {}) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        for command in ("gpu", "topo"):
            code, out, _ = ctl(command)
            assert (code, "no GPU" in out) == (0, True)
        code, out, _ = ctl("memory")
        assert (code, "no memory" in out) == (0, True)
        assert ctl("gpu", "--job", "nobody")[0] != 0


def test_memory_of_host_and_device_by_rank(cluster: list[FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("memory", "--all-nodes")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "job j1  run r1"
    assert "  rank 2 has 3.0 times the median of host memory: 8.38 GiB, the median is 2.79 GiB" in lines
    assert "  rank 5 has 2.0 times the median of GPU memory: 55.9 GiB, the median is 27.9 GiB" in lines
    (five,) = (line for line in lines if " 1005 " in line)
    assert " ".join(five.split()) == "beta 5 trainer 1005 2.79 GiB 0 B 1 55.9 GiB 74.5 GiB 62%"
    assert len(lines) == 3 + 1 + 8


def test_the_most_memory_first_with_a_limit(cluster: list[FakeNode], ctl: Run) -> None:
    _, out, _ = ctl("memory", "--all-nodes", "-l", "2", "-f", "json")
    (own,) = json.loads(out)
    assert [(row["rank"], row["device_bytes"], row["rss_bytes"]) for row in own["processes"]] == [
        (5, 60 * GB, 3 * GB),
        (2, 30 * GB, 9 * GB),
    ]
    assert len(own["sentences"]) == 2
    assert own["processes"][0]["devices"][0]["uuid"] == "GPU-beta-1"


def test_memory_of_ranks_without_gpus(tmp_path: Path, ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeNode(tmp_path, "n", {"process.memory": [memory("n", r, 3 * GB) for r in range(4)]}) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        _, out, _ = ctl("memory")
        lines = out.splitlines()
        assert len(lines) == 6
        assert " ".join(lines[2].split()) == "n 0 trainer 1000 2.79 GiB 0 B - - - -"


def test_topology_with_the_ranks_on_it(cluster: list[FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("topo", "--all-nodes")
    assert code == 0
    alpha, beta = out.split("node beta\n")
    lines = alpha.splitlines()
    assert lines[0] == "node alpha"
    assert lines[1] == "  NUMA node 0, CPUs 0-47"
    assert lines[2] == "    GPU0  0000:17:00.0  PCIe 5.0 x16  rank 0"
    assert "    mlx5_0  hca  PCIe 5.0 x16" in lines
    assert "  NUMA node 1, CPUs 48-95" in lines
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("GPU")}
    assert rows["GPU0"] == ["GPU0", "0", "X", "NV18", "SYS", "SYS", "PIX"]
    assert rows["GPU3"] == ["GPU3", "3", "SYS", "SYS", "NV18", "X", "SYS"]
    assert "!" not in alpha
    assert "! GPU1: NVLink 7 is down" in beta
    assert "! GPU3: PCIe 5.0 x8 of 5.0 x16: 31.5 GB/s instead of 63 GB/s" in beta
    assert "rank 7" in beta


def test_topology_as_json_and_rows(cluster: list[FakeNode], ctl: Run) -> None:
    _, out, _ = ctl("topo", "-f", "json")
    (node,) = json.loads(out)
    assert [gpu["ranks"] for gpu in node["gpus"]] == [[0], [1], [2], [3]]
    assert len(node["links"]) == 12 + 4 + 4 + 1
    assert node["links"][0]["path"] == "NV18"
    code, out, _ = ctl("topo", "-f", "csv")
    assert (code, len(out.splitlines())) == (0, 22)
