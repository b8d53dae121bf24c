"""``python -m probing.daemon.supervisor.ready`` waits for the daemon, and ends with 0 once it collects and answers.

It asks the collector on its control socket and then, as a client would, the service on the public socket. Under systemd
it ends with the error of the process that cannot start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from probing.api.errors import InternalError
from probing.daemon.config import CONTROL, PUBLIC, Config
from probing.daemon.ipc import ChannelClosed, ChannelTimeout
from probing.daemon.supervisor.asking import collector_status
from probing.daemon.supervisor.notify import notify
from probing.daemon.supervisor.unit import left_error, run

if TYPE_CHECKING:
    import grpc

__all__ = ("RUNNING", "Units", "error_paths", "main", "service_state")

RUNNING = ("running", "degraded", "paused")
INTERVAL_S = 0.05
ANSWER_S = 2.0
# This is below TimeoutStartSec of probingd.service, at which systemd would end this process without a reason.
GIVE_UP_S = 140.0
# systemd starts a unit again within this time, s.
GONE_S = 5.0
CGROUPS = Path("/sys/fs/cgroup")
UNIT = "probingd.service"
UNITS = ("probingd-collector.service", "probingd-service.service")


def main() -> int:
    config = Config.from_args(sys.argv[1:])
    units = Units(config, time.monotonic() + GIVE_UP_S)
    units.wait_for("the collector", lambda: _collects(config.control_socket))
    # Imported late, so that the error of a missing library becomes a line of the log.
    import grpc

    def answers() -> bool:
        with grpc.insecure_channel(f"unix:{config.socket}") as channel:
            return service_state(channel, ANSWER_S) in RUNNING

    units.wait_for("the service", answers)
    notify("STATUS=collecting and answering")
    return 0


def error_paths(config: Config) -> tuple[Path, Path]:
    """Returns the paths where the units of collector and service leave the error that ends them."""
    runtime = Path(config.runtime_dir)
    return runtime / CONTROL / "error", (runtime / PUBLIC).with_name("error")


class Units:
    """The units of the collector and the service, as this process without rights sees them."""

    def __init__(self, config: Config, deadline: float, cgroup: Path | None = None) -> None:
        self._errors = error_paths(config)
        self._deadline = deadline
        self._slice = _slice() if cgroup is None else cgroup
        self._seen = dict.fromkeys(UNITS, time.monotonic())

    def wait_for(self, who: str, answers: Callable[[], bool]) -> None:
        """Waits until ``answers`` returns True. Raises the error of a unit that cannot start, InternalError for a unit
        that is gone.
        """
        while not answers():
            for error in filter(None, map(left_error, self._errors)):
                raise error
            for unit in self._gone():
                hint = f"`systemctl status {unit}` and `journalctl -u {unit}` say why"
                raise InternalError(f"{unit} does not run", hint=hint)
            if time.monotonic() > self._deadline:
                hint = "`journalctl -u 'probingd-*'` says what it waits for"
                raise InternalError(f"{who} does not answer after {GIVE_UP_S:.0f} s", hint=hint)
            time.sleep(INTERVAL_S)

    def _gone(self) -> Iterator[str]:
        """Yields the units that had no process for a while; none if their control groups cannot be seen."""
        now = time.monotonic()
        if self._slice is None:
            return
        for unit in UNITS:
            if _runs(self._slice / unit):
                self._seen[unit] = now
            elif now > self._seen[unit] + GONE_S:
                yield unit


def _slice() -> Path | None:
    """Returns the control group that contains all units, the parent of this process's group; None outside of a unit,
    or with cgroup v1.
    """
    try:
        own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    except OSError:
        return None
    return (CGROUPS / own).parent if Path(own).name == UNIT else None


def _runs(cgroup: Path) -> bool:
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except OSError:
        return False


def _collects(path: str) -> bool:
    try:
        return collector_status(path, ANSWER_S).get("state") in RUNNING
    except (ChannelClosed, ChannelTimeout):
        return False


def service_state(channel: grpc.Channel, timeout: float) -> str | None:
    """Returns the ``state`` of the service; None without an answer within ``timeout`` seconds."""
    import grpc

    from probing.api.proto.probing.v1.node_pb2 import StatusRequest
    from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub

    try:
        return str(NodeStub(channel).Status(StatusRequest(), timeout=timeout).state)
    except (grpc.RpcError, ValueError):
        # ValueError: the channel was closed.
        return None


if __name__ == "__main__":
    sys.exit(run(lambda: main))
