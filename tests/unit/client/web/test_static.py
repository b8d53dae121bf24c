"""The built page that is committed: it is what its sources give, small, and free of inline code."""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_tools import WEB, node

from probing.diagnosis.activity.kinds import ACTIVITIES
from probing.diagnosis.report import CANNOT_TELL, HEALTHY
from probing.diagnosis.vocabulary import verdicts

STATIC = Path(__file__).resolve().parents[4] / "client" / "web" / "static"
FILES = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir())}


def test_checksums_are_those_of_the_files() -> None:
    lines = (WEB / "checksums.txt").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}, "make web"


def test_the_sources_give_the_files(tmp_path: Path) -> None:
    subprocess.run([node(), WEB / "build.mjs", tmp_path], check=True, timeout=100)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(built) == sorted(FILES), "make web"
    assert [name for name in built if built[name] != FILES[name]] == [], "make web"


def test_types_are_right() -> None:
    done = subprocess.run(
        [node(), "node_modules/typescript/bin/tsc", "--noEmit"],
        cwd=WEB,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_page_is_small() -> None:
    sizes = {name: len(gzip.compress(data, 9)) for name, data in FILES.items()}
    editor = [name for name in sizes if name.startswith("editor-")]
    assert len(editor) == 1
    # The script and the style of files are not loaded by the page.
    file = [name for name in sizes if name.startswith("timeline-file.")]
    assert sum(size for name, size in sizes.items() if name not in editor + file) < 200_000
    assert sum(sizes[name] for name in file) < 50_000


def test_the_editor_is_loaded_by_its_screen_alone() -> None:
    page = FILES["index.html"].decode()
    assert "editor-" not in page
    scripts = [data.decode() for name, data in FILES.items() if name.startswith("page-") and name.endswith(".js")]
    assert len(scripts) == 1
    assert re.search(r"import\(\"\./editor-\w+\.js\"\)", scripts[0])


class Inline(HTMLParser):
    """Collects what a strict Content-Security-Policy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if (tag == "script" and "src" not in named) or tag in ("style", "iframe", "base", "object"):
            self.refused.append(tag)
        self.refused += [f"{tag} {name}" for name in named if name == "style" or name.startswith("on")]
        self.references += [text for name in ("src", "href") if (text := named.get(name))]


def test_the_page_has_no_inline_code_and_nothing_from_elsewhere() -> None:
    page = Inline()
    page.feed(FILES["index.html"].decode())
    assert page.refused == []
    names = [text.removeprefix("/static/") for text in page.references if text.startswith("/static/")]
    assert len(names) == 2
    assert set(names) <= set(FILES)
    assert [text for text in page.references if not text.startswith(("/static/", "data:image/svg+xml,"))] == []
    for name, data in FILES.items():
        if name.endswith((".js", ".css")):
            text = data.decode()
            # Namespaces of SVG and HTML are names, not addresses.
            assert re.findall(r"https?://(?!www\.w3\.org/)[\w.]+", text) == [], name
            assert not re.search(r"\beval\(|new Function\(|\.innerHTML\s*=\s*(?!\"\")", text) or _of_preact(text), name


def _of_preact(text: str) -> bool:
    """Whether ``innerHTML`` is set by Preact's own code alone, for a property that the page never gives."""
    sources = "".join(path.read_text() for path in (WEB / "src").rglob("*.ts*"))
    return "dangerouslySetInnerHTML" not in sources and "innerHTML" not in sources and "eval(" not in text


@pytest.mark.parametrize("name", ["preact", "uplot", "@codemirror/view", "@lezer/common"])
def test_licences_of_all_packages_are_given(name: str) -> None:
    text = FILES["licences.txt"].decode()
    assert re.search(rf"^{re.escape(name)} [\d.]+ \(MIT\)\n\n.*?Copyright", text, re.M | re.S)


def test_who_has_no_script_is_told_what_to_do_instead() -> None:
    page = FILES["index.html"].decode()
    assert "probingctl diagnose" in page.partition("<noscript>")[2].partition("</noscript>")[0]


def test_pure_parts_of_the_page() -> None:
    done = subprocess.run([node(), "tests/run.mjs"], cwd=WEB, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^# pass ([3-9]\d|\d{3})$", done.stdout, re.M), "fewer tests than there are"


def test_every_verdict_and_activity_has_a_chinese_sentence() -> None:
    chinese = (WEB / "src" / "i18n" / "zhFindings.ts").read_text()
    told = set(re.findall(r"^  (\w+): ", chinese, re.MULTILINE))
    known = {verdict.id for verdict in verdicts()} | set(ACTIVITIES) | {HEALTHY, CANNOT_TELL}
    assert known - told == {"unknown"}
    assert told <= known
