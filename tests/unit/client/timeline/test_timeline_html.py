"""The timeline as one HTML file: what is in it, what a browser may run of it, and names that are hostile."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from timeline_scene import MS, SECOND, Tables, communication, finding, loss, operation, sample, stack, step, timeline_of

from probing.api.errors import NotFound
from probing.client.timeline import html
from probing.client.timeline.columns import MAGIC, write_columns
from probing.client.timeline.html import write_html

HOSTILE = "</script><img src=x onerror=alert(1)><!--<style>]]>\u202e\x1b]0;x\x07'\""


class Document(HTMLParser):
    """The elements of a document, and the text of each that has no other: of scripts as a browser takes it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            self.elements[-1][2].append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(own, "".join(texts)) for name, own, texts in self.elements if name == tag]


def written(tables: Tables) -> str:
    sink = io.BytesIO()
    write_html(timeline_of(tables), sink)
    return sink.getvalue().decode()


def packed(page: str) -> bytes:
    """Returns the columns that a document has."""
    (data,) = (text for own, text in Document(page).of("script") if own.get("id") == "columns")
    return zlib.decompress(b"".join(base64.b64decode(line, validate=True) for line in data.split()))


def job(text: str = "") -> Tables:
    """A job with rows of each kind; ``text``: in all names that its processes and nodes choose."""
    ops = [{**row, "comm_name": text or row["comm_name"], "op": text or row["op"]} for row in communication()]
    return Tables(
        {
            "comm.ops": [*ops, operation(1, 999, 40 * SECOND, error=text or None, node=text or "alpha")],
            "train.steps": [step(0, 7, 0, SECOND)],
            "python.samples": [sample(1, 78, n * 300 * MS, thread=text or "python") for n in range(17)],
            "python.stacks": [stack(78, (text or "inner", text or "/a.py", 3))],
            "diagnosis.findings": [finding(SECOND, None, sentence=text or "rank 3 is slow")],
            "probing.losses": [loss(SECOND, 2 * SECOND, reason=text or "full")],
        }
    )


def test_the_file_has_the_columns_of_the_page() -> None:
    sink = io.BytesIO()
    write_columns(timeline_of(job()), sink)
    assert packed(written(job())) == sink.getvalue()


def test_a_browser_may_run_the_script_and_the_style_that_are_built_and_nothing_else() -> None:
    document = Document(written(job(HOSTILE)))
    (policy,) = (own["content"] for own, _ in document.of("meta") if "http-equiv" in own)
    directives = dict(one.strip().split(" ", 1) for one in policy.split(";"))
    scripts = [text for own, text in document.of("script") if own == {}]
    styles = [text for _, text in document.of("style")]
    built = Path(html.__file__).parents[1] / "web" / "static"
    assert scripts == [(built / "timeline-file.js").read_text()]
    assert styles == [(built / "timeline-file.css").read_text()]
    assert directives == {
        "default-src": "'none'",
        "script-src": source(scripts[0]),
        "style-src": source(styles[0]),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_hostile_names_change_nothing_but_the_data() -> None:
    page, plain = (re.sub(r"\d\d:\d\d:\d\d", "", written(job(text))) for text in (HOSTILE, ""))
    shell, hostile = (Document(text) for text in (plain, page))
    assert [(tag, own) for tag, own, _ in hostile.elements] == [(tag, own) for tag, own, _ in shell.elements]
    data = re.compile(r'(?<=id="columns">\n)[A-Za-z0-9+/=\n]+(?=</script>)')
    assert data.sub("", page) == data.sub("", plain)
    # They are in the data, without what a terminal or a page acts on.
    assert b"<img src=x onerror=alert(1)>" in packed(page)
    assert b"\x1b" not in packed(page)[: 1 << 20].partition(b'"dictionaries"')[2].partition(b'"losses"')[0]


def test_nothing_in_the_file_is_fetched() -> None:
    document = Document(written(job()))
    known = {"html", "head", "meta", "title", "link", "style", "body", "main", "p", "noscript", "h1", "pre", "footer"}
    assert {tag for tag, _, _ in document.elements} == known | {"script"}
    references = [own[name] for _, own, _ in document.elements for name in ("src", "href", "action") if name in own]
    assert [text[:18] for text in references] == ["data:image/svg+xml"]
    code = "".join(text for tag in ("script", "style") for own, text in document.of(tag) if "type" not in own)
    assert re.findall(r"https?://(?!www\.w3\.org/)|url\(|@import|\bfetch\(|XMLHttp|WebSocket|import\(", code) == []


def test_who_has_no_script_is_told_what_to_do_instead() -> None:
    page = written(job())
    assert "-o job.pftrace" in page.partition("<noscript>")[2].partition("</noscript>")[0]
    assert "If this text stays, the file is cut" in page


def test_rows_beyond_the_most_are_named_and_counted() -> None:
    taken = timeline_of(Tables({"comm.ops": [operation(0, n, n * MS) for n in range(1009)]}))
    write_html(taken, io.BytesIO(), most=503)
    assert taken.counts["operations"] == 503
    assert taken.notes == [
        "only the first 503 operations are shown, 506 are left out: choose a shorter range, or a trace for Perfetto"
    ]


def test_pieces_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_LINE", 3 * 101)
    sizes: list[int] = []

    class Sink(io.BytesIO):
        def write(self, data: object) -> int:
            part = bytes(data)  # type: ignore[call-overload]
            sizes.append(len(part))
            return super().write(part)

    sink = Sink()
    write_html(timeline_of(job()), sink)
    (first, *lines, last) = sizes
    assert max(lines) == 4 * 101 + 1
    assert len(lines) > 3
    assert first > 1000 < last
    assert packed(sink.getvalue().decode())[:8] == MAGIC


def test_an_installation_without_the_page_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(html, "_BUILT", tmp_path)
    sink = io.BytesIO()
    with pytest.raises(NotFound, match="not part of this installation"):
        write_html(timeline_of(job()), sink)
    assert sink.getvalue() == b""
