"""The verifier's counts of each BPF program, by kernel: ``python tests/verifier_record.py [FILE...]`` records new ones.

It runs ``python -m probing.daemon.bpf.verifier_statistics`` here, as root; each FILE is what that printed on another
kernel. docs/verifier.json holds the counts by the first two numbers of the release, and the machine where it is not
x86-64; docs/verifier.md shows them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from probing.daemon.bpf.capabilities import detect
from probing.daemon.bpf.verifier_statistics import statistics

__all__ = ("RECORD", "grown", "series_of")

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "verifier.json"
MOST_GROWTH = 1.1
_HEAD = """# BPF programs and the verifier

The kernel's verifier follows each program along all its ways before it loads it, and refuses one with more than a
million instructions followed. The table has the instructions that it followed and, behind the slash, the most states
that it kept at a time, by kernel. A test in `tests/kernel` fails when a program grows by more than a tenth on a kernel
that is recorded, as `make vm-test` does for the kernels of its guests. `make verifier-record` accepts the counts of the
running kernel and of those guests. For another kernel, run `/opt/probingd/bin/python -I -m
probing.daemon.bpf.verifier_statistics` there and give its output to `tests/verifier_record.py`.
"""


def series_of(release: str, machine: str) -> str:
    """Returns the series of a kernel release, as 6.12 of 6.12.117+deb13-amd64, or "6.12 aarch64" on such a machine."""
    series = ".".join(release.split(".")[:2])
    return series if machine == "x86_64" else f"{series} {machine}"


def grown(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """Yields what grew by more than a tenth, or has no record. Both: object -> program -> [instructions, states]."""
    for name, programs in now.items():
        for program, (instructions, _) in programs.items():
            recorded = before.get(name, {}).get(program)
            if recorded is None:
                yield f"{name}.{program} is not recorded"
            elif instructions > recorded[0] * MOST_GROWTH:
                yield f"{name}.{program} grew from {recorded[0]} to {instructions} instructions"


def _page(record: dict[str, Any]) -> str:
    kernels = sorted(record, key=_order)
    programs = sorted({(name, program) for seen in record.values() for name in seen for program in seen[name]})
    lines = [_HEAD, f"| object | program | {' | '.join(kernels)} |", f"|---|---|{'---|' * len(kernels)}"]
    for name, program in programs:
        cells = (record[kernel].get(name, {}).get(program) for kernel in kernels)
        counts = " | ".join(f"{cell[0]:,} / {cell[1]:,}" if cell else "does not load" for cell in cells)
        lines.append(f"| {name} | `{program}` | {counts} |")
    return "\n".join(lines) + "\n"


def _order(kernel: str) -> tuple[str, list[int]]:
    series, _, machine = kernel.partition(" ")
    return machine, [int(number) for number in series.split(".")]


def main(files: list[str]) -> None:
    found = [{"kernel": os.uname().release, "machine": platform.machine(), "objects": statistics(detect())}]
    found += (json.loads(Path(file).read_text()) for file in files)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record.update({series_of(one["kernel"], one.get("machine", "x86_64")): one["objects"] for one in found})
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    (DOCS / "verifier.md").write_text(_page(record))


if __name__ == "__main__":
    main(sys.argv[1:])
