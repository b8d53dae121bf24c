"""Adds to findings after the rules: faulty hardware, known bugs, time-outs, advice, and commands to type.

NCCL: a watchdog ends the process when an operation is older than the time-out of its process group
(WorkNCCL::checkTimeout of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). gloo: the wait for a peer fails
(UnboundBuffer::waitRecv of gloo/transport/tcp/unbound_buffer.cc). The default time-outs are those of
torch/distributed/constants.py since torch 2.2.

The next steps that vocabulary.py defines contain the placeholders ``--job J``, ``--rank R`` and ``PID``, which this
module fills in.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from probing.api.text import size, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Operation, Rank, Thread
from probing.diagnosis.verdict import ERROR, NOTE, Advice, Culprit, Ending, Finding
from probing.diagnosis.waits import main_thread
from probing.diagnosis.words import clean, exit_text

__all__ = (
    "ACTIONS",
    "advised",
    "filled_in",
    "with_commands",
    "with_known_bugs",
    "with_phase",
    "with_symptoms",
    "with_time_out",
)

_MOST = 4
# These verdicts blame no rank, so the hardware of the waiting ranks is examined.
_OF_VICTIMS = frozenset({"no_completion"})


def with_symptoms(case: Case, finding: Finding) -> Finding:
    """Returns a hang or death with the symptoms of its culprits' hardware as evidence; other findings unchanged.

    The finding of a slow rank already has these symptoms as its reason.
    """
    if finding.verdict.group not in ("hang", "death"):
        return finding
    named = [culprit.rank for culprit in finding.culprits]
    if not named and finding.verdict.id in _OF_VICTIMS:
        named = list(finding.victims)
    found = list(dict.fromkeys(symptom for rank in named for symptom in case.symptoms_of_rank(rank)))[:_MOST]
    if not found:
        return finding
    steps = [step for symptom in found for step in symptom.next_steps]
    return replace(
        finding,
        evidence=(*finding.evidence, *(f"node {symptom.node}: {symptom.text}" for symptom in found)),
        next_steps=tuple(dict.fromkeys([*finding.next_steps, *steps])),
    )


_MOST_LINES = 4
_FRAMES = 32


class _KnownBug(NamedTuple):
    """A known bug. ``function``: a function on the stack of a thread; ``other``: a function on the stack of another
    thread, if the bug involves two.

    ``text``: what the bug is, in which version it is fixed, and where it was reported.
    """

    function: re.Pattern[str]
    text: str
    other: re.Pattern[str] | None = None


_BUGS = (
    _KnownBug(
        re.compile(r"ncclLocalOpAppend"),
        "NCCL before 2.29.3 loses slots of its proxy on aarch64, until a launch waits for one forever"
        " (NVIDIA/nccl#2353): update it, or see what its proxy thread waits for",
    ),
    _KnownBug(
        re.compile(r"cu(?:Library|Module)Load\w*"),
        "CUDA loads a module under the lock of its context while a kernel waits for a peer"
        " (meta-pytorch/torchcomms#2334): set CUDA_MODULE_LOADING=EAGER, or launch the kernel once before",
        re.compile(r"cu(?:da)?Mem(?:cpy|set)\w*|cu(?:da)?LaunchKernel\w*"),
    ),
    _KnownBug(
        re.compile(r"cu(?:da)?EventDestroy\w*"),
        "PyTorch held the GIL while CUDA destroyed an event, which waits for the device (pytorch/pytorch#119393)",
    ),
)


def with_known_bugs(case: Case, finding: Finding) -> Finding:
    """Returns ``finding``; if it is a hang, the known bugs that match stacks of its culprits are added to its evidence.
    If a hang has no culprits, the stacks of its victims are searched.
    """
    if finding.verdict.group != "hang":
        return finding
    ranks = [culprit.rank for culprit in finding.culprits] or list(finding.victims)
    lines = tuple(islice((line for rank in ranks for line in _lines(case, rank)), _MOST_LINES))
    return replace(finding, evidence=(*finding.evidence, *lines)) if lines else finding


def _lines(case: Case, rank: int) -> Iterator[str]:
    threads = case.ranks[rank].threads if rank in case.ranks else ()
    for bug in _BUGS:
        for thread in threads:
            function = _shown(thread, bug.function)
            others = [one for one in threads if one is not thread]
            if function and (bug.other is None or any(_shown(one, bug.other) for one in others)):
                yield f"rank {rank} is in {function}: it may be a known bug. {bug.text}"
                break


def _shown(thread: Thread, function: re.Pattern[str]) -> str:
    """Returns the name of the function on the stack of ``thread``; empty if the stack does not have it."""
    native = (frame.func for frame in thread.frames[:_FRAMES] if frame.native)
    return next((match[0] for name in native if (match := function.match(name))), "")


def with_phase(case: Case, finding: Finding) -> Finding:
    """Returns a hang with the label ``phase`` of a rank as evidence; other findings unchanged."""
    phase = case.facts.phase
    if phase is None or finding.verdict.group != "hang" or finding.severity == NOTE:
        return finding
    limit = f", its limit is {time_text(phase.limit_s * 1e9)}" if phase.limit_s else ", which has no limit of its own"
    lasts = time_text(max(case.facts.taken_ns - phase.since_ns, 0))
    line = f"rank {phase.rank} has the label phase={clean(phase.name)} for {lasts}{limit}"
    return replace(finding, evidence=(*finding.evidence, line))


_DEFAULTS_NS = {"nccl": 600 * 10**9, "gloo": 1800 * 10**9}
# Functions that have an argument for a time-out of their own.
_WITH_OWN = frozenset(("barrier", "monitored_barrier"))


def with_time_out(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with the earliest time-out that will end a wait of its ranks."""
    if finding.severity != ERROR:
        return finding
    ranks = {*finding.victims, *(culprit.rank for culprit in finding.culprits)} & case.waits.keys()
    ends = [end for rank in sorted(ranks) if (end := _end(case, case.ranks[rank])) is not None]
    return replace(finding, ends=min(ends, key=lambda end: end.at_ns, default=None))


def _end(case: Case, rank: Rank) -> Ending | None:
    wait = case.waits[rank.rank]
    call = next((o for o in rank.open if (o.comm, o.seq) == (wait.comm, wait.seq) and o.source == "probe"), None)
    if call is None or call.t_call_ns is None or _has_own(rank):
        return None
    communicator = case.communicators.get(call.comm)
    backend = communicator.backend if communicator is not None else None
    limit = _limit_ns(rank, call)
    if limit is None or backend not in _DEFAULTS_NS or (backend == "nccl" and not _is_watched(rank)):
        return None
    at = call.t_call_ns + limit
    if at <= case.now(rank.rank):
        # The wait should have ended by now, so this time-out is not in force.
        return None
    default = ", the default" if limit == _DEFAULTS_NS[backend] else ""
    by = "NCCL's watchdog" if backend == "nccl" else "gloo's time-out"
    return Ending(case.time(rank.rank, at), f"{by} ({time_text(limit)}{default})")


def _limit_ns(rank: Rank, call: Operation) -> int | None:
    """Returns the time-out of an operation: from a dump, else from its process group."""
    dumped = (w.time_out_ns for w in rank.witnesses if w.source == "flight_recorder" and w.comm == call.comm)
    read = (limit.ns for limit in rank.time_outs if limit.comm == call.comm)
    return next((ns for ns in (*dumped, *read) if ns is not None), None)


def _has_own(rank: Rank) -> bool:
    """Returns whether the call has, or may have, a time-out of its own."""
    main = main_thread(rank)
    frames = main.frames if main is not None else ()
    return any(dict(f.values).get("timeout", "None") != "None" for f in frames if f.func in _WITH_OWN)


def _is_watched(rank: Rank) -> bool:
    """Returns whether the watchdog of ProcessGroupNCCL handles time-outs, which it does by default."""
    env = dict(rank.env)

    def value(name: str, default: str) -> str:
        return env.get(f"TORCH_{name}", env.get(name, default))

    return bool(env) and (value("NCCL_ASYNC_ERROR_HANDLING", "3") != "0" or value("NCCL_BLOCKING_WAIT", "0") == "1")


RESTART, RESTART_WITHOUT, DO_NOT_RESTART, WAIT = "restart", "restart_without", "do_not_restart", "wait"
ACTIONS = (RESTART, RESTART_WITHOUT, DO_NOT_RESTART, WAIT)
_PROGRAM = "the program does the same again"
# Verdicts that the program itself causes: the order or arguments of its calls, the values that it computes, its memory.
_OF_PROGRAM = frozenset(("deadlock", "unmatched_p2p", "shifted_sequence", "bad_values", "memory_growth"))
# Verdicts with which the job goes on, or will go on.
_GOES_ON = frozenset(("slow_rank", "job_slowdown", "memory_imbalance", "mixed_devices", "packet_loss", "gpu_throttled"))
# Activities that end by themselves, or once the process is continued (by a signal or its debugger) or gets more CPU or
# memory.
_PASSES = {
    "compiling": "compilation ends",
    "garbage_collection": "a collection of garbage ends",
    "checkpoint": "the checkpoint may still go on",
    "swapping": "it goes on once it has memory",
    "throttled": "it goes on once it has CPU time",
    "starved": "it goes on once it has a CPU",
    "stopped": "they go on once somebody continues them",
    "traced": "it goes on once the debugger lets it",
}
_OUTSIDE = {"disk_io": "the file system", "network": "the other end", "pipe": "the other end of the pipe"}
# Signals that a process sends to itself, or that the kernel sends for what the process did.
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
_PEER_GONE = re.compile(r"[Cc]onnection|[Bb]roken pipe|[Tt]imed? ?out|remote process|ncclRemoteError|aborted")


def advised(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with advice about the job."""
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
    """Returns the advice to leave out a node whose hardware fails, or that does not answer."""
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
    # Some ranks still run, so it was not a scheduler that suspended the job: that would stop all ranks.
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
        return Advice(RESTART, "the network or a GPU holds it up; if it hangs again, leave out half of the nodes")
    return Advice(RESTART, "it does not go on by itself")


_COMMAND = re.compile(r"`probingctl ([a-z]+)[^`]*`")
_OF_JOB = "--job J"
# Commands that read from the nodes of a job's ranks.
_ON_NODES = ("stacks", "logs", "events", "profile", "balance")


def filled_in(step: str, job: str, culprits: Sequence[Culprit], *, many_nodes: bool = False) -> str:
    """Returns ``step`` with commands that can be typed; with several culprits or none, the commands are for the whole
    job.

    ``many_nodes``: the job has ranks on several nodes, each of which has to be asked.
    """
    culprit = culprits[0] if len(culprits) == 1 else None

    def command(match: re.Match[str]) -> str:
        text = match[0].replace(" --rank R", f" --rank {culprit.rank}" if culprit else "")
        text = text.replace(" PID", f" {culprit.pid}" if culprit and culprit.pid else "")
        place = " --all-nodes" if many_nodes and match[1] in _ON_NODES and _OF_JOB in text else ""
        return text.replace(_OF_JOB, f"--job {shlex.quote(job)}{place}")

    step = _COMMAND.sub(command, step)
    return step.replace(" PID", f" {culprit.pid}") if culprit and culprit.pid else step


def with_commands(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with next steps whose commands can be typed. Without next steps of its own, those of its
    verdict are used.
    """
    steps = finding.next_steps or finding.verdict.next_steps
    filled = [filled_in(step, case.facts.job, finding.culprits, many_nodes=case.many_nodes) for step in steps]
    return replace(finding, next_steps=tuple(dict.fromkeys(filled)))
