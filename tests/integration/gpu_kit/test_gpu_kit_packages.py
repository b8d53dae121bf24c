"""The packages of the check on a GPU: what wheels lack is named, and what the machine brings is copied."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from gpu_kit.brought import bring, main
from gpu_kit.wheels import missing_wheels, unmet


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\nneeds: nothing\n")


def test_what_the_wheels_need_and_lack(tmp_path: Path) -> None:
    wheel(
        tmp_path, "probingd", "0.1", "duckdb==2.0.*", "numpy>=2.2", "Small_Thing>=3", "tomli; python_version < '3.11'"
    )
    wheel(tmp_path, "small_thing", "2.9", "extra-thing; extra == 'more'")
    # Too old, missing, and brought by the machine; markers are those of the machine.
    assert sorted(missing_wheels(tmp_path, ["numpy"])) == ["Small_Thing>=3: 2.9", "duckdb==2.0.*: none"]
    wheel(tmp_path, "duckdb", "2.0.0")
    (tmp_path / "small_thing-2.9-py3-none-any.whl").unlink()
    wheel(tmp_path, "small_thing", "3.1")
    assert missing_wheels(tmp_path, ["numpy"]) == []


def test_bounds_of_what_is_installed() -> None:
    versions = {"numpy": "2.5.2", "grpcio": "1.80.0"}
    assert unmet(["numpy>=2.2", "grpcio>=1.85.1", "duckdb"], versions.get) == ["grpcio>=1.85.1: 1.80.0", "duckdb: none"]


def test_a_package_is_copied_without_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, target = tmp_path / "site", tmp_path / "target"
    files = ("large/__init__.py", "large/core.so", "large/tests/test_core.py", "large.libs/lib.so")
    files += ("large-2.5.dist-info/METADATA", "large-2.5.dist-info/RECORD")
    for name in files:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("Name: large\nVersion: 2.5\n" if name.endswith("METADATA") else "")
    (site / "large-2.5.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in [*files, "../bin/large"]))
    monkeypatch.syspath_prepend(str(site))
    target.mkdir()
    bring("large", target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == sorted(name for name in files if "/tests/" not in name)
    assert main([str(target), "no-such-package"]) == 1
    assert "no-such-package, which probingd needs" in capsys.readouterr().err
