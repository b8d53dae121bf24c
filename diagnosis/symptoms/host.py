"""Faults of processors, memory and the kernel that the kernel's log reports."""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.symptoms.symptom import Symptom
from probing.diagnosis.words import clean

__all__ = ("host_symptoms",)

_KINDS = {
    "memory_error": (False, "the memory controller reports errors", "Replace the memory module if they go on."),
    "machine_check": (True, "the processor reports errors of the hardware", "Drain the node and examine it: `mcelog`."),
    "pcie_error": (False, "PCIe reports errors", "Seat the device anew; replace it or its riser if they go on."),
    "thermal": (False, "a processor is too hot and runs slower", "Examine fans and airflow."),
    "lockup": (True, "a CPU does not schedule", "Drain the node and reboot it."),
    "hung_task": (False, "tasks are blocked for minutes", "Look at what they wait for: a disk or a file server."),
    "kernel_bug": (True, "the kernel failed", "Drain the node and reboot it."),
    "sxid": (True, "an NVSwitch reports errors", "Reset the GPUs and the switch; examine it if they return."),
}


def host_symptoms(node: NodeFacts) -> Iterator[Symptom]:
    """Returns a symptom for each kind of fault and part in the kernel's log."""
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
