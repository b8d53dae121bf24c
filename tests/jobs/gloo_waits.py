"""Two ranks of gloo that wait for each other: ``gloo_waits.py LIST`` with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

It says ``ready`` and takes lines of stdin: ``recv`` and ``any``, rank 0 receives what rank 1 does not send, until the
patience of their group (2 s) or rank 1 ends; ``barrier``, the same with a barrier of the group. It answers ``done``
when the wait has ended, on rank 1 at once.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=2)


def main() -> None:
    dist.init_process_group("gloo")
    short = dist.new_group([0, 1], timeout=PATIENCE, group_desc="impatient")
    patient = dist.new_group([0, 1], group_desc="patient")
    print("ready", flush=True)
    for line in sys.stdin:
        what, whom = line.split()
        group = short if whom == "short" else patient
        if dist.get_rank() == 0:
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
