"""Recognizes a process that runs, or that could run but lacks CPU or memory."""

from __future__ import annotations

import re

from probing.api.text import size
from probing.diagnosis.activity.scene import Scene, Seen, is_library
from probing.diagnosis.affinity import crowd_text, process_text
from probing.diagnosis.facts import Frame
from probing.diagnosis.words import clean

__all__ = (
    "REGEX_FILES",
    "find_collecting",
    "find_compiling",
    "find_computing",
    "find_hindered",
    "find_matching",
    "is_compiling",
    "uses_cpu",
)

# A process counts as throttled, starved or busy if it was in that state for at least these shares of the time between
# two readings.
_THROTTLED, _STARVED, _BUSY = 0.2, 0.4, 0.2
# A thread counts as working in a function if it has been in the function for _STAYS_NS. Between two readings it must be
# on a CPU for at least _USED of the time, and on a CPU, ready to run or throttled for at least _AWAKE of the time.
_STAYS_NS, _USED, _AWAKE = 30_000_000_000, 0.05, 0.8
# Functions of CPython 3.8 to 3.14: Modules/gcmodule.c, Python/gc.c. A stripped CPython does not name them.
_COLLECTS = ("gc_collect_main", "gc_collect_generations", "gc_collect_region", "deduce_unreachable", "PyGC_Collect")
# The files of Python's module re, in Python 3.11 and later, and before. A match is recognized by Python frames in these
# files, because the C frames of a running thread are not read.
REGEX_FILES = ("/re/__init__.py", "/re.py")
_MATCHES = frozenset(("match", "fullmatch", "search", "sub", "subn", "split", "findall"))
_PATTERN = 120
_FAULTS_A_SECOND = 100
_SWAPPED_BYTES = 16 << 20
_COMPILERS = re.compile(r"(?:cc1|cc1plus|gcc|g\+\+|c\+\+|clang.*|nvcc|cicc|ptxas|cudafe\+\+|ninja|ld|as|triton.*)")
_COMPILING = re.compile(
    r"torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph|bytecode_\w+|variables/\w+)\.py"
    r"|torch/_inductor/(?:graph|scheduler|lowering|async_compile|cpp_builder|cpu_vec_isa|autotune_process|ir)\.py"
    r"|torch/_inductor/(?:select_algorithm|pattern_matcher|codegen/.*|compile_worker/.*|fx_passes/.*)\.py"
    r"|torch/(?:fx/experimental|_subclasses)/\w+\.py"
    r"|torch/_functorch/_aot_autograd/(?:dispatch_and_compile_graph|jit_compile|frontend_utils)\w*\.py"
    r"|torch/utils/cpp_extension\.py|triton/compiler/\w+\.py"
)


def is_compiling(frame: Frame) -> bool:
    """Returns whether a frame belongs to a compiler of the program: torch.compile, Triton or C++ extensions."""
    return not frame.native and _COMPILING.search(frame.file) is not None


def find_compiling(scene: Scene) -> Seen | None:
    """Returns whether the process compiles, itself or in a child."""
    frame = next((f for f in scene.python if is_compiling(f)), None)
    child = next((c for c in scene.condition.children if _COMPILERS.fullmatch(c[0]) and c[2] != "Z"), None)
    waits = scene.condition.target_kind == "child" or frame is not None
    if frame is None and (child is None or not waits):
        return None
    evidence = f"its child {clean(child[0])} (pid {child[1]}) is in state {child[2]}" if child else ""
    # A compilation counts as progress, because it ends by itself unless the child is stopped. Without a child, a
    # grandchild or another rank may run the compiler.
    runs = child is None or child[2] not in ("T", "t")
    where = scene.where if scene.user is not None and not is_library(scene.user) else ""
    return Seen("compiling", f"compiles{where}", frame=scene.user, progressing=runs, evidence=(evidence,))


def find_collecting(scene: Scene) -> Seen | None:
    """Returns whether the main thread collects garbage, which takes longer the more objects there are."""
    if not scene.runs_in(*_COLLECTS):
        return None
    return Seen("garbage_collection", f"collects garbage{scene.where}", frame=scene.user, progressing=True)


def find_matching(scene: Scene) -> Seen | None:
    """Returns whether the main thread matches a regular expression, which may take forever if it backtracks."""
    inner = scene.python[0] if scene.python else None
    in_module = inner is not None and inner.file.endswith(REGEX_FILES) and inner.func in _MATCHES
    still = scene.main is not None and not scene.main.moving
    if not (in_module or scene.runs_in("sre_ucs", "sre_match")) or not still or scene.letter != "R":
        return None
    pattern = next((text for name, text in inner.values if name == "pattern"), "") if inner is not None else ""
    evidence = (
        f"the pattern is {clean(pattern, _PATTERN)}" if pattern else "",
        "Python's re tries all ways to match: with repetitions within repetitions the time doubles with each character",
        _used(scene),
    )
    does = f"matches a regular expression{scene.where}"
    return Seen("computing", does, frame=scene.user, evidence=evidence)


def find_hindered(scene: Scene) -> Seen | None:
    """Returns whether the process is throttled, swaps, or waits for a CPU.

    A process that used the CPU in a single function for 30 s counts as running; its lack of CPU is then only evidence.
    """
    if (swaps := _swapping(scene)) is not None:
        return swaps
    hindered = _throttled(scene) or _starved(scene)
    if hindered is None or not _stays(scene):
        return hindered
    evidence = (_used(scene), f"it {hindered.does}", *hindered.evidence)
    return Seen("computing", f"runs{scene.where}", frame=scene.user, evidence=tuple(dict.fromkeys(evidence)))


def _stays(scene: Scene) -> bool:
    """Returns whether the main thread has been in one Python function for at least 30 s, uses the CPU in it and hardly
    sleeps.
    """
    since, c = scene.main.since_ns if scene.main else None, scene.condition
    if since is None or scene.now_ns - since < _STAYS_NS:
        return False
    awake = (c.cpu_ns or 0) + (c.run_delay_ns or 0) + (c.throttled_ns or 0)
    return uses_cpu(scene, _USED) and _share(scene, awake) >= _AWAKE


def find_computing(scene: Scene) -> Seen | None:
    """Returns whether the process runs, and in which code."""
    moving = scene.main.moving if scene.main else None
    if scene.letter != "R" and not moving and not uses_cpu(scene):
        return None
    return Seen("computing", f"runs{scene.where}", frame=scene.user, evidence=(_used(scene), scene.kernel))


def uses_cpu(scene: Scene, share: float = _BUSY) -> bool:
    """Returns whether the main thread used a CPU for at least ``share`` of the time between the readings."""
    return _share(scene, scene.condition.cpu_ns) >= share


def _throttled(scene: Scene) -> Seen | None:
    c = scene.condition
    share = min(1.0, _share(scene, c.throttled_ns))
    if share < _THROTTLED or not (scene.letter == "R" or uses_cpu(scene) or _share(scene, c.process_cpu_ns) > 0.05):
        return None
    quota = f" allows {c.cpu_quota:g} CPUs" if c.cpu_quota is not None else " limits its CPU time"
    does = f"is throttled{scene.where}: its cgroup {clean(c.cgroup or '')}".rstrip() + quota
    evidence = (f"it was throttled in {share:.0%} of the time", _used(scene))
    return Seen("throttled", does, frame=scene.user, evidence=evidence)


def _swapping(scene: Scene) -> Seen | None:
    c = scene.condition
    seconds = (c.interval_ns or 0) / 1e9
    if not seconds or (c.major_faults or 0) < _FAULTS_A_SECOND * seconds or (c.swap_bytes or 0) < _SWAPPED_BYTES:
        return None
    rate = (c.major_faults or 0) / seconds
    evidence = f"{rate:.0f} major page faults a second, {size(c.swap_bytes or 0)} in swap"
    does = f"waits for memory that was swapped out{scene.where}"
    return Seen("swapping", does, frame=scene.user, evidence=(evidence, scene.kernel))


def _starved(scene: Scene) -> Seen | None:
    c = scene.condition
    share = _share(scene, c.run_delay_ns)
    if share < _STARVED or c.interval_ns is None:
        return None
    others = [
        f"{process_text(scene.facts, scene.node, name, pid)} used {ns / c.interval_ns:.0%}"
        for name, pid, ns in c.neighbours[:3]
    ]
    crowd = crowd_text(scene.facts, scene.node, scene.pid, c)
    cpus = f" ({clean(c.cpu_list)})" if c.cpu_list else ""
    evidence = f"on its CPUs: {', '.join(others)}" if others else ""
    does = f"waits for a CPU {min(share, 1):.0%} of the time{scene.where}{f': it {crowd}' if crowd else ''}"
    return Seen("starved", does, frame=scene.user, evidence=(evidence, f"CPUs that it may use: {c.cpus_allowed}{cpus}"))


def _share(scene: Scene, ns: int | None) -> float:
    interval = scene.condition.interval_ns
    return ns / interval if ns is not None and interval else 0.0


def _used(scene: Scene) -> str:
    c = scene.condition
    return f"it used a CPU for {_share(scene, c.cpu_ns):.0%} of the time" if c.interval_ns and c.cpu_ns else ""
