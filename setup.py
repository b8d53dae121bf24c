"""Compiles the BPF programs into the package; everything else is in pyproject.toml.

``packaging/wheel.sh`` sets PROBINGD_BUNDLED, a folder with a libbpf for the package, and PROBINGD_PLATFORM, the tag of
the wheel that has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUNDLED = os.environ.get("PROBINGD_BUNDLED")
PLATFORM = os.environ.get("PROBINGD_PLATFORM")


class BuildWithPrograms(build_py):
    """``*.bpf.c`` become ``*.bpf.o`` beside them, so that a host needs no compiler."""

    def run(self) -> None:
        # The package is not installed while it is built: what the compiler's module imports is laid out for it.
        with tempfile.TemporaryDirectory() as tree:
            package = Path(tree, "probing")
            package.mkdir()
            for name, folder in (("__init__.py", "sdk/__init__.py"), ("api", "api"), ("daemon", "daemon")):
                (package / name).symlink_to(ROOT / folder)
            command = [sys.executable, "-m", "probing.daemon.bpf.build"]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": tree}, check=True)
        super().run()
        if BUNDLED:
            shutil.copytree(BUNDLED, Path(self.build_lib, "probing/daemon/bpf/bundled"), dirs_exist_ok=True)


class OfAPlatform(Distribution):
    """With a libbpf, the package goes where compiled ones do."""

    def has_ext_modules(self) -> bool:
        return bool(PLATFORM)


class WheelOfAPlatform(bdist_wheel):
    """A wheel for any Python; with a libbpf, for one kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", PLATFORM) if PLATFORM else super().get_tag()


setup(distclass=OfAPlatform, cmdclass={"build_py": BuildWithPrograms, "bdist_wheel": WheelOfAPlatform})
