"""``python -m probing.daemon.service``: the gRPC service, which has no rights of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from probing.daemon.supervisor.unit import run

__all__ = ()


def _load() -> Callable[[], int]:
    # Imported late, so that the error of a missing library becomes a line of the log.
    from probing.daemon.service.process import main

    return main


if __name__ == "__main__":
    sys.exit(run(_load))
