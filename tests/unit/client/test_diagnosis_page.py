"""The page of ``diagnose`` for people, its object for machines, and its exit code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import NOW, elsewhere, facts, frame, history, in_collective, op, rank, thread

from probing.client.diagnosis.asking import diagnosed
from probing.client.diagnosis.page import as_object, exit_code, flat, people, worst_first
from probing.client.render.table import cut_mark
from probing.diagnosis.facts import Exit, Facts, Missing, Rank, Step
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.verdict import ERROR, NOTE, WARNING, Culprit, Finding, StackOf, Verdict

NOT_JOINED = Verdict(
    "not_joined", "hang", "A rank did not join", "", "", "the stack shows it", "rank 1 calls all_reduce", ("look",)
)
GROWTH = Verdict("memory_growth", "memory", "Memory grows", "", "", "", "it stops growing", ())
UNDECIDED = Verdict("cannot_tell", "general", "The cause is not known", "", "", "", "", ())
SENTENCE = "rank 1 (node b, pid 4001) holds up 7 ranks for 39 s: its data loader waits in fetch_shard, data.py:12"


def hung() -> Diagnosis:
    """Rank 1 of 8 is in its data loader, 20 frames deep, the others in an all_reduce."""
    deep = elsewhere("fetch_shard data.py:12")
    more = tuple(frame(f"f{n} train.py:{n}") for n in range(17))
    deep = replace(deep, frames=deep.frames + more, since_ns=NOW - 39 * 10**9)
    own = facts(
        *(rank(n, *history(811, ago=40), op(812, ago=39), stack=in_collective()) for n in (0, 2, 3, 4, 5, 6, 7)),
        rank(1, *history(811, ago=40), node="b", stack=deep),
        missing=(Missing("stacks", "no native frames", rank=1),),
    )
    found = Finding(
        NOT_JOINED,
        ERROR,
        0.95,
        SENTENCE,
        (Culprit(1, "b", 4001, "its data loader waits in fetch_shard, data.py:12", "data_loader"),),
        (0, 2, 3, 4, 5, 6, 7),
        evidence=("rank 1 has called 811 operations, the others 812",),
        refuted_by=("rank 1 calls all_reduce 812",),
        next_steps=("see why fetch_shard waits: its storage",),
        stacks=(StackOf(1, "b", 4001, "culprit", deep), StackOf(0, "a", 4000, "victim", in_collective())),
    )
    other = Finding(GROWTH, WARNING, 0.7, "rank 3 grows by 1 GB a minute")
    return Diagnosis(own, (found, other), own.missing)


def healthy(job: str = "job", *, world: int = 8) -> Diagnosis:
    steps = (Step(811, NOW - 10**9, 10**8), Step(812, NOW - 9 * 10**8, 10**8))
    ranks = [rank(n, *history(812, ago=0.21), steps=steps) for n in range(8)]
    own: Facts = replace(facts(*ranks), job=job, world_size=world)
    return Diagnosis(own, (), ())


def test_the_page_reads_from_top_to_bottom_in_80_columns() -> None:
    text = people([hung()], 80)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).startswith(SENTENCE[:1].upper() + SENTENCE[1:])
    parts = ["Who:", "Evidence:", "(culprit)", "(victim)", "Confidence:", "refute it:", "Do next:", "Also:"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "7 ranks wait: 0,2-7" in text
    assert "in this frame since" in text
    assert "(39 s)" in " ".join(text.split())
    assert "f4 (train.py:4)" in text
    assert "f5 (train.py:5)" not in text
    assert "and 12 outer frames" in text
    assert "  - high (95%)\n" in text
    assert "not known: rank 1: no native frames" in text
    assert "warning: rank 3 grows by 1 GB a minute" in text


def test_commands_name_the_job_and_the_only_culprit() -> None:
    whole = hung()
    steps = ("look: `probingctl stacks --job J --native`, `probingctl logs --rank R`", "continue it: `kill -CONT PID`")
    culprit = whole.findings[0].culprits[0]

    def page(*culprits: Culprit) -> str:
        finding = replace(whole.findings[0], next_steps=steps, culprits=culprits)
        return people([Diagnosis(replace(whole.facts, job="a;b"), (finding,), ())], None)

    assert "look: `probingctl stacks --job 'a;b' --native`, `probingctl logs --rank 1`\n" in page(culprit)
    assert "continue it: `kill -CONT 4001`\n" in page(culprit)
    several = page(culprit, replace(culprit, rank=3, pid=4003))
    assert "look: `probingctl stacks --job 'a;b' --native`, `probingctl logs`\n" in several


def test_dead_victims_are_not_said_to_wait() -> None:
    whole = hung()
    ended = Exit(NOW, signal=15)
    ranks = tuple(replace(one, exit=ended if one.rank in (0, 2, 3) else None) for one in whole.facts.ranks)
    dead = replace(whole, facts=replace(whole.facts, ranks=ranks))
    assert "  - 4 ranks wait: 4-7\n  - 3 ranks ended, too: 0,2-3\n" in people([dead], None)
    two = replace(whole.findings[0], victims=(0, 4))
    assert "  - rank 4 waits\n  - rank 0 ended, too\n" in people([replace(dead, findings=(two,))], None)


def test_an_operation_of_this_moment_is_just_now() -> None:
    job = replace(healthy(), facts=facts(*(rank(n, *history(812, ago=0.01)) for n in range(8))))
    assert "8 ranks, last operation just now\n" in people([job], None)


def test_a_brief_page_has_neither_stacks_nor_what_would_refute_it() -> None:
    text = people([hung()], 80, brief=True)
    assert "Stack of" not in text
    assert "refute" not in text
    assert [part for part in ("Who:", "Evidence:", "Confidence:", "Do next:", "Also:") if part not in text] == []


def test_a_command_stays_on_one_line_and_a_path_keeps_its_end() -> None:
    whole = hung()
    step = "look at what the named rank does: `probingctl stacks --job J --native` has its stack"
    deep = elsewhere(f"all_reduce /opt/{'deep/' * 20}torch/distributed_c10d.py:3252")
    finding = replace(whole.findings[0], next_steps=(step,), stacks=(StackOf(1, "b", 4001, "culprit", deep),))
    facts = replace(whole.facts, job="n1/127.0.0.1:59723")
    lines = people([Diagnosis(facts, (finding,), ())], 80).splitlines()
    assert "      `probingctl stacks --job n1/127.0.0.1:59723 --native` has its stack" in lines
    (place,) = [line for line in lines if line.startswith("    all_reduce")]
    assert place.startswith(f"    all_reduce ({cut_mark()}/deep/")
    assert place.endswith("/torch/distributed_c10d.py:3252)")
    assert len(place) <= 80


def test_a_rank_of_which_nothing_is_known_is_a_number() -> None:
    whole = hung()
    culprit = Culprit(1, "", 0, "its node does not answer")
    unknown = replace(whole.findings[0], culprits=(culprit,), victims=(5,), next_steps=("kill PID",))
    text = people([replace(whole, findings=(unknown,))], None)
    assert "  - rank 1: its node does not answer\n  - rank 5 waits\n" in text
    assert "kill PID" in text


def test_text_of_targets_cannot_drive_the_terminal() -> None:
    whole = hung()
    evil = "\x1b]0;owned\x07\n\u202e"
    bad = replace(
        whole.findings[0],
        sentence=evil,
        evidence=(evil,),
        next_steps=(evil,),
        stacks=(StackOf(1, evil, 1, "culprit", elsewhere(f"{evil} {evil}:1")),),
        culprits=(Culprit(1, evil, 1, evil),),
    )
    text = people([replace(whole, findings=(bad,), facts=replace(whole.facts, job=evil))], 80)
    assert not set("\x1b\x07\u202e") & set(text)


def test_nothing_is_wrong() -> None:
    assert people([healthy()], 80) == "job job: nothing is wrong: 8 ranks, step 812, last operation 200 ms ago\n"
    assert "8 of 16 ranks" in people([healthy(world=16)], 80)


@pytest.mark.parametrize(
    ("quiet_s", "usual_s", "end"),
    [
        (1.9, None, "last operation 1.90 s ago"),
        (7, None, "last operation 7 s ago; a stall is judged after 10 s"),
        (7, 4, "last operation 7 s ago"),
        (13, 6, "last operation 13 s ago; a stall is judged after 24 s"),
        (25, 6, "last operation 25 s ago"),
    ],
)
def test_an_unusually_quiet_job_is_healthy_only_so_far(quiet_s: float, usual_s: float | None, end: str) -> None:
    whole = healthy()
    quiet = replace(whole.facts.nodes[0], advanced_ns=NOW - round(quiet_s * 10**9))
    usual = None if usual_s is None else usual_s * 10**9
    line = people([replace(whole, facts=replace(whole.facts, nodes=(quiet,), usual_gap_ns=usual))], None)
    assert line.endswith(f"{end}\n"), line
    assert ("nothing is wrong yet: " in line) == ("judged" in end)


def test_a_note_leaves_a_job_healthy() -> None:
    noted = replace(healthy(), findings=(Finding(GROWTH, NOTE, 1.0, "rank 3 has the most memory"),))
    assert exit_code([noted]) == 0
    assert people([noted], 80).splitlines()[1] == "  note: rank 3 has the most memory"
    assert as_object([noted])["verdict"] == "healthy"
    assert [other["verdict"] for other in as_object([noted])["others"]] == ["memory_growth"]


def test_a_run_that_the_job_survived_is_a_note() -> None:
    died = [rank(n, exit=Exit(NOW - (9 - n) * 10**9, 1), state="exited") for n in (0, 1)]
    first = replace(facts(*died), run="0")
    goes_on = replace(healthy().facts, run="1", taken_ns=NOW)
    assert (exit_code(diagnosed([first])), exit_code(diagnosed([first, goes_on]))) == (3, 0)
    page = people(diagnosed([first, goes_on]), 200)
    assert ", and was started again" in page
    assert "note: rank 0 (node a, pid 4000) exited with code 1" in page
    assert exit_code(diagnosed([first, replace(goes_on, job="another")])) == 3


def test_the_newest_of_the_failed_runs_of_a_job_comes_first() -> None:
    def failed(run: str, age_s: int, waiting: int) -> Diagnosis:
        ranks = [rank(n, exit=Exit(NOW, signal=9), started_ns=NOW - age_s * 10**9) for n in (0, 1)]
        found = replace(hung().findings[0], victims=tuple(range(waiting)))
        return Diagnosis(replace(facts(*ranks), run=run), (found,), ())

    found = worst_first([failed("0", 90, 7), failed("1", 60, 1), failed("2", 30, 3)])
    assert [diagnosis.facts.run for diagnosis in found] == ["2", "1", "0"]


def test_the_worst_job_comes_first_and_the_others_are_in_others() -> None:
    warned = replace(healthy("w"), findings=(Finding(GROWTH, WARNING, 0.7, "it grows"),))
    found = worst_first([healthy("h"), warned, hung()])
    assert [d.facts.job for d in found] == ["job", "w", "h"]
    whole = as_object(found)
    assert (whole["job"], whole["verdict"], whole["culprits"][0]["rank"]) == ("job", "not_joined", 1)
    assert [(o["job"], o["verdict"]) for o in whole["others"]] == [
        ("job", "memory_growth"),
        ("w", "memory_growth"),
        ("h", "healthy"),
    ]
    assert len(flat(found)) == 4


@pytest.mark.parametrize(
    ("verdict", "missing", "code"),
    [
        (NOT_JOINED, (), 3),
        (UNDECIDED, (), 4),
        (None, (), 0),
        (None, (Missing("node", "node b did not answer"),), 4),
        (None, (Missing("rule", "rule numbers failed: KeyError"),), 4),
        (None, (Missing("stacks", "none"),), 0),
    ],
)
def test_exit_codes(verdict: Verdict | None, missing: tuple[Missing, ...], code: int) -> None:
    found = () if verdict is None else (Finding(verdict, ERROR, 0.5, "a sentence"),)
    assert exit_code([replace(healthy(), findings=found, missing=missing)]) == code


@pytest.mark.parametrize(
    "gap",
    [
        Missing("rule", "rule numbers failed: KeyError"),
        Missing("history", "the stored rows cannot be read: the query did not end in time"),
        Missing("node", "node b did not answer: permission denied", node="b"),
    ],
    ids=lambda gap: gap.kind,
)
def test_a_job_is_not_called_healthy_where_something_could_not_be_read(gap: Missing) -> None:
    job = replace(healthy(), missing=(gap,))
    page = people([job], None)
    unknown = "job job: cannot tell whether something is wrong, since not all of it could be read: 8 ranks"
    assert page.startswith(unknown)
    assert f"Not known:\n  - {gap.text}\n" in page
    assert "nothing" not in page
    assert exit_code([job]) == 4
    assert (as_object([job])["verdict"], as_object([job])["confidence"]) == ("cannot_tell", 0.0)
    over = replace(job, facts=replace(job.facts, ranks=tuple(map(over_now, job.facts.ranks))))
    assert "; it ended at 20" in people([over], None)
    assert "nothing" not in people([over], None)


def over_now(member: Rank) -> Rank:
    return replace(member, exit=Exit(NOW, code=0), state="exited")


@pytest.mark.parametrize(("quiet_s", "code"), [(0.2, 0), (3.0, 4)])
def test_stacks_that_could_not_be_read_matter_once_a_job_is_quiet(quiet_s: float, code: int) -> None:
    gap = Missing("stacks", "no stacks of pid 4001: it is no Python", 1)
    ranks = [rank(n, *history(812, ago=quiet_s + 0.01)) for n in range(2)]
    assert exit_code([Diagnosis(facts(*ranks), (), (gap,))]) == code


def test_facts_that_were_cut_to_their_bound_are_no_doubt() -> None:
    gap = Missing("size", "some samples of rank 0 were left out: more than 65536 bytes", 0)
    assert exit_code([replace(healthy(), missing=(gap,))]) == 0


def test_native_frames_are_few_and_have_names() -> None:
    names = [
        "libc.so.6+0x85f16",
        "pthread_cond_wait",
        "std::condition_variable::wait(int)",
        "PyObject_Vectorcall",
        "c10d::Work::wait(std::chrono::duration<long, std::ratio<1l, 1000l> >, and more, more, more)",
        "gloo::x",
    ]
    frames = [frame(f"{name} /usr/lib/libc.so.6:", native=True) for name in names]
    outer = frame("_PyEval_EvalFrameDefault /usr/bin/python3:", native=True)
    stack = thread(*frames, "all_reduce c10d.py:7", outer, "main train.py:3")
    whole = hung()
    found = replace(whole.findings[0], stacks=(StackOf(0, "a", stack.tid, "victim", stack),))
    text = people([replace(whole, findings=(found,))], None)
    lines = text.partition("Stack of rank 0 (victim), main thread:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split(" (")[0].strip()[:30] for line in lines] == [
        "pthread_cond_wait",
        "std::condition_variable::wait(",
        "c10d::Work::wait(std::chrono::",
        "all_reduce",
        "main",
    ]
    assert all(len(line) < 90 for line in lines)
