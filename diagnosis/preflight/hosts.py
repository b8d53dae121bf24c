"""Checks of hosts before a job: their GPUs, disks, shared memory and versions."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import share_text, size
from probing.diagnosis.preflight.facts import Case, Device, FileSystem, NodeFacts
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, compared, names, skipped

__all__ = ("check_disks", "check_gpus", "check_health", "check_shared_memory", "check_versions")

GPUS = "gpus"


def check_gpus(case: Case) -> Iterator[Result]:
    """Fails for entries of CUDA_VISIBLE_DEVICES that name no GPU, and if fewer GPUs are visible than ranks need."""
    with_gpus = [node for node in case.nodes if _whole(node)]
    good = []
    for node in case.nodes:
        if node not in with_gpus:
            why = node.problem("gpus") or "the node has none, or they are not read"
            if with_gpus and not node.problem("gpus"):
                yield Result(GPUS, FAIL, f"{node.node} has no GPU, others have", (node.node,), "load its driver")
            else:
                yield skipped(GPUS, f"no GPUs of {node.node} are known: {why}", [node.node])
            continue
        found = list(_visible(case, node))
        yield from found
        if not found and case.variable(node, "CUDA_VISIBLE_DEVICES"):
            good.append(node.node)
    if good:
        yield Result(GPUS, PASS, f"CUDA_VISIBLE_DEVICES names existing GPUs on {names(good)}")
    if with_gpus:
        counts = {node.node: str(len(_whole(node))) for node in with_gpus}
        yield from compared(GPUS, "the number of GPUs,", counts, state=WARN, hint="look for a lost GPU")
        models = {n.node: ", ".join(sorted({d.name or "unknown" for d in _whole(n)})) for n in with_gpus}
        yield from compared(GPUS, "the model,", models, state=WARN, hint="the slowest model sets the pace of all")


def _whole(node: NodeFacts) -> list[Device]:
    return [device for device in node.devices if device.mig is None and device.state != "gone"]


def _visible(case: Case, node: NodeFacts) -> Iterator[Result]:
    value = case.variable(node, "CUDA_VISIBLE_DEVICES")
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        return
    # CUDA ignores the list from the first unknown entry on.
    unknown = [part for part in parts if not any(_is(part, device) for device in node.devices)]
    text = f"CUDA_VISIBLE_DEVICES={value} on {node.node}"
    if unknown:
        hint = "CUDA ignores the first unknown entry and all entries after it"
        yield Result(
            GPUS, FAIL, f"{text} names {', '.join(unknown)}, which is not a GPU of this node", (node.node,), hint
        )
    elif len(set(parts)) < len(parts):
        yield Result(GPUS, FAIL, f"{text} names a GPU twice", (node.node,), "name each GPU once, or CUDA sees none")
    elif (needed := len({r.local_rank for r in node.ranks if r.local_rank is not None})) > len(parts) > 1:
        yield Result(GPUS, FAIL, f"{text} has fewer GPUs than the {needed} ranks there", (node.node,))


def _is(part: str, device: Device) -> bool:
    if part.isascii() and part.isdigit():
        return device.mig is None and device.device_id == int(part[:9])
    # A UUID may be shortened, as long as only one GPU matches.
    return bool(device.uuid) and len(part) > 4 and str(device.uuid).lower().startswith(part.lower())


DISK = "disk"
LEAST_SHARE, LOW_SHARE = 0.02, 0.1
# A small free share of a huge disk is no problem if more bytes than this are free.
PLENTY_BYTES = 200 << 30
# Types of file systems that are not checked: in memory, overlays, and read-only images, which are always full.
_IGNORED = ("squashfs", "iso9660", "erofs", "overlay", "tmpfs", "devtmpfs", "ramfs")


def check_disks(case: Case) -> Iterator[Result]:
    """Fails for a file system that does not answer or has less free space than LEAST_SHARE; warns below LOW_SHARE."""
    good = []
    for node in case.nodes:
        if not node.file_systems:
            why = node.problem("file_systems") or "none were read"
            yield skipped(DISK, f"the file systems of {node.node} are not known: {why}", [node.node])
            continue
        found = [result for fs in node.file_systems for result in _disk_results(node.node, fs)]
        yield from found
        if not found:
            good.append(node.node)
    if good:
        yield Result(DISK, PASS, f"file systems have space and answer on {names(good)}")


def _disk_results(node: str, fs: FileSystem) -> Iterator[Result]:
    if fs.answers is False:
        yield Result(DISK, FAIL, f"{fs.mount_point} of {node} does not answer", (node,), "look at its server or disk")
        return
    if fs.read_only or fs.fs_type in _IGNORED or not fs.size_bytes or fs.available_bytes is None:
        return
    share = fs.available_bytes / fs.size_bytes
    if share < LOW_SHARE and fs.available_bytes < PLENTY_BYTES:
        text = f"{fs.mount_point} of {node} has {size(fs.available_bytes)} free, {share_text(share)}"
        yield Result(DISK, FAIL if share < LEAST_SHARE else WARN, text, (node,), "make room for checkpoints and logs")
    if fs.inodes and fs.inodes_used is not None and fs.inodes_used > 0.98 * fs.inodes:
        yield Result(DISK, FAIL, f"{fs.mount_point} of {node} has no inodes left", (node,), "remove small files")


HEALTH = "gpu_health"
HOT_C, TOO_HOT_C = 80.0, 85.0
_THROTTLED = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
_RESET = "drain the node and reset the GPU"


def check_health(case: Case) -> Iterator[Result]:
    """Fails for faults that make a job die or compute wrongly, and warns for faults that make it slow."""
    good = []
    for node in case.nodes:
        if not node.devices:
            continue
        found = [
            Result(HEALTH, state, f"GPU {device.device_id} of {node.node} {text}", (node.node,), hint)
            for device in node.devices
            for state, text, hint in _health_results(device)
        ]
        yield from found
        if not found:
            good.append(node.node)
    if good:
        yield Result(HEALTH, PASS, f"GPUs are cool and without errors on {names(good)}")
    elif not any(node.devices for node in case.nodes) and case.nodes:
        yield skipped(HEALTH, "no node shows a GPU")


def _health_results(device: Device) -> Iterator[tuple[str, str, str]]:
    if device.state in ("lost", "gone"):
        yield FAIL, f"is {device.state}: {device.reason or 'no reason is known'}", _RESET
    if device.recovery_action not in (None, "none"):
        yield FAIL, f"wants the recovery action {device.recovery_action}", _RESET
    if device.ecc_uncorrected:
        yield FAIL, f"has {device.ecc_uncorrected} uncorrected memory errors since the driver was loaded", _RESET
    if device.remap_failed:
        yield FAIL, "has a row of memory that could not be remapped", "replace the board"
    elif device.remap_pending or device.retirement_pending:
        yield FAIL, "has memory that waits for a reset to be remapped", _RESET
    if device.temperature_c is not None and device.temperature_c >= HOT_C:
        hint = "look at fans, air flow and neighbours"
        yield FAIL if device.temperature_c >= TOO_HOT_C else WARN, f"has {device.temperature_c:.0f} C", hint
    if reasons := [r for r in (device.clock_event_reasons or "").split(",") if r in _THROTTLED]:
        yield WARN, f"is slowed down: {', '.join(reasons)}", "look at its temperature and power supply"


SHARED_MEMORY = "shared_memory"
# NCCL takes about 10 MB for each pair of ranks on a node; a worker of a data loader takes some hundred MB.
LEAST_BYTES = 1 << 30
GOOD_BYTES = 8 << 30
_SHM = "/dev/shm"  # noqa: S108
_MEMORY_HINT = "mount /dev/shm with a larger size, in containers by --shm-size or an emptyDir of medium Memory"


def check_shared_memory(case: Case) -> Iterator[Result]:
    """Yields a failure for less than LEAST_BYTES of free memory, and a warning for less than GOOD_BYTES."""
    good: dict[str, int] = {}
    for node in case.nodes:
        found = next((fs for fs in node.file_systems if fs.mount_point == _SHM), None)
        if found is None or found.available_bytes is None:
            why = node.problem("file_systems") or "it has none, or it was not read"
            yield skipped(SHARED_MEMORY, f"{_SHM} of {node.node} is not known: {why}", [node.node])
            continue
        free = found.available_bytes
        if free >= GOOD_BYTES:
            good[node.node] = free
            continue
        text = f"{_SHM} of {node.node} has {size(free)} free"
        yield Result(SHARED_MEMORY, FAIL if free < LEAST_BYTES else WARN, text, (node.node,), _MEMORY_HINT)
    if good:
        least = f"{'at least ' if len(good) > 1 else ''}{size(min(good.values()))}"
        yield Result(SHARED_MEMORY, PASS, f"{_SHM} has {least} free on {names(good)}")


VERSIONS = "versions"
_OF_PYTHON = ("python", "torch", "cuda", "nccl")
_OF_NODE = ("driver", "kernel")
_TITLES = {
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "nccl": "NCCL",
    "driver": "the GPU driver",
    "kernel": "the kernel",
}
_VERSION_HINT = "use one image, or one environment, on all nodes"


def check_versions(case: Case) -> Iterator[Result]:
    """Compares each version between nodes; a version that only some nodes have is a difference."""
    answered = [node for node in case.nodes if not node.problem("versions")]
    for node in case.nodes:
        if why := node.problem("versions"):
            yield skipped(VERSIONS, f"the versions of {node.node} are not known: {why}", [node.node])
    if not case.python and case.nodes:
        yield skipped(
            VERSIONS, "Python, torch, CUDA and NCCL were not asked for: name the interpreter with --python PATH"
        )
    for name in (*(_OF_PYTHON if case.python else ()), *_OF_NODE):
        chosen = answered if name in _OF_PYTHON else list(case.nodes)
        values = {node.node: next((v.value for v in node.versions if v.name == name), "") for node in chosen}
        if not any(values.values()):
            continue
        if name == "kernel" or all(values.values()):
            state = WARN if name == "kernel" else FAIL
            yield from compared(VERSIONS, _TITLES[name], values, state=state, hint=_VERSION_HINT)
        else:
            without = [node for node, value in values.items() if not value]
            others = sorted({value for value in values.values() if value})
            text = f"{names(without)} without {_TITLES[name]}, the others have {names(others)}"
            yield Result(VERSIONS, FAIL, text, tuple(sorted(without)), _VERSION_HINT)
