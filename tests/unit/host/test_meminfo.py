"""Memory of the node from files as /proc/meminfo."""

from __future__ import annotations

from pathlib import Path

from probing.daemon.host.meminfo import read_meminfo


def test_this_node() -> None:
    total, available = read_meminfo()
    assert total is not None
    assert available is not None
    assert 1 << 20 < available <= total


def test_a_file_with_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       13 kB\nMemFree: 7 kB\nxMemAvailable: 5 kB\nMemAvailable: many kB\n")
    assert read_meminfo(path) == (13 * 1024, None)
    assert read_meminfo(tmp_path / "none") == (None, None)
