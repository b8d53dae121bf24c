"""``python -m probing.daemon.collector``: the process that collects. The supervisor starts it with its rights."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading

from probing.daemon.collector.collector import Collector
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import restrict
from probing.daemon.confined.seccomp import COLLECTOR
from probing.daemon.supervisor.alive import Watch
from probing.daemon.supervisor.asking import collector_status
from probing.daemon.supervisor.fatal import guard
from probing.daemon.supervisor.notify import notify

__all__ = ("main",)


def main() -> int:
    logging.basicConfig(format="collector: %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    config = Config.from_args(sys.argv[1:])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    # A collection in the middle of a drain would be a stall: the drain loop collects when there is time.
    gc.disable()
    collector = Collector(config)
    restrict(COLLECTOR)
    watch = Watch(config.hang_s, lambda seconds: _is_well(config, seconds))
    watch.start()
    try:
        collector.start()
        gc.collect()
        gc.freeze()
        watch.step()
        notify("READY=1")
        while not ended.wait(0.5):
            collector.complete()
            collector.check()
            watch.step()
    finally:
        watch.stop()
        collector.stop()
    return 0


def _is_well(config: Config, seconds: float) -> bool:
    return float(collector_status(config.control_socket, seconds)["drain_age_ms"]) < seconds * 1000


if __name__ == "__main__":
    sys.exit(guard(main))
