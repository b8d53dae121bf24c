"""What to do with the job of a finding: restart it, without a node, not yet, or wait; and why."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from probing.api.text import size
from probing.diagnosis.case import Case
from probing.diagnosis.verdict import NOTE, Advice, Finding
from probing.diagnosis.words import clean, exit_text

__all__ = ("ACTIONS", "advised")

RESTART, RESTART_WITHOUT, DO_NOT_RESTART, WAIT = "restart", "restart_without", "do_not_restart", "wait"
ACTIONS = (RESTART, RESTART_WITHOUT, DO_NOT_RESTART, WAIT)
_PROGRAM = "the program does the same again"
# Verdicts whose cause is the order or the arguments of calls in the program, or its numbers.
_OF_PROGRAM = frozenset(("deadlock", "unmatched_p2p", "shifted_sequence", "bad_values", "memory_growth"))
# The job goes on, or will.
_GOES_ON = frozenset(("slow_rank", "job_slowdown", "memory_imbalance", "mixed_devices", "packet_loss", "gpu_throttled"))
# Activities that pass, or that end by a signal or by more CPU or memory.
_PASSES = {
    "compiling": "compilation ends",
    "garbage_collection": "a collection of garbage ends",
    "checkpoint": "a checkpoint may be written on",
    "swapping": "it goes on once it has memory",
    "throttled": "it goes on once it has CPU time",
    "starved": "it goes on once it has a CPU",
    "stopped": "they go on once somebody continues them",
    "traced": "it goes on once the debugger lets it",
}
_OUTSIDE = {"disk_io": "the file system", "network": "the other end", "pipe": "the other end of the pipe"}
# Signals that a process sends itself, or that the kernel sends it for what it did.
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
_PEER_GONE = re.compile(r"[Cc]onnection|[Bb]roken pipe|[Tt]imed? ?out|remote process|ncclRemoteError|aborted")


def advised(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with what to do with the job."""
    return replace(finding, advice=_advice(case, finding))


def _advice(case: Case, finding: Finding) -> Advice:
    verdict = finding.verdict
    if finding.severity == NOTE:
        return Advice(WAIT, "nothing is wrong with the job")
    if (broken := _broken(case, finding)) is not None:
        return broken
    if verdict.id in _OF_PROGRAM or verdict.id.endswith("_mismatch"):
        return Advice(DO_NOT_RESTART, f"{_PROGRAM}: find the line first")
    if verdict.id in _GOES_ON or verdict.group == "hardware":
        return Advice(WAIT, "the job goes on")
    if verdict.id == "rank_died":
        return _after_death(case, finding)
    if verdict.id == "cannot_tell":
        return Advice(WAIT, "what holds it up is not known: ask all nodes first")
    return _after_hang(case, finding)


def _broken(case: Case, finding: Finding) -> Advice | None:
    """Returns the advice to leave a node out, whose hardware fails or that does not answer."""
    if finding.verdict.id == "rank_unreachable":
        nodes = sorted({clean(culprit.node) for culprit in finding.culprits if culprit.node})
        return Advice(RESTART_WITHOUT, "it does not answer", tuple(nodes))
    named = [culprit.rank for culprit in finding.culprits] or list(finding.victims)
    failing = [symptom for rank in named for symptom in case.symptoms_of_rank(rank) if symptom.fails]
    if not failing:
        return None
    nodes = sorted({clean(symptom.node) for symptom in failing})
    return Advice(RESTART_WITHOUT, clean(failing[0].text), tuple(nodes))


def _after_death(case: Case, finding: Finding) -> Advice:
    rank = case.ranks.get(finding.culprits[0].rank) if finding.culprits else None
    end = rank.exit if rank is not None else None
    if rank is None or end is None:
        return Advice(RESTART, "it has lost a rank")
    if end.oom:
        limit = rank.condition.memory_limit_bytes if rank.condition is not None else None
        more = f" than {size(limit)}" if limit else " than there is"
        return Advice(DO_NOT_RESTART, f"it needs more memory{more}")
    if end.code == 0:
        return Advice(DO_NOT_RESTART, f"{_PROGRAM}: the rank had less to do than the others")
    if end.signal in _CRASHES and not _PEER_GONE.search(finding.culprits[0].why):
        return Advice(DO_NOT_RESTART, f"the rank crashed by itself: {exit_text(end)}, read its core dump first")
    if end.code and not _PEER_GONE.search(finding.culprits[0].why):
        return Advice(DO_NOT_RESTART, f"the rank failed by itself: {exit_text(end)}, read its error first")
    return Advice(RESTART, "it has lost a rank, and no error of the program is known")


def _after_hang(case: Case, finding: Finding) -> Advice:
    culprits = finding.culprits
    kind = culprits[0].activity if culprits else ""
    # A scheduler that suspends a job stops all its ranks.
    if kind == "stopped" and finding.victims:
        return Advice(RESTART, "it does not go on until somebody continues it")
    if kind in _PASSES:
        return Advice(WAIT, _PASSES[kind])
    if culprits and culprits[0].rank in case.ranks and case.activity(culprits[0].rank).progressing:
        return Advice(WAIT, "the rank makes progress")
    if kind == "stdin":
        return Advice(DO_NOT_RESTART, f"{_PROGRAM}: it waits for input")
    if kind in _OUTSIDE:
        return Advice(RESTART, f"once {_OUTSIDE[kind]} answers")
    if finding.verdict.id == "no_completion":
        return Advice(RESTART, "the network or a GPU holds it up; if it comes back, leave nodes out by halves")
    return Advice(RESTART, "it does not go on by itself")
