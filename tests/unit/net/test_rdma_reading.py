"""The reader of RDMA ports, on a tree as sysfs has it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from infiniband import make_port, write

from probing.api.errors import UsageError
from probing.api.tables.rdma import PORTS
from probing.daemon.net.rdma import reading
from probing.daemon.net.rdma.reading import COUNTED, PortReader, device_names


def descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def read(root: Path, *, details: bool = True, reader: PortReader | None = None) -> list[dict[str, Any]]:
    """Ports with their counters by name."""
    made = reader or PortReader(root)
    found = made.read(device_names(root), details)
    if reader is None:
        made.close()
    return [{**port, **dict(zip(COUNTED, port["counters"], strict=True))} for port in found]


def test_a_row_a_port_of_every_device_with_bytes(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", 1)
    make_port(tmp_path, "mlx5_0", 2, **{"hw_counters/np_cnp_sent": "17\n"})
    make_port(tmp_path, "mlx5_0", 1, rate="2.5 Gb/sec (1X SDR)\n")
    rows = read(tmp_path)
    assert [(row["hca"], row["port"]) for row in rows] == [("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1)]
    first, second, _ = rows
    assert (first["port_xmit_data_bytes"], first["port_rcv_data_bytes"]) == (4000, 8000)
    assert first["rate_gbps"] == 2.5
    assert (first["state"], first["phys_state"], first["link_layer"]) == ("ACTIVE", "LinkUp", "InfiniBand")
    assert (first["link_downed"], first["np_cnp_sent"]) == (3, None)
    assert second["np_cnp_sent"] == 17


def test_names_of_other_drivers_and_what_the_device_is(tmp_path: Path) -> None:
    path = make_port(
        tmp_path,
        "efa_0",
        1,
        link_layer="Unspecified\n",
        **{
            "hw_counters/tx_bytes": "7919\n",
            "hw_counters/rx_bytes": "104729\n",
            "hw_counters/tx_pkts": "17\n",
            "hw_counters/rx_pkts": "19\n",
            "hw_counters/rx_drops": "23\n",
            "hw_counters/tx_cnp_pkts": "29\n",
            "gid_attrs/ndevs/0": "rdma0\n",
        },
    )
    for name in ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets"):
        (path / "counters" / name).unlink()
    pci = tmp_path / "pci" / "0000:17:00.0"
    write(pci / "numa_node", "1\n")
    (tmp_path / "efa_0" / "device").symlink_to(pci)
    shutil.move(tmp_path / "efa_0", tmp_path / "class" / "efa_0")
    (row,) = read(tmp_path / "class")
    assert (row["port_xmit_data_bytes"], row["port_rcv_data_bytes"]) == (7919, 104729)
    assert (row["port_xmit_packets"], row["port_rcv_packets"]) == (17, 19)
    assert (row["out_of_buffer"], row["np_cnp_sent"]) == (23, 29)
    assert (row["netdev"], row["bus_id"], row["numa_node"]) == ("rdma0", "0000:17:00.0", 1)


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    huge = str(1 << 70)
    path = make_port(
        tmp_path, "mlx5_0", 1, **{"counters/symbol_error": "N/A (no PMA)\n", "counters/port_rcv_errors": huge}
    )
    write(path / "state", b"\xff\xfe\x1b[2J")
    write(path / "rate", "many\n")
    write(tmp_path / "mlx5_0" / "ports" / "gid", "")
    (row,) = read(tmp_path)
    assert row["symbol_error"] is None
    assert row["port_rcv_errors"] == (1 << 63) - 1
    assert row["rate_gbps"] is None
    assert row["state"].isprintable()


def test_a_machine_without_devices_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []


def test_every_counter_is_a_column(tmp_path: Path) -> None:
    assert {*COUNTED} < {column.name for column in PORTS.columns}


def test_the_files_stay_open_and_show_new_values(tmp_path: Path) -> None:
    path = make_port(tmp_path, "mlx5_0", 1)
    reader = PortReader(tmp_path)
    before = descriptors()
    read(tmp_path, reader=reader)
    opened = descriptors()
    assert len(opened) > len(before)
    write(path / "counters/link_downed", "5\n")
    (row,) = read(tmp_path, details=False, reader=reader)
    assert row["link_downed"] == 5
    assert descriptors() == opened
    # A reset of the driver makes another device of the same name.
    shutil.rmtree(tmp_path / "mlx5_0")
    make_port(tmp_path, "mlx5_0", 1, **{"counters/link_downed": "0\n"})
    (row,) = read(tmp_path, details=True, reader=reader)
    assert row["link_downed"] == 0
    assert descriptors() == opened
    reader.close()
    assert len(descriptors()) == len(before)


def test_a_device_that_went_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_port(tmp_path, "mlx5_0", 1)
    reader = PortReader(tmp_path)
    read(tmp_path, reader=reader)
    with monkeypatch.context() as patch:
        patch.setattr(reading.os, "pread", lambda *_: (_ for _ in ()).throw(OSError(19, "No such device")))
        (row,) = read(tmp_path, details=False, reader=reader)
        assert row["link_downed"] is None
    (row,) = read(tmp_path, details=False, reader=reader)
    assert row["link_downed"] == 3
    reader.close()


def test_many_ports_do_not_use_up_the_descriptors(tmp_path: Path) -> None:
    for device in range(40):
        make_port(tmp_path, f"mlx5_{device}", 1)
    reader, before = PortReader(tmp_path), len(descriptors())
    for details in (True, False):
        rows = read(tmp_path, details=details, reader=reader)
        assert [row["link_downed"] for row in rows] == [3] * 40
    assert len(descriptors()) - before < 40 * len(COUNTED) / 2
    reader.close()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "x" * 65, "mlx5\n"])
def test_a_name_that_is_no_device_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        PortReader(tmp_path).read([name], True)
