"""Fills a small file system with a store, in a mount namespace of its own. Argument: an empty directory to mount on."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from store_child import batch

from probing.api.errors import StoreFull
from probing.daemon.store import Store, StoreLimits


def incompressible(first: int, count: int) -> pa.RecordBatch:
    chance = random.Random(first)
    rows = batch(first, count)
    details = pa.array([chance.randbytes(16).hex() for _ in range(count)])
    return rows.set_column(rows.schema.get_field_index("detail"), rows.schema.field("detail"), details)


def main() -> None:
    mount = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], check=True)
    limits = StoreLimits(part_bytes=16384, keep_free_bytes=0, max_age_s=1e9)
    ballast = mount / "ballast"
    ballast.write_bytes(b"x" * (64 << 10))

    # Many times more than fits: the oldest segments go, and appending never fails.
    store = Store.open(mount / "state", node="n1", limits=limits, background=False)
    done = 0
    for _ in range(400):
        position = {"boot_id": "b", "map_id": 1, "position": done + 50}
        store.append({"process.events": [incompressible(done, 50)]}, {"ring": position})
        done += 50
        store.sync()
        # Sealing may find no space: it makes some, and the next round seals.
        with contextlib.suppress(StoreFull):
            store.maintain()
    kept = sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())
    assert kept == list(range(kept[0], done)), "a gap that retention did not make"
    assert store.status()["dropped_rows"] == kept[0] > 0

    # Somebody else takes all the space, also that of the oldest segments: refused, and nothing acknowledged is lost.
    refused = False
    with ballast.open("ab", buffering=0) as file:
        while not refused:
            with contextlib.suppress(OSError):
                file.write(b"x" * 4096)
            try:
                store.append({"process.events": [incompressible(done, 50)]}, {})
                done += 50
            except StoreFull:
                refused = True
    assert store.status()["state"] == "degraded"
    kept = sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())
    assert kept == list(range(kept[0], done))

    # A start on the full disk works, and with space back all goes on.
    store.close()
    store = Store.open(mount / "state", node="n1", limits=limits, background=False)
    assert sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist()) == kept
    ballast.unlink()
    store.append({"process.events": [incompressible(done, 50)]}, {})
    store.seal(now=True)
    store.maintain()
    status = store.status()
    assert status["state"] == "running", status["reason"]
    store.close()
    print("fine")


if __name__ == "__main__":
    main()
