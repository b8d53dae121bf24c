"""Collects all symptoms of a node, and finds the symptoms of its processors, memory, kernel, file systems and disks.
The function for a new kind of part is added to ``_SYMPTOMS``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from probing.api.text import share_text, size, time_text
from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.hardware_facts import Disk, FileSystem, HardwareEvent
from probing.diagnosis.symptoms.gpus import gpu_symptoms
from probing.diagnosis.symptoms.network import network_symptoms
from probing.diagnosis.symptoms.symptom import FindSymptoms, Symptom
from probing.diagnosis.words import clean

__all__ = ("symptoms_of",)

_KINDS = {
    "memory_error": (False, "the memory controller reports errors", "Replace the memory module if they go on."),
    "machine_check": (True, "the processor reports errors of the hardware", "Drain the node and examine it: `mcelog`."),
    "pcie_error": (False, "PCIe reports errors", "Seat the device again; replace it or its riser if they go on."),
    "thermal": (False, "a processor is too hot and runs slower", "Examine fans and airflow."),
    "lockup": (True, "a CPU does not schedule", "Drain the node and reboot it."),
    "hung_task": (False, "tasks are blocked for minutes", "Look at what they wait for: a disk or a file server."),
    "kernel_bug": (True, "the kernel failed", "Drain the node and reboot it."),
    "sxid": (True, "an NVSwitch reports errors", "Reset the GPUs and the switch; examine it if they return."),
}


def _host_symptoms(node: NodeFacts) -> Iterator[Symptom]:
    """Yields a symptom for each kind of fault and part in the kernel's log."""
    for event in node.hardware.events:
        if event.source == "kernel" and event.kind in _KINDS:
            fails, text, remedy = _KINDS[event.kind]
            part = clean(event.part) if event.part else event.kind.replace("_", " ")
            of = f" ({part})" if event.part else ""
            times = "once" if event.count == 1 else f"{event.count} times"
            yield Symptom(
                "host_fault",
                node.node,
                part,
                (),
                fails,
                f"{text} on its node{of}",
                f"{text}{of}",
                event.first_ns,
                (f"{times} in the last hour: {clean(event.text, 160)}",),
                (remedy,),
                event.last_ns,
            )


_FULL = 0.95
_LEAST_LEFT = 1 << 30
_BUSY = 0.8
# A slow request takes longer than this, ns. Usual requests take 0.1 ms on flash and some 10 ms on a spinning disk.
_SLOW_NS = 50_000_000
_REPORTED = {
    "disk_error": "failed to read or write",
    "fs_error": "has a damaged file system",
    "file_server": "is a server that did not answer",
}


def _storage_symptoms(node: NodeFacts) -> Iterator[Symptom]:
    """Yields the symptoms of file systems and disks, including the kernel's reports about them."""
    for one in node.hardware.file_systems:
        yield from _file_system(node, one)
    for disk in node.hardware.disks:
        yield from _disk(node, disk)
    for event in node.hardware.events:
        if event.source == "kernel" and event.kind in _REPORTED:
            yield _reported(node, event)


def _file_system(node: NodeFacts, one: FileSystem) -> Iterator[Symptom]:
    name, shared = clean(one.mount_point), one.mount_point == "/dev/shm"  # noqa: S108
    ranks = () if one.rank is None else (one.rank,)
    left = one.available_bytes
    found: tuple[bool, str, str] | None = None
    if one.answers is False:
        found = True, "does not answer", f"Look at its server: {clean(one.kind or 'it')} is served by another host."
    elif one.used is not None and left is not None and one.used >= _FULL and left < _LEAST_LEFT:
        remedy = "Give the container more shared memory, as by --shm-size." if shared else "Free space on it."
        found = left == 0 or shared, f"is full: {share_text(one.used)}, {size(left)} are left", remedy
    if found:
        fails, text, remedy = found
        yield Symptom(
            "storage_fault", node.node, name, ranks, fails, f"{name} {text}", f"{name} {text}", None, (), (remedy,)
        )


def _disk(node: NodeFacts, disk: Disk) -> Iterator[Symptom]:
    slowest = max((value for value in (disk.read_latency_ns, disk.write_latency_ns) if value is not None), default=0.0)
    if (disk.busy or 0.0) < _BUSY or slowest < _SLOW_NS:
        return
    name = f"disk {clean(disk.name)}"
    busy = share_text(disk.busy or 0.0)
    text = f"is slow: a request takes {time_text(slowest)}, and it is busy {busy} of the time"
    waiting = (f"{disk.in_flight} requests wait",) if disk.in_flight else ()
    yield Symptom(
        "storage_fault",
        node.node,
        name,
        (),
        False,
        f"{name} {text}",
        f"{name} {text}",
        None,
        waiting,
        ("Find who reads and writes: host.disk has a row for each process that trains.",),
    )


def _reported(node: NodeFacts, event: HardwareEvent) -> Symptom:
    name = clean(event.part or "a disk")
    times = "once" if event.count == 1 else f"{event.count} times"
    text = f"{_REPORTED[event.kind]} ({times} in the kernel's log in the last hour)"
    return Symptom(
        "storage_fault",
        node.node,
        name,
        (),
        True,
        f"{name} {text}",
        f"{name} {text}",
        event.first_ns,
        (clean(event.text, 160),),
        ("Examine the disk or the server, and the file system on it.",),
        event.last_ns,
    )


_SYMPTOMS: Sequence[FindSymptoms] = (gpu_symptoms, network_symptoms, _storage_symptoms, _host_symptoms)
_MOST = 64


def symptoms_of(node: NodeFacts) -> list[Symptom]:
    """Returns the symptoms of a node, at most 64; symptoms of failing parts come first."""
    found = [symptom for find in _SYMPTOMS for symptom in find(node)]
    return sorted(found, key=lambda symptom: not symptom.fails)[:_MOST]
