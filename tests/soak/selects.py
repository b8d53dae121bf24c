"""Compares many nodes with one database: ``python tests/soak/selects.py [--selects 4000] [--seed 1000]``.

On stdout a summary in JSON. A SELECT whose rows differ is printed on stderr with the seed of its world; the exit code
is then 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from federation_support import Nodes
from select_grammar import select, world

from probing.api.errors import ProbingError

_EACH = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--selects", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    kinds: collections.Counter[str] = collections.Counter()
    wrong = 0
    for seed in range(given.seed, given.seed + -(-given.selects // _EACH)):
        random = Random(seed)
        nodes = Nodes(world(random))
        for _ in range(_EACH):
            sql = select(random)
            try:
                nodes.check(sql)
                kinds[nodes.plan(sql).kind] += 1
            except (AssertionError, ProbingError) as e:
                wrong += 1
                print(f"world {seed}: {sql}\n  {e}", file=sys.stderr)
        nodes.close()
    json.dump({"selects": kinds.total() + wrong, "wrong": wrong, "plans": kinds}, sys.stdout)
    print()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
