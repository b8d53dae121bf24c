"""``python -m probing.daemon.collector``: the process that collects."""

from __future__ import annotations

import sys
from collections.abc import Callable

from probing.daemon.supervisor.unit import run

__all__ = ()


def _load() -> Callable[[], int]:
    # Imported late, so that a missing library becomes an error line.
    from probing.daemon.collector.process import main

    return main


if __name__ == "__main__":
    sys.exit(run(_load))
