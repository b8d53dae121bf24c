"""A job into which NVRx's own code injects a fault: ``injected.py FAULT:RANK:ITERATION:NODES FOLDER``; see ranks.py.

The variable NVRX_INJECT_FAULT is the path of inject_fault.py of nvidia-resiliency-ext, which has the faults.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from types import ModuleType

from ranks import STEP_S, Job, main


def inject(job: Job, nvrx: ModuleType, fault: str, iteration: int) -> None:
    """Steps until the fault is due, injects it into this rank, and goes on."""

    def work() -> None:
        nvrx.maybe_raise_workload_exception()
        time.sleep(STEP_S)

    for _ in range(iteration):
        job.step(work)
    job.train(work)
    if job.rank == int(sys.argv[1].split(":")[1]):
        nvrx.dispatch_fault_injection(nvrx.Fault[fault], 0.0, job.begin)
    job.go_on(work)


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("inject_fault", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["inject_fault"] = module
    spec.loader.exec_module(module)
    # Its lines say what is injected, and where.
    logging.getLogger("inject_fault").disabled = True
    return module


if __name__ == "__main__":
    FAULT, _, ITERATION, _ = sys.argv[1].split(":")
    NVRX = load(os.environ["NVRX_INJECT_FAULT"])
    main({sys.argv[1]: lambda job: inject(job, NVRX, FAULT, int(ITERATION))})
