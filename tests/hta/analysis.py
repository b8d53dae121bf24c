"""Prints as JSON what Holistic Trace Analysis finds in a directory. It runs with the Python of .build/hta."""

from __future__ import annotations

import json
import sys

from hta.trace_analysis import TraceAnalysis

analysis = TraceAnalysis(trace_dir=sys.argv[1])
kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
overlap = analysis.get_comm_comp_overlap(visualize=False)
json.dump(
    {
        "ranks": sorted(int(rank) for rank in analysis.t.get_all_traces()),
        "steps": [int(step) for step in analysis.get_profiler_steps()],
        "stragglers": [int(rank) for rank in analysis.get_potential_stragglers(num_candidates=1)],
        "us_by_kind": dict(zip(kinds["kernel_type"], (int(us) for us in kinds["sum"]), strict=True)),
        "us_by_kernel": [
            [str(row["name"]), int(row["rank"]), int(row["sum (us)"])] for row in kernels.to_dict("records")
        ],
        "overlap": [float(share) for share in overlap["comp_comm_overlap_pctg"]],
    },
    sys.stdout,
)
