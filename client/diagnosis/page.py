"""Formats the answer of `diagnose`: a page of text, the object for JSON, the order of jobs, and the exit code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from probing.api.text import age, escape, numbers_text, plural, utc
from probing.client.render.rows import Row
from probing.client.render.table import cut_mark, wrapped
from probing.client.stacks.text import frame_text
from probing.client.zone import clock, when
from probing.diagnosis.deaths import how_it_ended
from probing.diagnosis.facts import Facts, Frame, Missing
from probing.diagnosis.ladder import Diagnosis, begun_ns
from probing.diagnosis.report import CANNOT_TELL, HEALTHY, QUIET_NS, as_dict, unread
from probing.diagnosis.supplements import filled_in
from probing.diagnosis.verdict import ERROR, NOTE, WARNING, Culprit, Finding, StackOf
from probing.diagnosis.waits import STUCK_PATIENCE, gate_ns

__all__ = (
    "Content",
    "as_object",
    "confidence_word",
    "content",
    "exit_code",
    "flat",
    "people",
    "stack_title",
    "telling_frames",
    "worst_first",
    "wrong",
)

_WRONG, _UNDECIDED = 3, 4
_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}
# The precision of the time since an operation, ns; a shorter time is shown as "just now".
_NOW_NS = 1_000_000
# The minimum confidence for each word.
_WORDS = ((0.85, "high"), (0.6, "medium"))


def wrong(diagnosis: Diagnosis) -> bool:
    """Returns whether an error or a warning was found, or no rank of the job was seen."""
    return any(finding.severity != NOTE for finding in diagnosis.findings) or not diagnosis.facts.ranks


def worst_first(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Returns the diagnoses ordered by severity, then by job with its newest run first, then by the number of ranks
    that wait.
    """
    begun: dict[str, list[int]] = {}
    for one in diagnoses:
        begun.setdefault(one.facts.job, []).append(begun_ns(one.facts))

    def order(diagnosis: Diagnosis) -> tuple[int, int, int, str]:
        facts, worst = diagnosis.facts, diagnosis.findings[0] if diagnosis.findings else None
        severity = _ORDER[worst.severity] if worst else len(_ORDER)
        later = sum(other > begun_ns(facts) for other in begun[facts.job])
        return severity, later, -len(worst.victims) if worst else 0, facts.job

    return sorted(diagnoses, key=order)


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """Returns 3 if something is wrong, 4 if that is unknown because something could not be read, else 0."""
    verdicts = {as_dict(diagnosis)["verdict"] for diagnosis in diagnoses}
    if verdicts - {HEALTHY, CANNOT_TELL}:
        return _WRONG
    return _UNDECIDED if CANNOT_TELL in verdicts else 0


def confidence_word(confidence: float) -> str:
    """Returns the word for a confidence: high, medium or low."""
    return next((word for least, word in _WORDS if confidence >= least), "low")


def _missing_text(missing: Missing) -> str:
    """Returns a text that says what is missing, with the rank or node."""
    about = f"rank {missing.rank}" if missing.rank is not None else f"node {missing.node}" if missing.node else ""
    return missing.text if not about or about in missing.text else f"{about}: {missing.text}"


def _healthy_sentence(diagnosis: Diagnosis) -> str:
    """Returns a sentence with the state of a job, such as ``job X: nothing is wrong: 8 ranks, step 812``, or one that
    says that the state is unknown.
    """
    facts = diagnosis.facts
    unknown = f"job {facts.job}: cannot tell whether something is wrong"
    gaps = unread(facts, diagnosis.missing)
    if not facts.ranks:
        return f"{unknown}: no rank of it could be read" if gaps else f"job {facts.job}: no rank of it was seen"
    seen, world = len(facts.ranks), facts.world_size
    parts = [f"{seen} of {plural(world, 'rank')}" if world and world > seen else plural(seen, "rank")]
    if steps := [step.step for rank in facts.ranks for step in rank.steps]:
        parts.append(f"step {max(steps)}")
    advanced = [node.advanced_ns for node in facts.nodes if node.advanced_ns is not None]
    quiet = max(0, facts.taken_ns - max(advanced)) if advanced else 0
    if advanced:
        parts.append(f"last operation {age(quiet)} ago" if quiet >= _NOW_NS else "last operation just now")
    state = "nothing is wrong"
    ends = [rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None]
    if len(ends) == seen:
        at = when(utc(max(ends)))
        if diagnosis.findings:
            state = f"it ended at {at}, and was started again"
        elif not gaps:
            state = f"it ended at {at}, healthy until then"
            # The text about the end says when the last operation was.
            parts[-1:] = how_it_ended(facts) if advanced else [parts[-1], *how_it_ended(facts)]
    elif not gaps and (judged := _judged_after(facts, quiet)):
        state += " yet"
        parts[-1] += f"; a stall is judged after {age(judged)}"
    if gaps:
        ended = f"; it ended at {when(utc(max(ends)))}" if len(ends) == seen else ""
        return f"{unknown}, since not all of it could be read{ended}: {', '.join(parts)}"
    return f"job {facts.job}: {state}: {', '.join(parts)}"


def _judged_after(facts: Facts, quiet: int) -> int | None:
    """Returns how long a job must be quiet until the next rule judges it, ns. Returns None if the job is not unusually
    quiet, or if it has been quiet long enough for all rules.
    """
    if quiet < QUIET_NS or quiet <= 2 * (facts.usual_gap_ns or 0):
        return None
    gate = gate_ns(facts)
    return next((limit for limit in (gate, STUCK_PATIENCE * gate) if quiet < limit), None)


def as_object(diagnoses: Sequence[Diagnosis]) -> Row:
    """Returns the object of the first diagnosis, as docs/json.md describes, with all other findings in ``others``."""
    first, *others = flat(diagnoses)
    return {**first, "others": others}


def flat(diagnoses: Sequence[Diagnosis]) -> list[Row]:
    """Returns an object for each finding, and an object for each job without a finding."""
    found: list[Row] = []
    for diagnosis in diagnoses:
        own = as_dict(diagnosis)
        if not wrong(diagnosis):
            own["sentence"] = _healthy_sentence(diagnosis)
        job = {"job": own["job"], "run": own["run"]}
        others = own.pop("others")
        found += [own, *({**job, **other} for other in others)]
    return found


_REFUTED = "What would refute it"
_NOTES = "Notes"
_MOST_FRAMES = 8
_MOST_LINES = 12
_MOST_STACKS = 2
_MOST_NATIVE = 3
# The number of columns in a frame's second line that the indent, brackets and line number take from the path.
_BESIDE_PATH = 20
_ADVICE = {
    "restart": "Restart the job",
    "restart_without": "Restart the job without {nodes}",
    "do_not_restart": "Do not restart the job yet",
    "wait": "Wait",
}
_COMMAND = re.compile("`[^`]*`")
_NO_BREAK = "\xa0"
# Frames of glue code between Python and C++, which are left out because they explain nothing.
_GLUE = ("pybind11::", "torch::autograd::THP", "Py", "_Py", "__")


def people(diagnoses: Sequence[Diagnosis], width: int | None, *, brief: bool = False) -> str:
    """Returns a page of text for each job, the worst job first. Lines are broken at ``width`` columns; None: they are
    not broken.

    ``brief``: leaves out the stacks, and what would refute the finding.
    """
    pages = [_page(diagnosis, width, brief) for diagnosis in diagnoses]
    return "\n".join("".join(line + "\n" for text in page for line in _broken(text, width)) for page in pages)


def _broken(text: str, width: int | None) -> list[str]:
    """Returns ``text`` broken into lines, the further lines indented like the first. A command in backticks is not
    broken if it fits on one line.
    """
    line = escape(text)
    body = line.lstrip(" ")
    indent = " " * (len(line) - len(body))
    room = None if width is None else width - len(indent)
    if room is not None:
        body = _COMMAND.sub(lambda m: m[0].replace(" ", _NO_BREAK) if len(m[0]) < room - 4 else m[0], body)
    return [indent + part.replace(_NO_BREAK, " ") for part in wrapped(body, room)] or [""]


class Content(NamedTuple):
    """The texts of a page: ``sentence``, ``about`` (the job and the verdict), texts by title, and stacks, which stand
    between ``before`` and ``after``. ``severity`` is empty if nothing is wrong."""

    severity: str
    sentence: str
    about: str
    before: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stacks: tuple[StackOf, ...] = ()
    after: tuple[tuple[str, tuple[str, ...]], ...] = ()


def content(diagnosis: Diagnosis) -> Content:
    """Returns the texts and stacks of the page of ``diagnosis``."""
    facts = diagnosis.facts
    run = f"  run {facts.run}" if facts.run else ""
    if all(finding.severity == NOTE for finding in diagnosis.findings):
        notes = tuple(f"note: {finding.sentence}" for finding in diagnosis.findings)
        after = ((_NOTES, notes), ("Not known", tuple(_texts(diagnosis.missing))))
        return Content("", _healthy_sentence(diagnosis), f"job {facts.job}{run}", after=after)
    worst, others = diagnosis.findings[0], diagnosis.findings[1:]
    steps = worst.next_steps or worst.verdict.next_steps
    next_steps = (_advice(worst), _ends(worst), *(filled_in(step, facts.job, worst.culprits) for step in steps))
    return Content(
        worst.severity,
        _sentence(worst),
        f"job {facts.job}{run}  verdict {worst.verdict.id}",
        (("Who", (*map(_culprit, worst.culprits), *_victims(worst, facts))), ("Evidence", worst.evidence)),
        tuple(_stacks(worst.stacks)),
        (
            ("Confidence", (_confidence(worst), *_doubts(worst, diagnosis.missing))),
            (_REFUTED, worst.refuted_by or (worst.verdict.refuted_by,)),
            ("Do next", next_steps),
            ("Also", tuple(f"{other.severity}: {other.sentence}" for other in others)),
        ),
    )


def _page(diagnosis: Diagnosis, width: int | None, brief: bool) -> list[str]:
    said = content(diagnosis)
    lines = [said.sentence, *([f"  {said.about}"] if said.severity else [])]
    for title, texts in said.before:
        lines += _section(title, texts)
    for stack in () if brief else said.stacks:
        lines += _stack(stack, diagnosis.facts, width)
    for title, texts in said.after:
        if title == _NOTES:
            lines += [f"  {text}" for text in texts]
        elif title != _REFUTED or not brief:
            lines += _section(title, texts)
    return lines


def _sentence(finding: Finding) -> str:
    return finding.sentence[:1].upper() + finding.sentence[1:]


def _section(title: str, texts: Sequence[str]) -> list[str]:
    """Returns the title and a line for each text; an empty list if there are no texts."""
    texts = [text for text in dict.fromkeys(texts) if text]
    more = [f"  - {len(texts) - _MOST_LINES} more, in -f json"] if len(texts) > _MOST_LINES else []
    return ["", f"{title}:", *(f"  - {text}" for text in texts[:_MOST_LINES]), *more] if texts else []


def _culprit(culprit: Culprit) -> str:
    # The pid, and perhaps the node, of a rank is unknown if its node does not answer.
    node = f", node {culprit.node}" if culprit.node else ""
    return f"rank {culprit.rank}{node}{f', pid {culprit.pid}' if culprit.pid else ''}: {culprit.why}"


def _advice(finding: Finding) -> str:
    advice = finding.advice
    if advice is None:
        return ""
    words = _ADVICE[advice.action].format(nodes=f"node{'s' if len(advice.nodes) > 1 else ''} {', '.join(advice.nodes)}")
    return f"{words}: {advice.reason}."


def _ends(finding: Finding) -> str:
    if finding.ends is None:
        return ""
    return f"If nobody ends it, {finding.ends.by} does at {clock(utc(finding.ends.at_ns))}."


def _victims(finding: Finding, facts: Facts) -> list[str]:
    """Returns one line for the victims that wait, and one for the victims that have ended."""
    dead = {rank.rank for rank in facts.ranks if rank.exit is not None}
    waiting = [rank for rank in finding.victims if rank not in dead]
    ended = [rank for rank in finding.victims if rank in dead]
    lines = []
    if waiting:
        one = len(waiting) == 1
        lines.append(f"rank {waiting[0]} waits" if one else f"{len(waiting):,} ranks wait: {numbers_text(waiting)}")
    if ended:
        one = len(ended) == 1
        lines.append(
            f"rank {ended[0]} ended, too" if one else f"{len(ended):,} ranks ended, too: {numbers_text(ended)}"
        )
    return lines


def _stacks(stacks: Sequence[StackOf]) -> list[StackOf]:
    """Returns a stack of a culprit and a stack of a victim; if all stacks have the same role, two of ``stacks``."""
    roles = dict.fromkeys(stack.role for stack in stacks)
    firsts = [next(stack for stack in stacks if stack.role == role) for role in roles]
    return [*firsts, *(stack for stack in stacks if stack not in firsts)][:_MOST_STACKS]


def stack_title(stack: StackOf, facts: Facts) -> str:
    """Returns the title of a stack, such as ``rank 1 (culprit), main thread, it moves``."""
    thread = stack.thread
    name = "main thread" if thread.tid == stack.pid else f"thread {thread.name or thread.tid}"
    return f"rank {stack.rank} ({stack.role}), {name}{_since(stack, facts)}"


def _stack(stack: StackOf, facts: Facts, width: int | None) -> Iterator[str]:
    thread = stack.thread
    yield ""
    yield f"Stack of {stack_title(stack, facts)}:"
    frames = telling_frames(thread.frames)
    for frame in frames[:_MOST_FRAMES]:
        yield f"    {_frame(frame, width)}"
    if (left := len(frames) - _MOST_FRAMES) > 0:
        yield f"    and {plural(left, 'outer frame')}"
    if not thread.frames:
        yield f"    (no frame{f': {thread.native_missing}' if thread.native_missing else ''})"


def telling_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Returns at most three of the native frames that the innermost Python frame called, without glue code, then the
    Python frames.
    """
    python = [frame for frame in frames if not frame.native]
    inner = itertools.takewhile(lambda frame: frame.native, frames)
    native = [frame for frame in inner if not frame.func.startswith(_GLUE) and "+0x" not in frame.func]
    return [*native[:_MOST_NATIVE], *python]


def _frame(frame: Frame, width: int | None) -> str:
    if frame.native:
        return frame_text(frame.func, frame.file.rpartition("/")[2], None, "Native")
    file = frame.file
    if width is not None and len(file) > width - _BESIDE_PATH:
        # The end of a path says more than its beginning, so the beginning is cut off.
        end = file[len(file) - (width - _BESIDE_PATH - 1) :]
        file = cut_mark() + end[max(end.find("/"), 0) :]
    return frame_text(frame.func, file, frame.line, "Python")


def _since(stack: StackOf, facts: Facts) -> str:
    thread = stack.thread
    if thread.since_ns is not None:
        long = age(max(0, facts.taken_ns - thread.since_ns))
        return f", in this frame since {clock(utc(thread.since_ns))} ({long})"
    return ", it moves" if thread.moving else ""


def _confidence(finding: Finding) -> str:
    return f"{confidence_word(finding.confidence)} ({finding.confidence:.0%})"


def _doubts(finding: Finding, missing: Sequence[Missing]) -> list[str]:
    return [f"not known: {text}" for text in dict.fromkeys([*finding.missing, *_texts(missing)])]


def _texts(missing: Sequence[Missing]) -> list[str]:
    return [_missing_text(item) for item in missing]
