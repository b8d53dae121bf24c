"""Makes rows of ``probing.versions``: the daemon, what it runs on, and its libraries."""

from __future__ import annotations

import os
import platform
from functools import lru_cache

import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.bpf.library import library

__all__ = ("version_batch",)

_PACKAGES = ("probingd", "duckdb", "grpcio", "protobuf", "pyarrow", "sqlglot", "numpy")
_MAX_TEXT = 200


def version_batch(node: str, now_ns: int) -> pa.RecordBatch:
    """Returns the rows; ``now_ns``: UTC."""
    rows = [{"node": node, "ts": now_ns, "name": name, "version": text} for name, text in _versions().items()]
    return batch_of("probing.versions", rows)


@lru_cache(maxsize=1)
def _versions() -> dict[str, str | None]:
    kernel = os.uname()
    return {
        **{name: _package(name) for name in _PACKAGES},
        "kernel": kernel.release,
        "machine": kernel.machine,
        "distribution": _distribution(),
        "python": platform.python_version(),
        "libbpf": str(library()),
    }


def _package(name: str) -> str | None:
    # Imported late: it takes 10 ms, and few ask.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _distribution() -> str | None:
    """The system that the daemon sees: in a container, that of the image. os-release(5)."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")[:_MAX_TEXT] or None
    except OSError:
        return None
