"""``python -m probing.daemon.service``: the gRPC service, which has no rights of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from probing.daemon.supervisor.unit import run

__all__ = ()


def _load() -> Callable[[], int]:
    # Imported late, so that a missing library becomes an error line.
    from probing.daemon.service.process import main

    return main


if __name__ == "__main__":
    sys.exit(run(_load))
