"""A guest of arm64 with the wheel for it: ``Arm64Guest``, ``root_image(cache)`` and ``payload_image(folder, wheel)``.

Its Debian is unpacked and not configured, so that nothing of arm64 has to run on this machine; its init mounts what the
daemon needs and runs QEMU's guest agent.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

from debian_root import disk_of
from guest import Guest
from kernels import ROOT, fetch_apt, run

__all__ = ("PYTHON", "Arm64Guest", "payload_image", "root_image")

SUITE, PYTHON_VERSION = "bookworm", "3.11"
# apt adds their dependencies, but no essential packages. The tests compile programs with the compilers.
PACKAGES = (
    *("base-files", "base-passwd", "busybox-static", "coreutils", "dash", "findutils", "grep", "hostname", "mount"),
    *("passwd", "procps", "python3", "qemu-guest-agent", "sed", "util-linux"),
    *("binutils", "clang", "gcc", "libbpf-dev", "libc6-dev", "linux-libc-dev", "python3-dev"),
)
PYTHON = "/payload/venv/bin/python3"
# Packages that the tests import beside the daemon.
TEST_PACKAGES = ("hypothesis>=6.150", "pytest>=9", "pytest-timeout>=2.4")
# Parts of the checkout that the tests read.
TEST_FILES = ("examples", "pyproject.toml", "tests")
# The platforms of wheels that pip may choose, the newest glibc first.
PLATFORMS = (*(f"manylinux_2_{minor}_aarch64" for minor in range(28, 16, -1)), "manylinux2014_aarch64")
# `now` comes from the kernel's command line: the machine's clock has a driver that is not loaded.
INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t bpf -o mode=0711 bpf /sys/fs/bpf
mount -t tracefs trace /sys/kernel/tracing
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t tmpfs -o mode=755 run /run
mkdir /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t ext4 -o ro /dev/vdb /payload
busybox ip link set lo up
hostname arm64
date -s "@$now"
port=$(grep -l org.qemu.guest_agent.0 /sys/class/virtio-ports/*/name)
qemu-ga -m virtio-serial -p "/dev/$(basename "$(dirname "$port")")"
busybox poweroff -f
"""


class Arm64Guest(Guest):
    """A guest whose kernel and root are of arm64."""

    QEMU, CONSOLE = "qemu-system-aarch64", "ttyAMA0"
    # QEMU's own authentication of pointers: the architecture's takes half of the time.
    MACHINE = ("-machine", "virt", "-cpu", "max,pauth-impdef=on")

    def boot(self, *, parameters: str = "") -> float:
        """Like ``Guest.boot``, with the time of this machine."""
        return super().boot(parameters=f"now={int(time.time())} {parameters}")


def root_image(cache: Path) -> Path:
    """Returns an ext4 image that stays unchanged: each guest writes into a layer of its own above it."""
    image = cache / f"root-{SUITE}-arm64.ext4"
    if not image.exists():
        tree = cache / f"root-{SUITE}-arm64"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        _unpack(tree)
        for name in ("dev", "payload", "proc", "run", "sys", "tmp", "var/tmp"):
            (tree / name).mkdir(parents=True, exist_ok=True)
        for name in ("passwd", "group"):
            shutil.copy(tree / f"usr/share/base-passwd/{name}.master", tree / "etc" / name)
        # A link that the package makes when it is configured.
        (tree / "usr/bin/cc").symlink_to("gcc")
        # The headers' package has a libbpf, but the tests must use the wheel's own.
        for library in tree.glob("usr/lib/*/libbpf.so*"):
            library.unlink()
        (tree / "sbin/init").write_text(INIT)
        (tree / "sbin/init").chmod(0o755)
        disk_of(tree, image, "4G")
        shutil.rmtree(tree)
    return image


def payload_image(folder: Path, wheel: Path) -> Path:
    """Returns an ext4 image with a virtual environment that has ``wheel``, and with the tests."""
    tree = folder / "payload"
    tree.mkdir()
    environment = tree / "venv"
    site = environment / f"lib/python{PYTHON_VERSION}/site-packages"
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    run(
        *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"),
        *("--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON_VERSION, *platforms),
        *("--target", site, wheel, *TEST_PACKAGES),
    )
    # They must be newer than their sources, or the tests would compile them again.
    for compiled in site.rglob("*.bpf.o"):
        compiled.touch()
    (site / "bin").rename(environment / "bin")
    for script in (environment / "bin").iterdir():
        _, _, text = script.read_text().partition("\n")
        script.write_text(f"#!{PYTHON}\n{text}")
    (environment / "bin/python3").symlink_to("/usr/bin/python3")
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    run(f"python{PYTHON_VERSION}", "-m", "compileall", "-q", "-s", tree, "-p", "/payload", site)
    for name in TEST_FILES:
        run("cp", "-r", ROOT / name, tree / name)
    image = folder / "payload.ext4"
    disk_of(tree, image, "2G")
    shutil.rmtree(tree)
    return image


def _unpack(tree: Path) -> None:
    packages = tree.with_name("packages-arm64")
    shutil.rmtree(packages, ignore_errors=True)
    packages.mkdir()
    plan = fetch_apt(packages, SUITE, "arm64", "--simulate", "--no-install-recommends", "install", *PACKAGES)
    names = re.findall(r"^Inst (\S+) ", plan, re.MULTILINE)
    fetch_apt(packages, SUITE, "arm64", "download", *names)
    for archive in packages.glob("*.deb"):
        run("dpkg-deb", "--extract", archive, tree)
    shutil.rmtree(packages)
