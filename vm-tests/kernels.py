"""Debian's kernels, each with an initial RAM disk that mounts the root: ``kernel("6.12", cache)``.

A kernel's package is fetched once into the cache; nothing of it is installed. `qemu-system-*` boots both files.
"""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ("MODULES", "SUITES", "Kernel", "fetch_apt", "initrd", "kernel", "run")

ROOT = Path(__file__).resolve().parents[1]
# The suite of Debian whose kernel is of a series, by series.
SUITES = {"5.10": "bullseye", "6.1": "bookworm", "6.12": "trixie", "7.2": "sid"}
MODULES = (
    *("virtio_pci", "virtio_blk", "virtio_console", "virtio_rng", "ext4", "overlay"),
    # The root has no modules, from which the kernel would load these when they are first needed.
    *("inet_diag", "tcp_diag"),
)
# The root is the first disk.
MOUNT_ROOT = """#!/bin/sh
mount -t devtmpfs dev /dev
while read -r module; do insmod "$module"; done </modules/order
mount -t ext4 /dev/vda /root && mount --move /dev /root/dev && exec switch_root /root /sbin/init
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """``series`` is the 6.12 of the ``release`` 6.12.117+deb13-amd64."""

    series: str
    release: str
    image: Path
    initrd: Path

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in self.series.split("."))


def kernel(series: str, cache: Path, architecture: str = "amd64") -> Kernel:
    """Returns the kernel of ``series``, one of SUITES; fetches it unless the cache has it with these modules."""
    folder = cache / f"kernel-{series}-{architecture}"
    made = folder / "made"
    found = made.read_text().split() if made.exists() else []
    if found[1:] != list(MODULES):
        shutil.rmtree(folder, ignore_errors=True)
        found = [_unpack(SUITES[series], architecture, folder), *MODULES]
        initrd(folder / "initrd", folder / "tree", found[0], MODULES, MOUNT_ROOT)
        shutil.rmtree(folder / "tree")
        made.write_text(" ".join(found))
    return Kernel(series, found[0], folder / "vmlinuz", folder / "initrd")


def fetch_apt(folder: Path, suite: str, architecture: str, *words: str) -> str:
    """Runs apt-get on ``suite`` in ``folder``, which gets the downloads; returns the output."""
    script = ROOT / "packaging/dev/debian.sh"
    return run(script, folder / "apt", suite, architecture, *words, cwd=folder)


def initrd(path: Path, tree: Path, release: str, modules: tuple[str, ...], init: str) -> None:
    """Writes an initial RAM disk: the busybox and ``modules`` (in order) below ``tree``, and ``init``."""
    content = tree / "initrd"
    for folder in ("bin", "dev", "modules", "root"):
        (content / folder).mkdir(parents=True)
    shutil.copy(next(tree.glob("**/bin/busybox")), content / "bin/busybox")
    for applet in ("sh", "mount", "insmod", "switch_root"):
        (content / "bin" / applet).symlink_to("busybox")
    order = [_module(content, source) for source in _needed(tree, release, modules)]
    (content / "modules/order").write_text("".join(f"{module}\n" for module in order))
    (content / "init").write_text(init)
    (content / "init").chmod(0o755)
    with path.open("wb") as file:
        names = run("find", ".", cwd=content).encode()
        subprocess.run(("cpio", "--quiet", "-o", "-H", "newc"), input=names, stdout=file, cwd=content, check=True)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Returns the output of ``command``. Raises RuntimeError with its last lines when it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def _unpack(suite: str, architecture: str, folder: Path) -> str:
    tree = folder / "tree"
    tree.mkdir(parents=True)
    plan = fetch_apt(folder, suite, architecture, "--simulate", "install", f"linux-image-{architecture}")
    release: str
    # Newer kernels are split into packages: image, binary and modules.
    packages = re.findall(r"^Inst (linux-\S*-\d\S*) ", plan, re.MULTILINE)
    (release,) = (name.removeprefix("linux-image-") for name in packages if name.startswith("linux-image-"))
    for package in ("busybox-static", *(name for name in packages if name.endswith(release))):
        fetch_apt(folder, suite, architecture, "download", package)
    for archive in folder.glob("*.deb"):
        run("dpkg-deb", "--extract", archive, tree)
        archive.unlink()
    shutil.rmtree(folder / "apt")
    (image,) = tree.rglob("vmlinuz*")
    shutil.copy(image, folder / "vmlinuz")
    return release


def _needed(tree: Path, release: str, modules: tuple[str, ...]) -> list[Path]:
    """Returns the files of ``modules`` and of their dependencies, in the order in which they load."""
    base = next(path for path in (tree / "usr", tree) if (path / "lib/modules").is_dir())
    run("depmod", "--basedir", base, release)
    found: dict[Path, None] = {}
    for module in modules:
        shown = run("modprobe", "--dirname", base, "--set-version", release, "--show-depends", module)
        found.update(dict.fromkeys(Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod")))
    return list(found)


def _module(content: Path, source: Path) -> Path:
    name = source.name.removesuffix(".xz")
    data = source.read_bytes()
    (content / "modules" / name).write_bytes(lzma.decompress(data) if source.suffix == ".xz" else data)
    return Path("/modules") / name
