"""The process that calls NVIDIA's driver. Its only right is to open the device files of the GPUs.

A call into the driver may hang forever, and the driver may crash the process, so the process has no other task. It
answers requests on descriptor 0 until the connection closes:

* ``ping``: header ``pid``.
* ``poll`` (``slow``, ``links``, ``pairs``): the payload is the JSON of ``gpu.nvml.snapshot.Snapshots.poll``. If the
  driver fails, the header has ``failed`` {``kind``, ``text``} instead, and the process ends.

When a call takes longer than ``gpu.call_timeout_s``, a watchdog answers in its place with header ``hung`` {``call``,
``device``, ``seconds``} and the waiting events, and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from glob import glob
from pathlib import Path

from probing.daemon.config import Config
from probing.daemon.confined.sandbox import confine, limit, stand_back
from probing.daemon.confined.serving import inherit, requests
from probing.daemon.gpu.nvml.calls import Calls, DriverFailed, Running, Watchdog
from probing.daemon.gpu.nvml.snapshot import Snapshots
from probing.daemon.ipc import Channel, ChannelClosed

__all__ = ("main",)

MEMORY_BYTES = 8 << 30
# The limit of CPU time of the process, s: enough for months at 1 % of a core. At the limit the kernel ends the process,
# and another is started.
CPU_SECONDS = 86_400
# The driver opens these files to read and write, and controls them by ioctl.
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvidia-caps", "/dev/nvidia-nvswitch*")
_READABLE = (
    "/proc/driver/nvidia",
    "/proc/devices",
    "/proc/modules",
    "/proc/self",
    "/sys/bus",
    "/sys/class",
    "/sys/devices",
    "/sys/module/nvidia",
    "/etc/nvidia",
    "/run/nvidia",
)


def main() -> int:
    """Serves the connection at descriptor 0 until it closes or the driver fails."""
    config = Config.from_args(sys.argv[1:]).gpu
    folder = [str(Path(config.library).parent)] if config.library else []

    def give_up_rights() -> None:
        stand_back(niceness=0)
        limit(MEMORY_BYTES, CPU_SECONDS)
        devices = [path for pattern in _DEVICES for path in glob(pattern)]  # noqa: PTH207
        confine([*_READABLE, *folder], devices=devices)

    channel = inherit(give_up_rights)
    calls, waits = Calls(config.call_timeout_s), Calls(config.call_timeout_s)
    snapshots = Snapshots(calls, waits, config.library, Path(config.sysfs))
    # One answer is sent at a time; the watchdog's answer is the last.
    sending = threading.Lock()
    Watchdog((calls, waits), lambda running, seconds: _give_up(channel, sending, snapshots, running, seconds)).start()
    with suppress(ChannelClosed):
        for request in requests(channel):
            if request.header.get("op") == "ping":
                with sending:
                    channel.send({"pid": os.getpid()})
            elif not _poll(channel, sending, snapshots, request.header):
                return 0
    return 0


def _poll(channel: Channel, sending: threading.Lock, snapshots: Snapshots, header: dict[str, object]) -> bool:
    """Answers a poll. Returns False if the driver failed."""
    try:
        wanted = {name: bool(header.get(name)) for name in ("slow", "links", "pairs")}
        payload = json.dumps(snapshots.poll(**wanted), separators=(",", ":")).encode()
    except DriverFailed as e:
        failed = {"failed": {"kind": e.kind, "text": e.text}, "events": snapshots.waiting_events()}
        with sending:
            channel.send(failed)
        return False
    with sending:
        channel.send({}, payload)
    return True


def _give_up(channel: Channel, sending: threading.Lock, snapshots: Snapshots, running: Running, seconds: float) -> None:
    with suppress(Exception):
        hung = {"call": running.name, "device": running.device.partition(" ")[0], "seconds": round(seconds, 1)}
        with sending:
            channel.send({"hung": hung, "events": snapshots.waiting_events()}, timeout=1.0)
    # An orderly exit would wait for the stuck thread.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
