"""Time and CPU of a daemon that coordinates the diagnosis of a large job, for one look at the job: ``[NODES ...]``.

The nodes are simulated, in a process of their own, and answer by real calls with prepared facts of 8 ranks each, which
hang. So the coordinator and the connections take nearly all of the time. The first look opens a connection to each
node.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# The simulator is a part of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "diagnosis"))

from ports import free_port
from simulator.cast import Cast
from simulator.coordinating import coordinator
from simulator.hung_job import HUNG, RUN, culprit_of
from simulator.running import simulated
from statistics_of_blocks import table

from probing.diagnosis.ladder import diagnose

LOOKS = 5


def main() -> None:
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    rows = []
    for nodes in [int(word) for word in sys.argv[1:]] or (8, 128, 1000):
        cast = Cast(nodes, free_port(), jobs_ns=time.time_ns())
        with simulated(cast), coordinator(cast) as jobs:
            for number in range(LOOKS):
                began, cpu = time.monotonic(), time.process_time()
                [facts] = jobs.facts(HUNG, run=RUN, deep=True, timeout=5)
                gathered = time.monotonic()
                findings = diagnose(facts).findings
                ended = time.monotonic()
                silent = sum(missing.kind == "node" for missing in facts.missing)
                named = [one.rank for finding in findings for one in finding.culprits] == [culprit_of(nodes)]
                rows.append(
                    {
                        "nodes": nodes,
                        "look": number + 1,
                        "answered": nodes - silent,
                        "gathered, s": f"{gathered - began:.2f}",
                        "rules, s": f"{ended - gathered:.2f}",
                        "CPU, s": f"{time.process_time() - cpu:.2f}",
                        "names the rank": "yes" if named else "no",
                    }
                )
    print(table(rows))


if __name__ == "__main__":
    main()
