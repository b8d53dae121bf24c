"""``python -m probing.daemon.service``: the gRPC service, which has no rights of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from probing.daemon.supervisor.unit import run

__all__ = ()


def _load() -> Callable[[], int]:
    # Imported late: a library that is missing is an error line. pyarrow does without numpy where it finds none, which
    # saves 60 ms; diagnosis imports numpy once the service answers.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    import pyarrow  # noqa: F401

    del sys.modules["numpy"]
    from probing.daemon.service.process import main

    return main


if __name__ == "__main__":
    sys.exit(run(_load))
