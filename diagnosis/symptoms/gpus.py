"""Symptoms of GPUs: they are lost, report errors, are throttled, or have less PCIe bandwidth than possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from probing.api.text import share_text
from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.hardware_facts import Gpu, HardwareEvent
from probing.diagnosis.symptoms.symptom import Symptom
from probing.diagnosis.words import clean
from probing.diagnosis.xids import nvlink_error, xid

__all__ = ("gpu_symptoms",)

# A GPU is throttled if its clock was held down for at least _HELD of the time. The text names the clock if it is below
# _SLOWER of its maximum.
_HELD = 0.1
_SLOWER = 0.95
# The power limit lowers all clocks at full load, so it counts only if the clock is below this share of the median clock
# of the other GPUs.
_BELOW_OTHERS = 0.9
# Limits of DcgmHealthWatch.cpp.
_MOST_RETIRED = 63
_MOST_REMAPPED = 512
_CAUSES = {
    "thermal": ("heat", "Examine fans, airflow and the temperature of the room."),
    "power_brake": ("the external power brake", "Examine the power of the rack: it asked the GPU to draw less."),
    "power_capped": ("its power limit", "Compare the power limits of the GPUs: `nvidia-smi -q -d POWER`."),
}
_FAULTS = {
    "ecc_double_bit": "memory errors that ECC cannot correct",
    "ecc_storm": "a storm of memory errors",
    "poison": "poisoned memory",
    "fatal_poison": "poisoned memory that stops it",
    "page_retirement_failed": "a page of memory that could not be retired",
    "remap_failed": "a row of memory that could not be remapped",
    "nvlink_errors": "errors of NVLink",
    "link_down": "an NVLink that is down",
    "call_hung": "a driver that does not answer",
    "driver_lost": "a driver that is gone",
}
_OF_NVLINK = frozenset(("nvlink_errors", "link_down"))
_REPAIR = "Drain the node; reset the GPU or reboot, and have the board examined if the error returns."


def gpu_symptoms(node: NodeFacts) -> Iterator[Symptom]:
    """Yields the symptoms of each GPU."""
    gpus = {gpu.device: gpu for gpu in node.hardware.gpus}
    for gpu in gpus.values():
        yield from _lost(node, gpu)
        yield from _worn(node, gpu)
        yield from _throttled(node, gpu, [other for other in gpus.values() if other is not gpu])
        yield from _narrow(node, gpu)
    for event in node.hardware.events:
        gpu_of = gpus.get(event.gpu) if event.gpu is not None else None
        if event.kind == "xid":
            yield _xid(node, event, gpu_of)
        elif event.source == "gpu" and event.kind in _FAULTS:
            yield _fault(node, event, gpu_of)


def _lost(node: NodeFacts, gpu: Gpu) -> Iterator[Symptom]:
    if gpu.state == "ok":
        return
    reason = f": {clean(gpu.reason)}" if gpu.reason else ""
    yield Symptom(
        "gpu_fault",
        node.node,
        _name(gpu.device),
        gpu.ranks,
        True,
        f"its {_name(gpu.device)} is {gpu.state}{reason}",
        f"{_name(gpu.device)} is {gpu.state}{reason}",
        None,
        (f"the driver lists it as {gpu.state}",),
        (_REPAIR,),
    )


def _worn(node: NodeFacts, gpu: Gpu) -> Iterator[Symptom]:
    worn = [
        (gpu.remap_failed, True, "has a row of memory that could not be remapped", "Replace the board."),
        (gpu.remap_pending, False, "waits for a reset to remap a row of memory", "Reset the GPU after the job."),
        (
            (gpu.remapped_uncorrected or 0) >= _MOST_REMAPPED,
            True,
            f"has remapped {gpu.remapped_uncorrected} rows of memory after errors",
            "Replace the board.",
        ),
        (
            (gpu.retired_pages or 0) >= _MOST_RETIRED,
            True,
            f"has retired {gpu.retired_pages} pages of memory",
            "Replace the board.",
        ),
        (gpu.recovery not in (None, "none"), False, f"wants recovery: {clean(gpu.recovery or '')}", _REPAIR),
    ]
    for holds, fails, text, remedy in worn:
        if holds:
            yield Symptom(
                "gpu_fault",
                node.node,
                _name(gpu.device),
                gpu.ranks,
                fails,
                f"its {_name(gpu.device)} {text}",
                f"{_name(gpu.device)} {text}",
                None,
                (),
                (remedy,),
            )


def _throttled(node: NodeFacts, gpu: Gpu, others: Sequence[Gpu]) -> Iterator[Symptom]:
    held = {"thermal": gpu.thermal, "power_brake": gpu.power_brake, "power_capped": gpu.power_capped}
    known = {name: share for name, share in held.items() if share is not None and share >= _HELD}
    name = max(known, key=known.__getitem__, default=None)
    if name is None or (name == "power_capped" and not _below(gpu, others)):
        return
    slower = gpu.clock_mhz is not None and gpu.max_clock_mhz and gpu.clock_mhz < _SLOWER * gpu.max_clock_mhz
    cause, remedy = _CAUSES[name]
    clock = f" at {gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz" if slower else ""
    text = f"is held down{clock} by {cause} {share_text(known[name])} of the time"
    evidence = [f"{_CAUSES[other][0]}: {share_text(share)} of the time" for other, share in known.items()]
    evidence += [f"it is at {gpu.temperature_c:.0f} degrees"] if gpu.temperature_c is not None else []
    yield Symptom(
        "gpu_throttled",
        node.node,
        _name(gpu.device),
        gpu.ranks,
        False,
        f"its {_name(gpu.device)} {text}",
        f"{_name(gpu.device)} {text}",
        None,
        tuple(evidence),
        (remedy,),
    )


def _below(gpu: Gpu, others: Sequence[Gpu]) -> bool:
    clocks = [other.clock_mhz for other in others if other.clock_mhz is not None and other.name == gpu.name]
    return gpu.clock_mhz is not None and bool(clocks) and gpu.clock_mhz < _BELOW_OTHERS * median(clocks)


def _narrow(node: NodeFacts, gpu: Gpu) -> Iterator[Symptom]:
    if not gpu.lanes or not gpu.max_lanes or gpu.lanes >= gpu.max_lanes:
        return
    text = f"has {gpu.lanes} of {gpu.max_lanes} lanes of PCIe"
    yield Symptom(
        "gpu_fault",
        node.node,
        _name(gpu.device),
        gpu.ranks,
        False,
        f"its {_name(gpu.device)} {text}",
        f"{_name(gpu.device)} {text}",
        None,
        (),
        ("Seat the board again, and examine the riser or the slot.",),
    )


def _xid(node: NodeFacts, event: HardwareEvent, gpu: Gpu | None) -> Symptom:
    known, error = xid(event.code), nvlink_error(event.text)
    part = _name(gpu.device) if gpu is not None else f"the GPU at {clean(event.part or '?')}"
    whose = f"its {part}" if gpu is not None else part
    text = f"reported XID {event.code}, {error.text if error else known.text}"
    return Symptom(
        "gpu_fault",
        node.node,
        part,
        gpu.ranks if gpu is not None else (),
        error.resets if error else known.fails,
        f"{whose} {text}",
        f"{part} {text}",
        event.first_ns,
        (_times(event),),
        (error.remedy if error else known.remedy,),
        event.last_ns,
        event.gpu if known.part == "nvlink" else None,
    )


def _fault(node: NodeFacts, event: HardwareEvent, gpu: Gpu | None) -> Symptom:
    part = _name(gpu.device) if gpu is not None else "NVIDIA's driver"
    text = f"reports {_FAULTS[event.kind]}"
    return Symptom(
        "gpu_fault",
        node.node,
        part,
        gpu.ranks if gpu is not None else (),
        True,
        f"its {part} {text}" if gpu is not None else f"{part} {text}",
        f"{part} {text}",
        event.first_ns,
        (_times(event),),
        (_REPAIR,),
        event.last_ns,
        event.gpu if event.kind in _OF_NVLINK else None,
    )


def _times(event: HardwareEvent) -> str:
    times = "once" if event.count == 1 else f"{event.count} times"
    return f"{times} in the last hour: {clean(event.text, 160)}" if event.text else f"{times} in the last hour"


def _name(device: int) -> str:
    return f"GPU {device}"
