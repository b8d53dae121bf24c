"""The main function of the collector process. The supervisor or a systemd unit starts the process with the rights that
it needs.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading

from probing.daemon.clock import until_next
from probing.daemon.collector.collector import Collector
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import restrict
from probing.daemon.confined.seccomp import COLLECTOR
from probing.daemon.supervisor.asking import collector_status
from probing.daemon.supervisor.health import Watch, stop_on_signal
from probing.daemon.supervisor.journal import log_to_stderr
from probing.daemon.supervisor.notify import Status

__all__ = ("main",)

# The time between two checks, s: _SOON_S while programs are still to be loaded, _CHECK_S after that.
_SOON_S, _CHECK_S = 0.5, 1.0
# The status that systemd shows is updated at every second check.
_STATUS_CHECKS = 2


def main() -> int:
    """Runs the collector until SIGTERM or SIGINT. Returns the exit code."""
    log_to_stderr("collector")
    config = Config.from_args(sys.argv[1:])
    ended = threading.Event()
    stop_on_signal(ended.set)
    # A garbage collection in the middle of a drain would delay it: the drain loop collects garbage between drains.
    gc.disable()
    restrict(COLLECTOR)
    watch = Watch(config.hang_s, lambda seconds: _is_well(config, seconds))
    watch.start()
    with contextlib.ExitStack() as ends:
        ends.callback(watch.stop)
        collector = Collector(config)
        ends.callback(collector.stop)
        # The watchdog stops first: shutting down the collector may take longer than the watchdog allows for a step.
        ends.callback(watch.stop)
        collector.start()
        gc.collect()
        gc.freeze()
        watch.step()
        status = Status(collector.summary)
        status.ready()
        checks, complete = 0, False
        while not ended.wait(until_next(_CHECK_S if complete else _SOON_S)):
            complete = collector.complete()
            collector.check()
            watch.step()
            checks += 1
            if checks % _STATUS_CHECKS == 0:
                status.tick()
    return 0


def _is_well(config: Config, seconds: float) -> bool:
    return float(collector_status(config.control_socket, seconds)["drain_age_ms"]) < seconds * 1000
