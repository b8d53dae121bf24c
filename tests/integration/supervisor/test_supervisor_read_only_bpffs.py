"""A BPF file system that is mounted read-only: an error says where and what to do. Mount namespaces keep others out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
MOUNTS = {
    "mounted read-only": "mount -t bpf -o ro bpf {place}",
    "made read-only with pins in it": "mount -t bpf bpf {place} && mkdir -p {place}/probingd/default/layout && "
    "mount -o remount,ro {place}",
    "bound read-only": "mount -t bpf bpf {place} && mkdir {place}/probingd && mount --bind {place} {place} && "
    "mount -o remount,bind,ro {place}",
}
_START = """
import sys
from pathlib import Path
from probing.api.errors import PrivilegeError
from probing.daemon.bpf import pins

for step in (lambda root: pins.prepare("default", root, (65534, 65534)), lambda root: pins.cleanup(pin_root=root)):
    try:
        step(Path(sys.argv[1]))
    except PrivilegeError as e:
        print(e.message, e.hint, sep="\\n")
print(pins.possible(Path(sys.argv[1])))
"""


def in_namespace(mount: str, place: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    script = f'{mount.format(place=place)} && exec "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh", sys.executable, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/")


@pytest.mark.parametrize("mount", MOUNTS.values(), ids=MOUNTS)
def test_a_start_and_a_cleanup_say_what_to_do(tmp_path: Path, mount: str) -> None:
    done = in_namespace(mount, tmp_path, "-c", _START, f"{tmp_path}/probingd")
    message = f"the BPF file system at {tmp_path} is read-only: probes cannot be pinned in it, nor removed"
    hint = f"mount -o remount,rw {tmp_path}; in a container, mount the host's /sys/fs/bpf there without readOnly"
    lines = done.stdout.splitlines()
    # An empty one has nothing to clean up.
    assert lines == [message, hint] * (1 if "-o ro" in mount else 2) + ["False"], done.stderr


def test_the_command_cleanup_has_no_traceback(tmp_path: Path) -> None:
    mount = MOUNTS["made read-only with pins in it"]
    done = in_namespace(mount, tmp_path, "-m", "probing.daemon.cli", "cleanup", f"--probes.bpffs={tmp_path}/probingd")
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"error: the BPF file system at {tmp_path} is read-only")
    assert "hint: mount -o remount,rw" in done.stderr
    assert "Traceback" not in done.stderr
