"""Hardware or system parts of the job's nodes are faulty, throttled, slow or full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from probing.api.text import ranks_of
from probing.diagnosis.case import Case
from probing.diagnosis.symptoms.symptom import Symptom
from probing.diagnosis.verdict import ERROR, WARNING, Culprit, Finding, Verdict
from probing.diagnosis.words import clean

__all__ = ("VERDICTS", "find")

_REFUTED = "A test of the part that passes, or the same symptom on parts of ranks that are well."

GPU_FAULT = Verdict(
    "gpu_fault",
    "hardware",
    "A GPU of the job is lost or reports errors",
    "The driver lists a GPU as lost, reports an XID or a memory error of it, wants it to be reset, or uses fewer PCIe"
    " lanes for it than the GPU and its slot have. XIDs have the classes of DCGM. Errors of programs count only if they"
    " came since the job began.",
    "The state of the GPU, its events of the last hour, and the ranks that use it.",
    "0.95 for a GPU that fails, 0.8 for one that warns.",
    _REFUTED,
    ("Look at the GPU: `probingctl gpu`, `nvidia-smi -q -i N`.",),
    situations=("gpu_faults", "slow_gpu_pair"),
)
GPU_THROTTLED = Verdict(
    "gpu_throttled",
    "hardware",
    "The clock of a GPU is held down",
    "Heat or the power brake hold the clock of a GPU down for a tenth of the last minute or more; or the power limit"
    " does, and its clock is a tenth below that of the other GPUs of its model on the node.",
    "Times for which the driver held the clock down, clocks and temperature.",
    "0.8.",
    _REFUTED,
    ("Compare the GPUs of the node: `probingctl gpu`.",),
    situations=("throttled_gpu",),
)
NETWORK_FAULT = Verdict(
    "network_fault",
    "hardware",
    "A network port is down or counts errors",
    "A port that a rank uses is not active, counters of faults of a port rose in the last two minutes, or the kernel"
    " reported a link that went down or a fault of a network device in the last hour.",
    "State and counters of the port, and the kernel's log.",
    "0.95 for a port that is down, 0.8 for one that counts errors.",
    _REFUTED,
    ("Look at the ports: `probingctl rdma`, `probingctl net`.",),
    situations=("network_faults", "flapping_link"),
)
PACKET_LOSS = Verdict(
    "packet_loss",
    "hardware",
    "Connections of a rank lose packets",
    "More than one segment in a hundred was sent again in the last two minutes, three times as many as on the other"
    " ranks of the node; or a connection has sent one segment again three times without an answer.",
    "Segments sent and sent again by rank and peer host.",
    "0.8.",
    _REFUTED,
    ("Look at the ports at both ends, and at the switches between them: `probingctl net`.",),
    situations=("network_faults",),
)
STORAGE_FAULT = Verdict(
    "storage_fault",
    "hardware",
    "A file system is full or does not answer, or a disk is slow or fails",
    "A file system has less than 5 % and 1 GiB left, its server does not answer, a disk is busy and takes more than 50"
    " ms a request, or the kernel reported errors of a disk or file system in the last hour.",
    "Sizes, latencies and the kernel's log.",
    "0.95 for what fails, 0.8 for what is slow or nearly full.",
    _REFUTED,
    ("Look at the disks and file systems: `probingctl query 'FROM host.file_systems'`.",),
    situations=("host_faults", "blocked_storage"),
)
HOST_FAULT = Verdict(
    "host_fault",
    "hardware",
    "Processor, memory or kernel of a node report errors",
    "The kernel reported an error of the processor, memory, PCIe or itself, a processor that is too hot, or tasks that"
    " are blocked for minutes, in the last hour.",
    "The kernel's log.",
    "0.95 for what fails, 0.8 for what warns.",
    _REFUTED,
    ("Look at the kernel's log: `probingctl query 'FROM process.kmsg'`.",),
    situations=("host_faults",),
)
VERDICTS = (GPU_FAULT, GPU_THROTTLED, NETWORK_FAULT, PACKET_LOSS, STORAGE_FAULT, HOST_FAULT)

_VERDICTS: Mapping[str, Verdict] = {verdict.id: verdict for verdict in VERDICTS}
_FAILS, _WARNS = 0.95, 0.8


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each part of a node about its worst symptom; other symptoms are evidence."""
    parts: dict[tuple[str, str, str], list[Symptom]] = {}
    # A fault of a fabric is not a fault of each of its GPUs.
    of_fabric = {(one.node, one.gpu.device) for fault in case.fabric_faults for one in fault.reports}
    for symptom in case.symptoms:
        if symptom.nvlink_of is not None and (symptom.node, symptom.nvlink_of) in of_fabric:
            continue
        parts.setdefault((symptom.kind, symptom.node, symptom.part), []).append(symptom)
    for (kind, _, _), own in parts.items():
        yield _finding(case, _VERDICTS[kind], own)


def _finding(case: Case, verdict: Verdict, own: list[Symptom]) -> Finding:
    worst = own[0]
    ranks = [rank for rank in worst.ranks if rank in case.ranks]
    # The name of a path contains the rank.
    used = bool(ranks) and verdict is not PACKET_LOSS
    users = f", which {ranks_of(ranks)} use{'s' if len(ranks) == 1 else ''}" if used else ""
    steps = [step for symptom in own for step in symptom.next_steps]
    return Finding(
        verdict,
        ERROR if worst.fails and ranks else WARNING,
        _FAILS if worst.fails else _WARNS,
        f"node {clean(worst.node)}: {worst.text}{users}",
        tuple(Culprit(r, case.ranks[r].node, case.ranks[r].pid, worst.why, "bad_hardware") for r in ranks),
        since_ns=worst.since_ns,
        about=f"{worst.node}/{worst.part}",
        evidence=(*worst.evidence, *(line for symptom in own[1:] for line in (symptom.text, *symptom.evidence))),
        refuted_by=(verdict.refuted_by,),
        next_steps=tuple(dict.fromkeys([*steps, *verdict.next_steps])),
    )
