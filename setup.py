"""Compiles the BPF programs into the package; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


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


setup(cmdclass={"build_py": BuildWithPrograms})
