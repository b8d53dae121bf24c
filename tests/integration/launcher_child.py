"""A launcher that a test drives and may kill: ``python launcher_child.py DIRECTORY NODE WORKERS ALLOW``.

Each line on stdin is an order as JSON, answered by a line. ``DIE_AT`` in the environment: the number of the point at
which it kills itself; each call that changes a file, a process or a pipe is two points, one before and one after.
``AHEAD``: by how many seconds its clocks are ahead.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probing.groups.group import Group
from probing.groups.keys import trusted_keys
from probing.launcher.allowed import Rules
from probing.launcher.launcher import Launcher
from probing.launcher.processes import Clock
from probing.launcher.spawn import start_keeper

CHANGES = (
    (os, ("fsync", "memfd_create", "posix_spawn", "write", "ftruncate", "pidfd_open", "waitpid")),
    (Path, ("replace", "mkdir")),
    (signal, ("pidfd_send_signal",)),
)


def die_at(point: int) -> None:
    """Has this process kill itself at ``point``, counted from now."""
    left = [point]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(call: Any) -> Any:
        def changed(*arguments: Any, **named: Any) -> Any:
            count()
            result = call(*arguments, **named)
            count()
            return result

        return changed

    for where, names in CHANGES:
        for name in names:
            setattr(where, name, counted(getattr(where, name)))


class AheadClock(Clock):
    """The machine's clocks, put forward: time passes when a test says so."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def boot_ns(self) -> int:
        return super().boot_ns() + round(self.seconds * 1e9)


def answer(launcher: Launcher, clock: AheadClock, order: dict[str, Any]) -> Any:
    match order["op"]:
        case "advance":
            clock.seconds += order["seconds"]
            return clock.seconds
        case "apply":
            return launcher.apply(Group.from_json(order["group"].encode()))
        case "renew":
            return launcher.renew(order["name"], order["generation"], clock.boot_ns() / 1e9 + order["seconds"])
        case "report":
            return [asdict(row) for row in launcher.report()]
        case "clear":
            return launcher.clear(order["name"], order["generation"])
        case "reexec":
            launcher.reexec()
        case "keeper":
            return start_keeper(Path(sys.argv[1]) / "state", launcher.node)
    raise ValueError(order["op"])


def main() -> None:
    directory, node, workers, allow = sys.argv[1:5]
    if point := int(os.environ.pop("DIE_AT", "0")):
        die_at(point)
    keys = trusted_keys(Path(directory) / "keys")
    rules = Rules(keys, os.getuid(), "root", tuple(json.loads(allow)))
    clock = AheadClock(float(os.environ.get("AHEAD", "0")))
    launcher = Launcher(node, workers.split(), Path(directory) / "state", rules, clock)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        while data := os.read(0, 1 << 20):
            parts = (left.pop() + data).split(b"\n")
            left.append(parts.pop())
            for line in parts:
                orders.put(line.decode())
            launcher.wake()
        orders.put("")
        launcher.wake()

    left = [b""]
    threading.Thread(target=read, daemon=True).start()
    print(json.dumps(launcher.problem), flush=True)
    while True:
        launcher.step()
        while not orders.empty():
            if not (line := orders.get()):
                return launcher.close()
            result = answer(launcher, clock, json.loads(line))
            print(json.dumps(result), flush=True)
            launcher.step()
        launcher.wait(60)


if __name__ == "__main__":
    main()
