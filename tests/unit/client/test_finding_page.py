"""``diagnose -o finding.html``: one file without script and request, whatever targets wrote into it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from diagnosis_cases import elsewhere, frame
from test_diagnosis_page import SENTENCE, healthy, hung

from probing.client.diagnosis.html import MAX_BYTES, finding_page
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.verdict import Culprit, StackOf

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'\x1b[31m\u202e&lt;{{x}}"


class Reader(HTMLParser):
    """Collects the tags with their attributes, and the text by the tag around it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def test_the_page_says_what_the_text_says() -> None:
    page = Reader(finding_page([hung()]))
    assert page.of("h1") == [SENTENCE[:1].upper() + SENTENCE[1:]]
    assert page.of("h2") == ["Who", "Evidence", "Stacks", "Confidence", "What would refute it", "Do next", "Also"]
    said = page.of("li")
    for text in (
        "rank 1 has called 811 operations, the others 812",
        "high (95%)",
        "not known: rank 1: no native frames",
    ):
        assert text in said
    assert "see why fetch_shard waits: its storage" in said


def stacks_of(*stacks: tuple[str, ...]) -> Diagnosis:
    """A finding with a culprit's and a victim's stack; frames innermost first."""
    case = hung()
    kept = [
        StackOf(n, "a", 4000 + n, role, replace(elsewhere("x train.py:1"), frames=tuple(frame(text) for text in own)))
        for n, (role, own) in enumerate(zip(("culprit", "victim"), stacks, strict=True))
    ]
    return replace(case, findings=(replace(case.findings[0], stacks=tuple(kept)),))


def rows(page: str) -> list[tuple[str, list[str]]]:
    found = re.findall(r'<tr class="(\w*)">(.*?)</tr>', page)
    return [(kind, re.findall(r"<td>(.*?)</td>", cells)) for kind, cells in found]


def test_two_stacks_part_at_the_outermost_frame_that_differs() -> None:
    shared = ("step train.py:60", "main train.py:88")
    page = finding_page(
        [stacks_of(("read data.py:12", "fetch data.py:9", *shared), ("all_reduce c10d.py:2810", *shared))]
    )
    assert rows(page) == [
        ("", ["read (data.py:12)", ""]),
        ("part", ["fetch (data.py:9)", "all_reduce (c10d.py:2810)"]),
        ("same", ["step (train.py:60)"] * 2),
        ("same", ["main (train.py:88)"] * 2),
    ]


def test_equal_stacks_part_nowhere() -> None:
    own = ("step train.py:60", "main train.py:88")
    assert [kind for kind, _ in rows(finding_page([stacks_of(own, own)]))] == ["same", "same"]


def test_nothing_of_a_target_is_a_tag_or_an_attribute() -> None:
    case = hung()
    worst = replace(
        case.findings[0],
        sentence=HOSTILE,
        culprits=(Culprit(1, HOSTILE, 4001, HOSTILE, "data_loader"),),
        evidence=(HOSTILE,),
        stacks=tuple(
            replace(s, thread=replace(s.thread, frames=(replace(s.thread.frames[0], func=HOSTILE, file=HOSTILE),)))
            for s in case.findings[0].stacks
        ),
    )
    page = finding_page([replace(case, findings=(worst,), facts=replace(case.facts, job=HOSTILE))])
    found = Reader(page)
    known = {"html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "p", "ul", "li", "table"}
    assert {tag for tag, _ in found.tags} <= known | {"caption", "tr", "th", "td", "footer", "span"}
    attributes = {name for _, own in found.tags for name in own}
    assert attributes <= {"lang", "charset", "http-equiv", "content", "name", "class", "scope"}
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert HOSTILE.partition("\x1b")[0] in "".join(found.of("h1"))


def test_the_page_asks_for_nothing() -> None:
    page = finding_page([hung(), healthy()])
    assert re.search(r"url\(|@import|https?:|src=|href=", page) is None
    assert "default-src 'none'" in page


def test_a_page_is_below_2_mb_whatever_is_in_it() -> None:
    long = "<&" * 500_000
    case = hung()
    worst = replace(case.findings[0], sentence=long, evidence=tuple(f"{n}{long}" for n in range(500)))
    deep = [
        replace(s, thread=replace(s.thread, frames=(replace(s.thread.frames[0], func=long),) * 500))
        for s in worst.stacks
    ]
    worst = replace(worst, stacks=tuple(deep), refuted_by=tuple(f"{n}{long}" for n in range(500)))
    page = finding_page([replace(case, findings=(worst,) * 300)] * 5).encode()
    assert len(page) < MAX_BYTES
    assert b"more jobs do not fit" in page
    assert page.count(b"<section>") >= 1


def test_without_a_job_the_page_says_so() -> None:
    assert "No training job was found." in finding_page([])
