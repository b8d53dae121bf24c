"""The site: it builds without a warning, loads nothing from elsewhere, and broken links are found.

In the gate, `test_repository` checks the links and the menu.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from long import long

pytestmark = long
ROOT = Path(__file__).resolve().parents[2]
LOADS = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//|url\([\"']?https?:|@import")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site")
    done = build(ROOT, path)
    assert done.returncode == 0, done.stderr
    return path


def test_each_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    assert (site / "repository" / "SECURITY.html").exists()
    # A link to a file outside docs/ leads to its copy.
    assert 'href="repository/examples/cluster.ipynb"' in (site / "python.html").read_text()
    assert (site / "repository/examples/cluster.ipynb").read_bytes() == (ROOT / "examples/cluster.ipynb").read_bytes()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    texts = {path: path.read_text() for path in site.rglob("*") if path.suffix in {".html", ".css"}}
    assert len(texts) > 30
    assert {path.name: LOADS.findall(text) for path, text in texts.items() if LOADS.search(text)} == {}


def test_the_search_index_works_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = ")
    assert '"tables.html#probinglosses"' in index
    page = (site / "repository" / "SECURITY.html").read_text()
    assert "../assets/iframe-worker.js" in page


def test_broken_pages_are_found(tmp_path: Path) -> None:
    for name in ("docs", "packaging", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("*.md")):
        shutil.copy(path, tmp_path)
    with (tmp_path / "docs" / "query.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](config.md#no-such-section) [c](../README.md#no-such-section)\n")
    with (tmp_path / "docs" / "views.md").open("a") as page:
        page.write("\nText:\n* an item without an empty line before it\n")
    (tmp_path / "docs" / "orphan.md").write_text("# A page that no menu has\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "'nowhere.md', but the target is not found" in done.stderr
    assert "'config.md#no-such-section', but the doc 'config.md' does not contain" in done.stderr
    assert "'repository/README.md#no-such-section', but the doc" in done.stderr
    assert "views.md has" in done.stderr
    assert "orphan.md" in done.stderr
