"""Faults of an NVLink fabric: errors that several GPUs of one fabric clique report at about the same time.

A clique consists of GPUs, of one node or several, that NVLink switches connect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from probing.diagnosis.clocks import ClockOffset, apart_ns
from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.hardware_facts import Gpu, HardwareEvent
from probing.diagnosis.xids import NVLINK_CODES, NvlinkError, nvlink_error

__all__ = ("FabricFault", "FabricReport", "fabric_faults")

# XID 74 belongs to earlier versions of NVLink.
_CODES = frozenset((74, *NVLINK_CODES))
_TOGETHER_NS = 30_000_000_000
# Counters are read every few seconds, so errors that they show within this time of a report count as the reported
# errors, ns.
_COUNTED_NS = 60_000_000_000
_COUNTS = frozenset(("nvlink_errors", "link_down"))


@dataclass(frozen=True, slots=True)
class FabricReport:
    """The first error of NVLink that a GPU reported. ``at_ns``: its time on the common clock. ``error``: as parsed from
    the text of ``event``; None if the text has no error of NVLink.

    ``counted``: whether the counters of the GPU's own links show errors; None if they are not read.
    """

    at_ns: int
    node: str
    gpu: Gpu
    event: HardwareEvent
    error: NvlinkError | None
    counted: bool | None

    @property
    def fatal(self) -> bool:
        return self.error.resets if self.error is not None else self.event.code == 74


@dataclass(frozen=True, slots=True)
class FabricFault:
    """A fault of a fabric. ``reports``: one for each GPU, by time. ``apart_ns``: how far the clocks of their nodes may
    differ.
    """

    fabric: str
    reports: tuple[FabricReport, ...]
    apart_ns: int

    @property
    def first_is_certain(self) -> bool:
        """Whether the first report is certainly earlier than the reports of other nodes, given the errors of clocks."""
        first = self.reports[0]
        others = [one.at_ns for one in self.reports if one.node != first.node]
        return not others or min(others) - first.at_ns > self.apart_ns

    @property
    def behind_the_links(self) -> bool:
        """Whether the fault is at the other end of the links: an error says this, or the GPUs' own links counted no
        error.
        """
        if any(one.error is not None and one.error.from_peer for one in self.reports):
            return True
        return all(one.counted is False for one in self.reports)


def fabric_faults(nodes: Iterable[NodeFacts], clocks: Mapping[str, ClockOffset]) -> list[FabricFault]:
    """Returns the faults of each clique: two or more of its GPUs reported errors within 30 s of each other."""
    by_fabric: dict[str, dict[tuple[str, int], list[FabricReport]]] = {}
    for node in nodes:
        offset = clocks[node.node].offset_ns if node.node in clocks else node.clock_offset_ns
        for report in _reports(node, offset):
            gpus = by_fabric.setdefault(report.gpu.fabric or "", {})
            gpus.setdefault((node.node, report.gpu.device), []).append(report)
    found = []
    for fabric, gpus in by_fabric.items():
        # For each GPU, the first fatal error counts, or the first error if none is fatal.
        firsts = [min(own, key=lambda one: (not one.fatal, one.at_ns)) for own in gpus.values()]
        for group in _groups(sorted(firsts, key=lambda one: one.at_ns)):
            names = sorted({one.node for one in group})
            apart = max((apart_ns(clocks, group[0].node, name) for name in names), default=0)
            found.append(FabricFault(fabric, tuple(group), apart))
    return found


def _groups(reports: Sequence[FabricReport]) -> Iterator[list[FabricReport]]:
    """Yields groups of reports that follow each other by less than 30 s, if they come from two GPUs or more."""
    ends = [at for at, (one, other) in enumerate(pairwise(reports), 1) if other.at_ns - one.at_ns > _TOGETHER_NS]
    for begin, end in pairwise([0, *ends, len(reports)]):
        if end - begin > 1:
            yield list(reports[begin:end])


def _reports(node: NodeFacts, offset_ns: int) -> Iterator[FabricReport]:
    gpus = {gpu.device: gpu for gpu in node.hardware.gpus if gpu.fabric is not None}
    for event in node.hardware.events:
        gpu = gpus.get(event.gpu) if event.gpu is not None else None
        if gpu is not None and event.kind == "xid" and event.code in _CODES:
            counted = _counted(node.hardware.events, event) if gpu.counts_nvlink else None
            yield FabricReport(event.first_ns - offset_ns, node.node, gpu, event, nvlink_error(event.text), counted)


def _counted(events: Iterable[HardwareEvent], report: HardwareEvent) -> bool:
    return any(
        event.gpu == report.gpu
        and event.kind in _COUNTS
        and event.first_ns - _COUNTED_NS <= report.first_ns <= event.last_ns + _COUNTED_NS
        for event in events
    )
