"""File systems that are full, read-only or do not answer, and disks that are slow or fail."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import share_text, size, time_text
from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.hardware_facts import Disk, FileSystem, HardwareEvent
from probing.diagnosis.symptoms.symptom import Symptom
from probing.diagnosis.words import clean

__all__ = ("storage_symptoms",)

_FULL = 0.95
_LEAST_LEFT = 1 << 30
_BUSY = 0.8
# A request takes 0.1 ms on flash and some 10 ms on a spinning disk.
_SLOW_NS = 50_000_000
_REPORTED = {
    "disk_error": "failed to read or write",
    "fs_error": "has a damaged file system",
    "file_server": "is a server that did not answer",
}


def storage_symptoms(node: NodeFacts) -> Iterator[Symptom]:
    """Returns the symptoms of file systems and disks, and what the kernel reports of them."""
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
