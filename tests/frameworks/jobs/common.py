"""What the jobs share: the fault, and the count of collectives that PyTorch's own flight recorder keeps.

The harness and the ranks exchange files in a folder: ``go`` asks for the fault, ``fault-RANK`` is its time, ``count``
asks for ``counts-RANK``: a JSON object, operation -> number.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections import Counter
from pathlib import Path

__all__ = ("STEP_S", "count_when_asked", "download_shard", "write_counts")

STEP_S = 0.05
FOREVER_S = 1_000_000


def download_shard(folder: Path, rank: int) -> None:
    """The fault: rank 1 waits for a server once the harness asks for it."""
    if rank == 1 and (folder / "go").exists():
        (folder / f"fault-{rank}").write_text(str(time.time_ns()))
        time.sleep(FOREVER_S)  # the line that the finding names


def count_when_asked(folder: Path, rank: int) -> None:
    """Writes what the flight recorder has of this process once the harness asks, from a thread."""
    threading.Thread(target=_count, args=(folder, rank), daemon=True).start()


def _count(folder: Path, rank: int) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace

    while not (folder / "count").exists():
        time.sleep(0.1)
    entries = pickle.loads(_dump_fr_trace())["entries"]
    write_counts(folder, rank, Counter(entry["profiling_name"].partition(":")[2] for entry in entries))


def write_counts(folder: Path, rank: int, counts: Counter[str]) -> None:
    draft = folder / f"counts-{rank}.draft"
    draft.write_text(json.dumps({"pid": os.getpid(), **counts}))
    draft.rename(folder / f"counts-{rank}")
