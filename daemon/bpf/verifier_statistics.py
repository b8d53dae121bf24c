"""Counts the work of the kernel's verifier over each BPF program: ``python -m probing.daemon.bpf.verifier_statistics``.

Prints JSON: the kernel, the machine, and for each program of each object [instructions processed, peak number of
states]. The kernel refuses a program for which it processes more than a million instructions
(BPF_COMPLEXITY_LIMIT_INSNS).
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path

from probing.api.errors import AttachError
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.capabilities import Features, detect
from probing.daemon.bpf.libbpf import Object
from probing.daemon.bpf.loader import ARCHITECTURES, read_object

__all__ = ("Counts", "main", "statistics")

# Program -> (instructions processed, peak number of states).
Counts = dict[str, tuple[int, int]]
# Object -> the feature without which no session loads it.
_NEEDED = {"identity": "real_inode", "python_off": "off_cpu"}
_COUNTS = re.compile(r"processed (\d+) insns .* peak_states (\d+)")


def statistics(features: Features) -> dict[str, Counts]:
    """Returns the verifier's counts of each program, by object, as loaded with ``features``.

    Objects that need a feature missing in this kernel are left out. Raises AttachError, NotFound.
    """
    names = sorted(path.name.removesuffix(".bpf.c") for path in Path(__file__).parent.glob("*.bpf.c"))
    lacking = {name for name, feature in _NEEDED.items() if not getattr(features, feature)}
    return {name: _counts_of(name, features) for name in names if name not in lacking}


def _counts_of(name: str, features: Features) -> Counts:
    with Object(*read_object(name, features)) as found:
        architecture = ARCHITECTURES.get(platform.machine(), 1)
        found.set_constants({"has_cookie": int(features.attach_cookie), "target_arch": architecture})
        for program, section in found.sections.items():
            if features.uprobe_multi and section.startswith(("uprobe", "uretprobe")):
                found.set_attach_type(program, syscalls.UPROBE_MULTI)
        for map_name in () if features.growing_maps else found.maps:
            found.preallocate(map_name)
        for ring in found.rings:
            found.resize(ring, os.sysconf("SC_PAGESIZE"))
        logs = found.load_with_statistics()
    counts: Counts = {}
    for program, log in logs.items():
        match = _COUNTS.search(log)
        if match is None:
            hint = "report the release of this kernel"
            raise AttachError(f"{name}: the verifier's log has no counts of program {program}", hint=hint)
        counts[program] = int(match[1]), int(match[2])
    return counts


def main() -> None:
    """Prints the counts on the running kernel."""
    kernel = {"kernel": os.uname().release, "machine": platform.machine()}
    print(json.dumps({**kernel, "objects": statistics(detect())}))


if __name__ == "__main__":
    main()
