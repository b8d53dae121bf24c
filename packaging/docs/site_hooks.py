"""Hooks of mkdocs: files of the repository outside docs/ that a page links to are in the site as repository/PATH.

A page that the site would show otherwise than GitHub does is a warning, and so an error of ``mkdocs build --strict``:
for Python-Markdown, a list or table behind a line of text needs an empty line before it.
"""

from __future__ import annotations

import html as entities
import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = "repository/"
# Pages that the navigation lists though no page links to them.
LISTED = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_ELEMENTS = re.compile(r"<(ul|ol|li|table|tr|pre|h[1-6])[ >]")
_ROW = re.compile(r"^\|.*", re.M)
_CODE = re.compile(r"`[^`]+`")
_log = getLogger("mkdocs.hooks.site_hooks")


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to outside docs/, and what those pages link to."""
    waiting = [*LISTED, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, OUTSIDE + path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            found = {target for target in _targets(path) if (ROOT / target).is_file()} - seen
            waiting += found
            seen |= found
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with links that lead to the files of the site, and with bars in code that need no backslash."""
    rows = _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    own = _path(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda link: posixpath.relpath(_uri(_target(own, link[1])), here), rows)


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Warns where CommonMark makes other headings, lists, tables, code or text of the page."""
    source = (ROOT / _path(page.file.src_uri)).read_text()
    expected, found = _parts(MarkdownIt("commonmark").enable("table").render(source)), _parts(html)
    if expected != found:
        _log.warning("%s has %s, on GitHub %s", page.file.src_uri, dict(found - expected), dict(expected - found))


def _parts(html: str) -> Counter[str]:
    """Counts elements and words."""
    words = re.sub(r"</?(?:span|a)\b[^>]*>|&para;", "", html)
    text = entities.unescape(re.sub(r"<[^>]*>", " ", words))
    return Counter(_ELEMENTS.findall(html)) + Counter(text.split())


def _targets(path: str) -> Iterator[str]:
    return (_target(path, link) for link in _LINK.findall((ROOT / path).read_text()))


def _target(path: str, link: str) -> str:
    """Returns the path in the repository of a link on the page ``path``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _path(uri: str) -> str:
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def _uri(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path
