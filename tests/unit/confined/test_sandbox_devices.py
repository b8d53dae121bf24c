"""What a confined process may still write to: the devices that it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from probing.daemon.confined.sandbox import landlock_abi

CHILD = """
import json, os, sys
from probing.daemon.confined.sandbox import confine
confine([sys.argv[3]], devices=[sys.argv[1]])
def opens(path, flags):
    try:
        os.close(os.open(path, flags))
    except OSError as e:
        return type(e).__name__
    return True
print(json.dumps([opens(path, flags) for path in sys.argv[1:] for flags in (os.O_RDONLY, os.O_RDWR)]))
"""


def test_only_the_devices_are_written_to(tmp_path: Path) -> None:
    if landlock_abi() < 1:
        pytest.skip("the kernel has no Landlock")
    for name in ("device", "hidden", "readable"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    paths = [str(tmp_path / name / "file") for name in ("device", "hidden", "readable")]
    done = subprocess.run([sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, check=True)
    refused = "PermissionError"
    assert json.loads(done.stdout) == [True, True, refused, refused, True, refused]
