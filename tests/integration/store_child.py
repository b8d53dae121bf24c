"""Stands for a collector: drains a numbered stream into a store, seals on the way, and says what was acknowledged.

Arguments: state directory, rows a record at most. On stdout, a line for each: ``open POSITION``, ``ack POSITION``.
The stream is the integers; a record holds those behind the last position, as a ring would give them.
"""

from __future__ import annotations

import random
import sys

import pyarrow as pa

from probing.api.tables import TABLES
from probing.daemon.store import Store, StoreLimits

EVENTS = TABLES["process.events"]


def batch(first: int, count: int) -> pa.RecordBatch:
    columns = {name: [None] * count for name in EVENTS.physical.names}
    columns["pid"] = list(range(first, first + count))
    columns["ts"] = [1_790_000_000_000_000_000 + i for i in columns["pid"]]
    columns["job"] = [f"job-{i % 50}" for i in columns["pid"]]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[f.name], f.type) for f in EVENTS.physical], schema=EVENTS.physical
    )


def main() -> None:
    limits = StoreLimits(part_bytes=1 << 16, keep_free_bytes=0, max_age_s=1e9, sync_interval_s=0.01)
    store = Store.open(sys.argv[1], node="n1", limits=limits)
    done = store.positions.get("ring", {}).get("position", 0)
    print("open", done, flush=True)
    chance = random.Random(done)
    while True:
        count = chance.randint(1, int(sys.argv[2]))
        position = {"ring": {"boot_id": "b", "map_id": 1, "position": done + count}}
        store.append({"process.events": [batch(done, count)]}, position)
        done += count
        print("ack", done, flush=True)


if __name__ == "__main__":
    main()
