"""Fails every change that a store makes to a file in every way: ``python tests/soak/faults.py [--share 0.1]``.

The file system is one in memory: the process dies before and after each change, and in each write, at its start, in a
record's frame, in its body and before its last byte; writes fail, torn or whole, with EIO and ENOSPC; the manifest is
gone after a kill; and the power goes, which keeps any pages, sizes and names that were not synced. After each the store
starts, has what was acknowledged (after a power cut: synced), nothing twice, takes a row more and starts again without
a loss. On stdout a summary in JSON; the exit status is 1 when one of them fails, and each that does is printed.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import store_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of all faults, at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, begin = random.Random(options.seed), time.monotonic()
    done: collections.Counter[str] = collections.Counter()
    failed = 0
    for fault in store_faults.ways(store_faults.trace()):
        if chance.random() >= options.share:
            continue
        done[fault.operation] += 1
        try:
            store_faults.check(fault)
        except AssertionError as e:
            failed += 1
            print(f"{fault}: {e}", file=sys.stderr)
    print(json.dumps({"faults": done.total(), "failed": failed, **done, "wall_s": round(time.monotonic() - begin)}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
