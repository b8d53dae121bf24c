"""A root file system with Debian and systemd for the guests, made once: ``root_image(cache)``."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

from kernels import run

__all__ = ("disk_of", "root_image")

# The packages of probingd depend on its Python.
SUITE = "bookworm"
PACKAGES = ("dbus", "kmod", "libbpf1", "procps", "python3", "qemu-guest-agent", "systemd-sysv", "udev")
# Units that a guest of some minutes does not need, or that would start at another time in each guest.
MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("getty@tty1.service", "serial-getty@ttyS0.service", "systemd-udev-settle.service"),
)
SIZE = "4G"


def root_image(cache: Path) -> Path:
    """Returns an ext4 image that stays unchanged: each guest writes into a layer of its own above it.

    The image is made anew when this file changes.
    """
    recipe = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    image = cache / f"root-{recipe}.ext4"
    if not image.exists():
        for old in cache.glob("root-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        tree = cache / f"root-{recipe}"
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, tree)
        shutil.rmtree(tree / "var/cache/apt/archives")
        (tree / "etc/hostname").write_text("guest\n")
        (tree / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n/dev/vdb /payload ext4 ro 0 0\n")
        (tree / "payload").mkdir()
        for unit in MASKED:
            (tree / "etc/systemd/system" / unit).symlink_to("/dev/null")
        disk_of(tree, image, SIZE)
        shutil.rmtree(tree)
    return image


def disk_of(tree: Path, image: Path, size: str) -> None:
    """Makes an ext4 file system at ``image`` with the files of ``tree``."""
    fresh = image.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    run("mkfs.ext4", "-q", "-d", tree, fresh, size)
    fresh.rename(image)
