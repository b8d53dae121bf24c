"""Two ranks of gloo that wait for each other: ``gloo_waits.py LIST`` with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

It says ``ready`` and takes lines of stdin: ``recv`` and ``any``, rank 0 receives what rank 1 does not send, until the
patience of their group (2 s) or rank 1 ends; ``barrier``, the same with a barrier of the group; ``many``, rank 0
begins to receive 5,000 messages, which rank 1 sends at ``send``. It answers ``done`` when the wait has ended, on rank 1
at once.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=2)
MESSAGES = 5000


def exchange(what: str, group: Any, received: list[dist.Work | None]) -> None:
    if what == "many" and dist.get_rank() == 0:
        received += [dist.irecv(torch.empty(1), 1, group=group) for _ in range(MESSAGES)]
    elif what == "send" and dist.get_rank() == 0:
        for work in received:
            assert work is not None
            work.wait()
    elif what == "send":
        for _ in range(MESSAGES):
            dist.send(torch.ones(1), 0, group=group)


def main() -> None:
    dist.init_process_group("gloo")
    short = dist.new_group([0, 1], timeout=PATIENCE, group_desc="impatient")
    patient = dist.new_group([0, 1], group_desc="patient")
    received: list[dist.Work | None] = []
    print("ready", flush=True)
    for line in sys.stdin:
        what, whom = line.split()
        group = short if whom == "short" else patient
        if what in ("many", "send"):
            exchange(what, group, received)
        elif dist.get_rank() == 0:
            try:
                if what == "recv":
                    dist.recv(torch.empty(5), 1, group=group)
                elif what == "any":
                    dist.recv(torch.empty(7), group=group)
                else:
                    dist.barrier(group)
            except RuntimeError:
                pass
        print("done", flush=True)
    # A group that has failed cannot be destroyed in order.
    os._exit(0)


if __name__ == "__main__":
    main()
