"""What builds and tests the page: node, and the packages of web/package-lock.json."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ("WEB", "node")

WEB = Path(__file__).resolve().parents[1] / "web"
_INSTALL_S = 100


def node() -> str:
    """Returns the path of node, with the packages of the page in place; skips where either cannot be had."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node here")
    # Several processes of pytest may need them at once.
    descriptor = os.open(WEB, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not (WEB / "node_modules" / "esbuild").is_dir():
            _install()
    finally:
        os.close(descriptor)
    return program


def _install() -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here, and no web/node_modules")
    words = [npm, "ci", "--no-audit", "--no-fund", "--silent"]
    done = subprocess.run(words, cwd=WEB, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm ci: {done.stderr.strip()[-300:] or done.returncode}")
