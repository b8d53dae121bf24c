"""The Python client: ``from probing.client import Cluster``. docs/python.md describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("Cluster",)


def __getattr__(name: str) -> Any:
    # gRPC is imported only when it is used; `probingctl --help` does not need it.
    if name == "Cluster":
        from probing.client.cluster import Cluster

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
