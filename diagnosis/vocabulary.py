"""Lists all verdicts and situations, and makes the page about them: ``make docs`` writes docs/verdicts.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from probing.diagnosis.activity.kinds import ACTIVITIES
from probing.diagnosis.ladder import RULES, Rule
from probing.diagnosis.verdict import CANNOT_TELL, Verdict

__all__ = ("GENERAL", "SITUATIONS", "Situation", "page", "verdicts")


@dataclass(frozen=True, slots=True)
class Situation:
    """A situation. ``group``: ``hang``, ``slow``, ``hardware`` or ``before`` (before the job starts). ``shown_by``: the
    command that shows the situation; empty: a verdict shows it.
    """

    id: str
    group: str
    text: str
    shown_by: str = ""


_BALANCE, _RANKS = "shown by `probingctl balance`", "shown by `probingctl ranks check`"
_PREFLIGHT = "comes with `probingctl preflight`"

SITUATIONS: tuple[Situation, ...] = (
    Situation("branch", "hang", "Only some ranks take a branch that has a collective."),
    Situation("uneven_data", "hang", "One rank has one batch fewer: it has left the loop, the others are in it."),
    Situation("swallowed_exception", "hang", "A rank catches an exception, continues, and so skips a collective."),
    Situation("dead_rank", "hang", "A rank died, and the others wait for it."),
    Situation("blocked_rank", "hang", "A rank is stopped, in uninterruptible I/O, or holds the GIL in C."),
    Situation("busy_rank", "hang", "A rank writes logs or a checkpoint while the others wait at a barrier."),
    Situation("blocked_storage", "hang", "Ranks that use the same file system block in it."),
    Situation("starved_loader", "hang", "A data loader gets no data, or a worker of it died."),
    Situation("nccl_timeout", "hang", "NCCL would time out after 30 minutes: the stall is named within 15 seconds."),
    Situation("none_completes", "hang", "All ranks have joined a collective, and it completes on no rank."),
    Situation("idle_server", "hang", "A server has no requests: its ranks wait for the rank that receives them."),
    Situation("lingering_rank", "hang", "A rank does not end: it waits for a thread, a child or an upload."),
    Situation("communicator_error", "hang", "The library reports an error of a communicator, or it was aborted."),
    Situation("slow_rank", "slow", "One slow rank slows every step."),
    Situation("throttled_gpu", "slow", "A GPU is throttled, by heat or power."),
    Situation("slow_gpu_pair", "slow", "Two GPUs are connected by a slow path instead of NVLink."),
    Situation("mixed_devices", "slow", "GPU models, memory sizes or precisions differ in one job."),
    Situation("memory_imbalance", "slow", "Ranks differ in the memory that they use."),
    Situation("memory_growth", "slow", "Memory grows until the kernel kills a rank."),
    Situation("cpu_contention", "slow", "A rank lacks CPU: contention, a cgroup's quota, or bad affinity."),
    Situation("network_faults", "slow", "Retransmits, discards, congestion marks, or links that go down."),
    Situation("lost_scaling", "slow", "More ranks are less efficient.", _BALANCE),
    Situation("uneven_work", "slow", "Ranks have unequal work, on equal machines."),
    Situation("job_slowdown", "slow", "All ranks are slower than the job was before."),
    Situation("bad_numbers", "slow", "A loss is NaN or infinite, or jumps."),
    Situation("gpu_faults", "hardware", "ECC errors, XIDs, errors of PCIe or NVLink, or a lost GPU."),
    Situation("host_faults", "hardware", "Fans, power, or a disk that is nearly full."),
    Situation("flapping_link", "hardware", "An InfiniBand link goes up and down."),
    Situation("unreachable_node", "hardware", "A node cannot be reached."),
    Situation("versions", "before", "Nodes differ in Python, torch, CUDA, driver or NCCL.", _PREFLIGHT),
    Situation(
        "environment", "before", "NCCL_* and TORCH_* variables differ, or name things that do not exist.", _PREFLIGHT
    ),
    Situation("resources", "before", "Shared memory, disks, GPUs, clocks or ports do not suit the job.", _PREFLIGHT),
    Situation("bad_ranks", "before", "RANK or LOCAL_RANK is wrong, or there are two masters.", _RANKS),
)


GENERAL = (
    Verdict(
        "healthy",
        "general",
        "Nothing is wrong",
        "No rule finds anything in the facts of the job.",
        "None.",
        "1, or 0.5 where ranks or operations are missing from the facts.",
        "A fault of a rank that was not seen. The lines under `missing` name the gaps in the facts.",
        (),
    ),
    CANNOT_TELL,
)
_TITLES = {
    "hang": "Hangs",
    "death": "Deaths",
    "slow": "Slowness",
    "memory": "Memory",
    "numbers": "Numbers",
    "hardware": "Hardware",
    "general": "In general",
}
_HEAD = """# The vocabulary of `diagnose`

Made from the code by `make docs`. The id of a verdict stays the same between versions; `probingctl diagnose -f json`
and `diagnosis.findings` have it. Rules run in the order of the table, causes before symptoms.
"""


def verdicts(rules: Sequence[Rule] = RULES) -> tuple[Verdict, ...]:
    """Returns all verdicts: the verdicts of ``rules`` in their order, then the general verdicts."""
    found = {verdict.id: verdict for rule in rules for verdict in rule.VERDICTS}
    return tuple((found | {verdict.id: verdict for verdict in GENERAL if verdict.id not in found}).values())


def page(rules: Sequence[Rule] = RULES) -> str:
    """Returns the text of docs/verdicts.md."""
    known = verdicts(rules)
    lines = [_HEAD, "| verdict | group | means |", "|---|---|---|"]
    lines += [f"| [`{v.id}`](#{v.id}) | {v.group} | {v.title} |" for v in known]
    for group, title in _TITLES.items():
        having = [verdict for verdict in known if verdict.group == group]
        lines += ["", f"## {title}"] * bool(having)
        lines += [line for verdict in having for line in _section(verdict)]
    return "\n".join([*lines, *_activities(), *_situations(known), ""])


def _section(verdict: Verdict) -> Iterator[str]:
    texts = {situation.id: situation.text for situation in SITUATIONS}
    yield from ("", f"### {verdict.id}", f"{verdict.title}.", "")
    yield f"* **Rule**: {verdict.rule}"
    yield f"* **Evidence**: {verdict.evidence}"
    yield f"* **Confidence**: {verdict.confidence}"
    yield f"* **Refuted by**: {verdict.refuted_by}"
    if verdict.next_steps:
        yield "* **Next steps**:"
        yield from (f"    * {step}" for step in verdict.next_steps)
    if verdict.situations:
        yield "* **Recognises**:"
        yield from (f"    * {texts.get(situation, situation)}" for situation in verdict.situations)


def _activities() -> Iterator[str]:
    yield from ("", "## What a rank does", "The `activity` of a culprit; its `why` says the same in a clause.", "")
    yield from ("| activity | means | shown by | next steps |", "|---|---|---|---|")
    for name, kind in ACTIVITIES.items():
        cells = (f"`{name}`", kind.title, kind.shown_by, " ".join(kind.next_steps))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _situations(known: Sequence[Verdict]) -> Iterator[str]:
    yield from ("", "## Situations", "| situation | verdicts |", "|---|---|")
    for situation in SITUATIONS:
        having = [f"[`{verdict.id}`](#{verdict.id})" for verdict in known if situation.id in verdict.situations]
        yield f"| {situation.text} | {', '.join([*having, *([situation.shown_by] * bool(situation.shown_by))])} |"
