"""RDMA ports from a tree as sysfs has it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from probing.api.tables.rdma import COUNTERS, HW_COUNTERS, PORTS
from probing.daemon.arrow import batch_of
from probing.daemon.host.rdma import read_ports
from probing.daemon.service.live import live_tables


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def make_port(root: Path, device: str, port: int, **files: str) -> Path:
    path = root / device / "ports" / str(port)
    standard = {
        "state": "4: ACTIVE\n",
        "phys_state": "5: LinkUp\n",
        "rate": "400 Gb/sec (4X NDR)\n",
        "link_layer": "InfiniBand\n",
        "counters/port_xmit_data": "1000\n",
        "counters/port_rcv_data": "2000\n",
        "counters/link_downed": "3\n",
    }
    for name, text in {**standard, **files}.items():
        write(path / name, text)
    return path


def test_a_row_a_port_with_bytes(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", 1)
    make_port(tmp_path, "mlx5_0", 2, **{"hw_counters/np_cnp_sent": "17\n"})
    make_port(tmp_path, "mlx5_0", 1, rate="2.5 Gb/sec (1X SDR)\n")
    rows = read_ports(tmp_path)
    assert [(row["hca"], row["port"]) for row in rows] == [("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1)]
    first, second, _ = rows
    assert first["port_xmit_data_bytes"] == 4000
    assert first["port_rcv_data_bytes"] == 8000
    assert first["rate_gbps"] == 2.5
    assert (first["state"], first["phys_state"], first["link_layer"]) == ("ACTIVE", "LinkUp", "InfiniBand")
    assert (first["link_downed"], first["np_cnp_sent"]) == (3, None)
    assert second["np_cnp_sent"] == 17
    assert batch_of("rdma.ports", rows).num_rows == 3


def test_what_cannot_be_read_is_null(tmp_path: Path) -> None:
    huge = str(1 << 70)
    path = make_port(
        tmp_path, "mlx5_0", 1, **{"counters/symbol_error": "N/A (no PMA)\n", "counters/port_rcv_errors": huge}
    )
    write(path / "state", b"\xff\xfe")
    write(path / "rate", "many\n")
    write(tmp_path / "mlx5_0" / "ports" / "gid", "")
    (row,) = read_ports(tmp_path)
    assert row["symbol_error"] is None
    assert row["port_rcv_errors"] == (1 << 63) - 1
    assert row["rate_gbps"] is None
    assert batch_of("rdma.ports", [row]).num_rows == 1


def test_a_machine_without_devices_has_no_rows(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "none") == []


def test_every_column_is_filled(tmp_path: Path) -> None:
    counters = {f"counters/{name}": f"{i}" for i, name in enumerate(COUNTERS, 1)}
    hardware = {f"hw_counters/{name}": f"{i}" for i, name in enumerate(HW_COUNTERS, 1)}
    make_port(tmp_path, "mlx5_0", 1, **counters, **hardware)
    (row,) = read_ports(tmp_path)
    assert set(row) == {column.name for column in PORTS.columns} - {"node", "ts"}
    assert None not in row.values()


def test_the_service_answers_for_the_table() -> None:
    made = live_tables("node7", lambda: 1, list, dict)["rdma.ports"]()
    assert pa.ipc.open_stream(made).read_all().schema == PORTS.logical
