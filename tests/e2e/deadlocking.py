"""``probingd run`` whose collector or service deadlocks once a file exists: ``deadlocking.py OPTIONS``.

The file is ``STATE_DIR/KIND.deadlock``. A process that was started in the place of such a one is as any other.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from probing.daemon.config import Config
from probing.daemon.supervisor.children import PROGRAMS, Spawner
from probing.daemon.supervisor.health import RESTARTED, guard
from probing.daemon.supervisor.loop import Supervisor
from probing.daemon.supervisor.rights import rights_table

_lock = threading.Lock()


def main() -> int:
    if sys.argv[1] in ("collector", "service"):
        kind = sys.argv.pop(1)
        return _plant(kind, Path(Config.from_args(sys.argv[1:]).state_dir) / f"{kind}.deadlock")
    logging.basicConfig(level=logging.INFO)
    config = Config.from_args(sys.argv[1:])
    rights = rights_table(config)
    planted = {kind: ("-I", __file__, kind) for kind in ("collector", "service")}
    return Supervisor(config, rights, Spawner(rights, config, {**PROGRAMS, **planted})).run()


def _plant(kind: str, file: Path) -> int:
    if kind == "collector":
        from probing.daemon.collector import process as program
        from probing.daemon.collector.drain import DrainLoop as Place

        method = "once"
    else:
        from probing.daemon.service import process as program
        from probing.daemon.service.collector_client import CollectorClient as Place

        method = "status"
    setattr(Place, method, _waiting_for_itself(getattr(Place, method), file))
    return program.main()


def _waiting_for_itself(method: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @wraps(method)
    def planted(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            if file.exists() and RESTARTED not in os.environ:
                _deadlock()
        return method(*args, **kwargs)

    return planted


def _deadlock() -> None:
    _lock.acquire()


if __name__ == "__main__":
    sys.exit(guard(main))
