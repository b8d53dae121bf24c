"""``diagnose --flight-recorder`` on PyTorch's own dumps of three gloo ranks, of which rank 1 is elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ports import free_port

# Rank 1 does not call the last all_reduce. Each rank dumps once it stands, as the others see by its file.
JOB = """
import os, pathlib, sys, threading, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo")
pair = dist.new_group([0, 2])
for _ in range(5):
    dist.all_reduce(torch.ones(7))
if rank != 1:
    dist.all_reduce(torch.ones(3), group=pair)
    threading.Thread(target=dist.all_reduce, args=(torch.ones(23),), daemon=True).start()
while True:
    time.sleep(0.1)
    dump = _dump_fr_trace()
    # Seven calls: five of all ranks, the one of the pair, and the last, which hangs.
    if rank == 1 or dump.count(b"time_created_ns") and len(__import__("pickle").loads(dump)["entries"]) >= 7:
        break
draft = folder / f"{rank}.draft"
draft.write_bytes(dump)
draft.rename(folder / f"gloo_trace_rank_{rank}")
while len(list(folder.glob("gloo_trace_rank_*"))) < 3:
    time.sleep(0.1)
os._exit(0)
"""
PROGRAM = Path(sys.executable).with_name("probingctl")


def test_the_rank_that_is_elsewhere_is_named_from_gloos_own_dumps(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCH_FR_BUFFER_SIZE": "50"}
    ranks = [
        subprocess.Popen(
            (sys.executable, "-c", JOB, str(traces)), env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    shown = subprocess.run((PROGRAM, "diagnose", "--flight-recorder", str(traces)), capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (3, "")
    assert shown.stdout.startswith("Rank 1 holds up 2 ranks: all that it called has completed")
    assert "ranks 0,2 wait in all_reduce seq 6 of default_pg for rank 1" in shown.stdout
