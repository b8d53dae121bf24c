"""Prints the GlooLayout of a torch wheel, from the record layouts that clang computes for the wheel's headers.

``python -m probing.daemon.nccl_uprobes.layouts.make_gloo SITE_PACKAGES/torch``

Needs clang++ and libstdc++.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from probing.api.errors import NotFound, ProbingError
from probing.daemon.nccl_uprobes.layouts.gloo import ABSENT, GlooLayout

__all__ = ("main", "offsets_of", "parse")

_SOURCE = """
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
using namespace c10d;
unsigned long sizes[] = {sizeof(Backend), sizeof(c10::TensorImpl), sizeof(BroadcastOptions), sizeof(AllreduceOptions),
    sizeof(ReduceOptions), sizeof(AllgatherOptions), sizeof(GatherOptions), sizeof(ScatterOptions),
    sizeof(ReduceScatterOptions), sizeof(AllToAllOptions), sizeof(BarrierOptions)};
"""
# Field of GlooLayout -> (record, member).
_MEMBERS = {
    "backend_rank": ("class c10d::Backend", "rank_"),
    "backend_size": ("class c10d::Backend", "size_"),
    "backend_uid": ("class c10d::Backend", "pg_uid_"),
    "backend_desc": ("class c10d::Backend", "pg_desc_"),
    "tensor_sizes": ("struct c10::TensorImpl", "sizes_and_strides_"),
    "tensor_numel": ("struct c10::TensorImpl", "numel_"),
    "tensor_dtype": ("struct c10::TensorImpl", "data_type_"),
    "broadcast_root": ("struct c10d::BroadcastOptions", "rootRank"),
    "broadcast_async": ("struct c10d::BroadcastOptions", "asyncOp"),
    "allreduce_redop": ("struct c10d::AllreduceOptions", "op_"),
    "allreduce_async": ("struct c10d::AllreduceOptions", "asyncOp"),
    "reduce_redop": ("struct c10d::ReduceOptions", "op_"),
    "reduce_root": ("struct c10d::ReduceOptions", "rootRank"),
    "reduce_async": ("struct c10d::ReduceOptions", "asyncOp"),
    "allgather_async": ("struct c10d::AllgatherOptions", "asyncOp"),
    "gather_root": ("struct c10d::GatherOptions", "rootRank"),
    "gather_async": ("struct c10d::GatherOptions", "asyncOp"),
    "scatter_root": ("struct c10d::ScatterOptions", "rootRank"),
    "scatter_async": ("struct c10d::ScatterOptions", "asyncOp"),
    "reduce_scatter_redop": ("struct c10d::ReduceScatterOptions", "op_"),
    "reduce_scatter_async": ("struct c10d::ReduceScatterOptions", "asyncOp"),
    "alltoall_async": ("struct c10d::AllToAllOptions", "asyncOp"),
    "barrier_async": ("struct c10d::BarrierOptions", "asyncOp"),
}
_LINE = re.compile(r"\s*(\d+)(?::\d+-\d+)? \|\s+(.*)")
_TIMEOUT = 300


def offsets_of(torch: Path) -> GlooLayout:
    """Returns the layout of the wheel unpacked at ``torch``. Raises NotFound if its headers do not compile."""
    include = torch / "include"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "layout.cpp")
        source.write_text(_SOURCE)
        command = ["clang++", "-std=c++20", "-fsyntax-only", "-Xclang", "-fdump-record-layouts"]
        command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        raise NotFound(
            f"the headers in {include} do not compile",
            hint=next((line for line in done.stderr.splitlines() if "error:" in line), "is clang++ installed?"),
        )
    return parse(done.stdout)


def parse(dump: str) -> GlooLayout:
    """Returns the layout in the output of clang's -fdump-record-layouts; ABSENT for missing members."""
    records: dict[str, list[tuple[int, str]]] = {}
    for block in dump.split("*** Dumping AST Record Layout"):
        lines = [(int(m[1]), m[2]) for line in block.splitlines() if (m := _LINE.match(line))]
        if lines:
            records.setdefault(lines[0][1], lines[1:])
    return GlooLayout(**{field: _offset(records.get(record, []), name) for field, (record, name) in _MEMBERS.items()})


def _offset(lines: list[tuple[int, str]], member: str) -> int:
    return next((offset for offset, text in lines if text.split()[-1] == member), ABSENT)


def main() -> int:
    try:
        print(offsets_of(Path(sys.argv[1])))
    except ProbingError as e:
        print(f"error: {e.message}\nhint: {e.hint}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
