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
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from probing.api.errors import AttachError
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.capabilities import Features, detect
from probing.daemon.bpf.libbpf import Object
from probing.daemon.bpf.loader import ARCHITECTURES, read_object

__all__ = ("Counts", "main", "stack_bytes", "statistics")

# Program -> (instructions processed, peak number of states).
Counts = dict[str, tuple[int, int]]
# Object -> the feature without which no session loads it.
_NEEDED = {"identity": "real_inode", "python_off": "off_cpu"}
_COUNTS = re.compile(r"processed (\d+) insns .* peak_states (\d+)")
# The bytes of stack of each function, in the order of the instructions.
_DEPTHS = re.compile(r"stack depth ([\d+]+)")
# BPF_JMP | BPF_CALL and BPF_LD | BPF_IMM | BPF_DW with a function as source, of linux/bpf.h: offsets to a function.
_CALL, _PSEUDO_CALL, _LOAD, _PSEUDO_FUNCTION = 0x85, 1, 0x18, 4
# check_max_stack_depth of kernels before 6.13: each function takes a multiple of this.
_STACK_UNIT = 32


def statistics(features: Features) -> dict[str, Counts]:
    """Returns the verifier's counts of each program, by object, as loaded with ``features``.

    Objects that need a feature missing in this kernel are left out. Raises AttachError, NotFound.
    """
    return {name: _counts_of(name, features) for name in _objects(features)}


def stack_bytes(features: Features) -> dict[str, dict[str, int]]:
    """Returns the bytes of stack that each program takes with its deepest chain of calls, by object.

    Kernels refuse more than 512 (MAX_BPF_STACK). They are counted as kernels before 6.13 do, which is strictest: newer
    ones give a program of deep calls a stack of its own. Objects that need a feature missing in this kernel are left
    out. Raises AttachError, NotFound.
    """
    return {name: _stacks_of(name, features) for name in _objects(features)}


def _objects(features: Features) -> list[str]:
    names = sorted(path.name.removesuffix(".bpf.c") for path in Path(__file__).parent.glob("*.bpf.c"))
    lacking = {name for name, feature in _NEEDED.items() if not getattr(features, feature)}
    return [name for name in names if name not in lacking]


@contextmanager
def _loaded(name: str, features: Features) -> Iterator[tuple[Object, dict[str, str]]]:
    """Yields a loaded object and what the verifier printed of each program."""
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
        yield found, found.load_with_statistics()


def _counts_of(name: str, features: Features) -> Counts:
    counts: Counts = {}
    with _loaded(name, features) as (_, logs):
        for program, log in logs.items():
            match = _search(_COUNTS, log, name, program)
            counts[program] = int(match[1]), int(match[2])
    return counts


def _stacks_of(name: str, features: Features) -> dict[str, int]:
    with _loaded(name, features) as (loaded, logs):
        return {
            program: _deepest(loaded.instructions(program), _search(_DEPTHS, log, name, program)[1])
            for program, log in logs.items()
        }


def _deepest(raw: bytes, depths: str) -> int:
    """Returns the bytes of stack of a program's deepest chain of calls. ``depths``: of its functions, joined by +."""
    called: dict[int, int] = {}
    for at, (code, registers, _, value) in enumerate(struct.iter_unpack("<BBhi", raw)):
        if (code, registers >> 4) in ((_CALL, _PSEUDO_CALL), (_LOAD, _PSEUDO_FUNCTION)):
            called[at] = at + 1 + value
    starts = sorted({0, *called.values()})
    sizes = [max(_STACK_UNIT, -(-int(depth) // _STACK_UNIT) * _STACK_UNIT) for depth in depths.split("+")]
    callees: list[set[int]] = [set() for _ in starts]
    for at, target in called.items():
        callees[bisect_right(starts, at) - 1].add(starts.index(target))

    # No function calls itself: the verifier refuses that.
    def below(function: int) -> int:
        return sizes[function] + max(map(below, callees[function]), default=0)

    return below(0)


def _search(pattern: re.Pattern[str], log: str, name: str, program: str) -> re.Match[str]:
    match = pattern.search(log)
    if match is None:
        hint = "report the release of this kernel"
        raise AttachError(f"{name}: the verifier's log has no counts of program {program}", hint=hint)
    return match


def main() -> None:
    """Prints the counts on the running kernel."""
    kernel = {"kernel": os.uname().release, "machine": platform.machine()}
    print(json.dumps({**kernel, "objects": statistics(detect())}))


if __name__ == "__main__":
    main()
