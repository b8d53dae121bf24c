"""Queries that know what they must count, while a store is sealed, merged and shortened: ``counting.py --seconds 600``.

On stdout is a summary in JSON; the first count that is wrong ends the run with an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from sealing_load import Counts, count, running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--records", type=float, default=200.0, help="records a second, of 220 rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="probingd-counting-") as folder:
        Path(folder).chmod(0o755)
        with running(Path(folder), options.records) as machine:
            seen, begin = Counts(), time.monotonic()
            most = 0
            while time.monotonic() - begin < options.seconds:
                count(machine, seen)
                most = max(most, machine.store.status()["segments"])
            status = machine.store.status()
    kept = ("rows", "sealed_parts", "segments", "merged_segments", "merged_rows", "dropped_segments", "dropped_rows")
    print(json.dumps({"queries": seen.queries, "most_segments": most, **{name: status[name] for name in kept}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
