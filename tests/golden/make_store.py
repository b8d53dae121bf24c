"""Makes the golden state directory of the present format: ``python tests/golden/make_store.py``.

It is made once for each format version and committed. Every later version must open it
(tests/unit/store/test_store_golden.py).
It holds sealed segments of two days and two tables, a segment that was dropped, a log part with growing dictionaries
and a torn last record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.tables import TABLES
from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.format import FORMAT_VERSION

START_NS = 1_790_000_000_000_000_000
DAY_NS = 86_400_000_000_000


def ops(first: int, count: int, ts_ns: int) -> list[dict[str, Any]]:
    """Returns rows of ``comm.ops`` with text beyond ASCII, NULLs, and a growing set of names."""
    return [
        {
            "node": "golden",
            "ts": ts_ns + i * 1_000_003,
            "job": "slurm:77.0",
            "run": "1",
            "pid": 4000 + i % 2,
            "start_ns": 990_000_000_000,
            "tid": 4100 + i % 2,
            "rank": i % 2,
            "comm": f"{0x9F3AB8812CD01E77 + i // 20:016x}"[:16],
            "comm_name": "default_pg" if i % 3 else "größe-组",
            "comm_rank": i % 2,
            "comm_size": 2,
            "backend": "gloo",
            "seq": i // 2,
            "op": "all_reduce" if i % 5 else "barrier",
            "dtype": "float32" if i % 5 else None,
            "count": 1024 if i % 5 else 0,
            "bytes": 4096 if i % 5 else 0,
            "stream": (1 << 64) - 1 if i % 7 == 0 else None,
            "async_op": None if i % 4 == 0 else i % 2 == 0,
            "timing_source": "exact",
            "state": "done",
            "error": "connection reset\nby peer" if i % 11 == 0 else None,
            "start_ns_after": 10_000 + i,
            "done_lo_ns": 200_000 + i,
            "done_hi_ns": 200_000 + i,
        }
        for i in range(first, first + count)
    ]


def losses(first: int, count: int, ts_ns: int) -> list[dict[str, Any]]:
    return [
        {
            "node": "golden",
            "ts": ts_ns + i,
            "source": "ops",
            "table_name": "comm.ops",
            "stage": "ring",
            "reason": "full",
            "ts_from": ts_ns,
            "ts_to": ts_ns + i,
            "count": None if i % 2 else i,
        }
        for i in range(first, first + count)
    ]


def batch(table: str, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=TABLES[table].physical)


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def main(target: Path) -> None:
    clock = FakeClock(mono_ns=5_000_000_000, real_ns=START_NS, boot_id="11111111-2222-3333-4444-555555555555")
    root = target / f"store-v{FORMAT_VERSION}"
    limits = StoreLimits(keep_free_bytes=0, max_age_s=36 * 3600)
    expected: dict[str, list[dict[str, Any]]] = {"comm.ops": [], "probing.losses": []}

    def append(store: Store, position: int, rows: dict[str, list[dict[str, Any]]], keep: bool = True) -> None:
        ring = {"boot_id": clock.boot_id, "map_id": 42, "position": position}
        store.append({name: [batch(name, r)] for name, r in rows.items()}, {"ops": ring})
        for name, r in rows.items():
            expected[name] += r if keep else []

    with Store.open(root, node="golden", clock=clock, limits=limits, background=False) as store:
        append(store, 1000, {"comm.ops": ops(0, 30, START_NS - 2 * DAY_NS)}, keep=False)
        store.seal(now=True)
        store.maintain()
        append(store, 2000, {"comm.ops": ops(30, 50, START_NS - DAY_NS), "probing.losses": losses(0, 5, START_NS)})
        append(store, 3000, {"comm.ops": ops(80, 50, START_NS)})
        store.seal(now=True)
        for n in range(4):
            append(
                store,
                4000 + n,
                {"comm.ops": ops(130 + 30 * n, 30, START_NS), "probing.losses": losses(5 + n, 1, START_NS)},
            )
        store.append({}, {"lifecycle": {"boot_id": clock.boot_id, "map_id": 43, "position": 7}})
        positions = store.positions
        append(store, 5000, {"comm.ops": ops(250, 10, START_NS)}, keep=False)
    part = next((root / "wal").iterdir())
    part.write_bytes(part.read_bytes()[:-9])
    (root / "lock").unlink()
    with (target / f"{root.name}.jsonl").open("w") as file:
        for line in (
            {"positions": positions},
            *({"table": t, "row": _known(r)} for t, rows in expected.items() for r in rows),
        ):
            file.write(json.dumps(line, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
