"""``make bench``: every benchmark in turn; ``make bench BENCH=at_rest`` one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ALL = (
    *("ring_to_log", "overload", "start_to_first_event", "at_rest", "cost_to_job"),
    *("stacks_on_demand", "sampling", "diagnose", "gloo_hits", "nccl_hits", "nccl_ingest"),
    *("query_beside_duckdb", "client_start", "membership", "fanout", "large_job", "timeline", "page", "job_rows"),
)


def main() -> None:
    for name in sys.argv[1:] or ALL:
        print(f"## {name}", flush=True)
        subprocess.run([sys.executable, HERE / f"{name}.py"], check=True)


if __name__ == "__main__":
    main()
