"""Which libbpf is used: the host's where it has all functions, else the wheel's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from probing.api.errors import PrivilegeError
from probing.daemon.bpf.library import SONAME, find, library


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Returns a copy of the host's libbpf, for one that came with a wheel."""
    library()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    copy = tmp_path / SONAME
    copy.write_bytes(next(Path(line.split()[-1]) for line in mapped if SONAME in line).read_bytes())
    return copy


def test_the_hosts_comes_first(tmp_path: Path) -> None:
    found = find(SONAME, tmp_path / SONAME)
    assert found.instead == ""
    assert str(found) == f"{found.version}, of the host"
    assert int(found.version.split(".")[0]) >= 1


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("libprobingd-none.so.1", "the host has no libprobingd-none.so.1"),
        # A library without our functions stands for one that is too old.
        ("libm.so.6", "the host's libm.so.6 is too old ("),
    ],
)
def test_a_missing_or_old_one_is_replaced_by_the_own(own: Path, host: str, why: str) -> None:
    found = find(host, own)
    assert why in found.instead
    assert str(found).startswith(f"{library().version}, own: ")
    assert found.functions.btf__load_vmlinux_btf is not library().functions.btf__load_vmlinux_btf


def test_without_either_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(PrivilegeError, match=r"there is no usable libbpf: the host has no libnone\.so") as caught:
        find("libnone.so", tmp_path / SONAME)
    assert "libbpf1 on Debian" in caught.value.hint


def test_a_damaged_own_one_is_an_error(tmp_path: Path) -> None:
    own = tmp_path / SONAME
    own.write_text("no library")
    with pytest.raises(PrivilegeError, match=r"file too short|invalid ELF header"):
        find("libnone.so", own)
