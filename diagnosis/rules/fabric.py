"""Several GPUs of one fabric clique report errors of NVLink at about the same time: the fault lies in the fabric."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import listed, ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.fabrics import FabricFault, FabricReport
from probing.diagnosis.verdict import ERROR, WARNING, Finding, Verdict
from probing.diagnosis.words import clean
from probing.diagnosis.xids import xid

__all__ = ("VERDICTS", "find")

FABRIC_FAULT = Verdict(
    "fabric_fault",
    "hardware",
    "GPUs of one NVLink fabric report errors together",
    "Two or more GPUs of one clique of an NVLink fabric reported XID 74 or 144 to 150 within 30 s of one another. No"
    " rank is to blame: a link has two ends. The fault is on the side of the switches if links say that their other end"
    " went down, or if the counters of the GPUs' own links are read and show no error.",
    "The XIDs with unit, link and reason, in the order of time with the clocks of nodes corrected; counters of links.",
    "0.9 if the side of the fault is known, else 0.75; 0.1 less if clocks are too inexact to tell the first error.",
    "An error of one of the GPUs before the first that is named, or the same errors after the switch was replaced.",
    (
        "Look at the switches of the fabric and their logs first: `nvidia-smi -q`, fabric manager, NVOS.",
        "Leave the nodes of the clique out until its links are up again.",
    ),
    situations=("gpu_faults",),
)
VERDICTS = (FABRIC_FAULT,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each fault of a fabric."""
    for fault in case.fabric_faults:
        yield _finding(case, fault)


def _finding(case: Case, fault: FabricFault) -> Finding:
    ranks = sorted({rank for one in fault.reports for rank in one.gpu.ranks if rank in case.ranks})
    fatal = any(one.fatal for one in fault.reports)
    certain = fault.first_is_certain
    sure = 0.9 if fault.behind_the_links else 0.75
    users = f"; {ranks_of(ranks)} use them" if ranks else ""
    first = fault.reports[0]
    remedy = first.error.remedy if first.error is not None else xid(first.event.code).remedy
    return Finding(
        FABRIC_FAULT,
        ERROR if fatal and ranks else WARNING,
        round(sure if certain else sure - 0.1, 2),
        f"{_gpus(fault)} of NVLink fabric {clean(fault.fabric, 48)} reported errors within {_span(fault)},"
        f" {'first' if certain else 'perhaps first'} {_report(first)}: {_side(fault)}{users}",
        victims=tuple(ranks),
        since_ns=first.at_ns,
        about=fault.fabric,
        evidence=tuple(_evidence(fault)),
        missing=tuple(_missing(fault)),
        refuted_by=(FABRIC_FAULT.refuted_by,),
        next_steps=tuple(dict.fromkeys((remedy, *FABRIC_FAULT.next_steps))),
    )


def _gpus(fault: FabricFault) -> str:
    nodes = sorted({one.node for one in fault.reports})
    return f"{len(fault.reports)} GPUs of node{'' if len(nodes) == 1 else 's'} {listed(clean(one) for one in nodes)}"


def _span(fault: FabricFault) -> str:
    return time_text(fault.reports[-1].at_ns - fault.reports[0].at_ns)


def _report(report: FabricReport) -> str:
    text = report.error.text if report.error is not None else xid(report.event.code).text
    return f"GPU {report.gpu.device} of node {clean(report.node)}: XID {report.event.code}, {text}"


def _side(fault: FabricFault) -> str:
    if not fault.behind_the_links:
        return "one end of its links is at fault, which one is not known"
    if any(one.error is not None and one.error.from_peer for one in fault.reports):
        return "the fault is at the other end of the links, on the side of the switches"
    return "no link of the GPUs themselves counts errors, so the fault is on the side of the switches"


def _evidence(fault: FabricFault) -> Iterator[str]:
    begin = fault.reports[0].at_ns
    for one in fault.reports[:8]:
        yield (f"{time_text(one.at_ns - begin)} after the first: {_report(one)}" if one.at_ns > begin else _report(one))
    if len(fault.reports) > 8:
        yield f"{len(fault.reports) - 8} more GPUs of the clique"
    for one in fault.reports:
        if one.counted:
            yield f"links of GPU {one.gpu.device} of node {clean(one.node)} count errors themselves"
            break


def _missing(fault: FabricFault) -> Iterator[str]:
    if not fault.first_is_certain:
        yield f"the order of the errors: the clocks of the nodes agree to {time_text(fault.apart_ns)}"
    if any(one.error is None and one.event.code != 74 for one in fault.reports):
        yield "the lines of the kernel's log, which have unit, link and severity"
    if not fault.behind_the_links and any(one.counted is None for one in fault.reports):
        yield "the counters of the GPUs' own links"
