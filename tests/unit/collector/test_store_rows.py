"""Rows of probing.store: what a real store holds."""

from __future__ import annotations

from pathlib import Path

from probing.daemon.arrow import batch_of
from probing.daemon.collector.daemon_rows import store_batch
from probing.daemon.store.store import Store


def test_the_log_and_the_segments_of_each_table_are_rows(tmp_path: Path) -> None:
    def rows() -> list[dict[str, object]]:
        found = store_batch("n0", 7_000_000_000, store.status()).to_pylist()
        assert {row["node"] for row in found} == {"n0"}
        return found

    with Store.open(tmp_path, node="n0", background=False) as store:
        cost = [{"node": "n0", "ts": ts, "process": "collector", "pid": 7} for ts in (3_000_000_000, 2_000_000_000)]
        store.append({"probing.cost": [batch_of("probing.cost", cost)]}, {})
        [log] = rows()
        assert (log["kind"], log["table_name"], log["files"], log["oldest"]) == ("log", None, 1, None)
        assert int(str(log["bytes"])) > 0
        store.seal(now=True)
        found = {row["table_name"]: row for row in rows() if row["kind"] == "segments"}
        assert found["probing.cost"]["files"] == 1
        assert found["probing.cost"]["rows"] == 2
        assert str(found["probing.cost"]["oldest"]).startswith("1970-01-01 00:00:02")
        assert [row["bytes"] for row in rows() if row["kind"] == "log"] == [0]
