"""Writes diagnoses as one HTML file to keep or to mail: no script, no request, below 2 MB.

Its texts come from targets and nodes, so each text is cut, and its control characters and its HTML are escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape as escape_html
from itertools import zip_longest

from probing.api.text import escape, plural
from probing.client.diagnosis.page import Content, content, stack_title, telling_frames
from probing.client.stacks.text import frame_text
from probing.client.version import program
from probing.client.zone import now_text
from probing.diagnosis.facts import Facts, Frame
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.verdict import StackOf

__all__ = ("POLICY", "finding_page")

MAX_BYTES = 2_000_000
"""The maximum size of a page in bytes. The end of the page says how many jobs do not fit."""
_MOST_TEXT = 1_000
_MOST_NAME = 300
_MOST_TEXTS = 40
_MOST_FRAMES = 64
_MOST_VALUES, _MOST_VALUE = 4, 120
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --part: #d946; --bad: #c22; --warn: #a60; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0; border-left: .4rem solid var(--line); padding-left: .8rem; }
h1.error { border-color: var(--bad); } h1.warning { border-color: var(--warn); }
h2 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .3rem 0; } ul { margin: 0; padding-left: 1.3rem; }
.about, footer { opacity: .75; }
section + section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 2rem; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
caption { text-align: left; }
th, td { text-align: left; vertical-align: top; padding: .15rem .5rem; border-top: 1px solid var(--line);
  font: 13px/1.4 ui-monospace, monospace; }
th { font-weight: bold; }
tr.same { opacity: .6; } tr.part { background: var(--part); } tr.part td::after { content: " \\25C0 they part here"; }
.value { display: block; padding-left: 1rem; opacity: .8; }
footer { margin-top: 2.5rem; font-size: .85rem; }
@media (max-width: 40rem) { table, tbody, tr, td, th { display: block; width: auto; } }
@media print { body { margin: 0; max-width: none; } }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
"""The Content-Security-Policy of a page, which allows only its own style."""
_NOBODY = "No training job was found."


def finding_page(diagnoses: Sequence[Diagnosis], heads: Sequence[str] = ()) -> str:
    """Returns the page of ``diagnoses``, the worst first. ``heads`` has a line to show above each diagnosis, or is
    empty.
    """
    sections: list[str] = []
    size, left_out = 0, 0
    for diagnosis, head in zip(diagnoses, heads or [""] * len(diagnoses), strict=True):
        section = "".join(_section(content(diagnosis), diagnosis.facts, head))
        if size + len(section.encode()) > MAX_BYTES - 20_000:
            left_out += 1
            continue
        sections.append(section)
        size += len(section.encode())
    title = content(diagnoses[0]).sentence if diagnoses else _NOBODY
    more = f"<p>{left_out:,} more jobs do not fit in this file.</p>" if left_out else ""
    body = "".join(sections) or f"<section><h1>{_NOBODY}</h1></section>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title, 200)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><main>{body}</main>{more}\n"
        f"<footer>{_text(program())}, {_text(now_text('%Y-%m-%d %H:%M:%S'))}</footer></body></html>\n"
    )


def _section(said: Content, facts: Facts, head: str) -> Iterator[str]:
    yield "<section>" + (f'<p class="about">{_text(head)}</p>\n' if head else "")
    yield f'<h1 class="{_text(said.severity)}">{_text(said.sentence)}</h1>\n'
    yield f'<p class="about">{_text(said.about)}</p>\n'
    for title, texts in said.before:
        yield from _list(title, texts)
    if said.stacks:
        yield from _stacks(said.stacks, facts)
    for title, texts in said.after:
        yield from _list(title, texts)
    yield "</section>\n"


def _list(title: str, texts: Sequence[str]) -> Iterator[str]:
    found = [text for text in dict.fromkeys(texts) if text]
    if not found:
        return
    yield f"<h2>{_text(title)}</h2><ul>\n"
    yield from (f"<li>{_text(text)}</li>\n" for text in found[:_MOST_TEXTS])
    if len(found) > _MOST_TEXTS:
        yield f"<li>{len(found) - _MOST_TEXTS:,} more, in -f json</li>\n"
    yield "</ul>\n"


def _stacks(stacks: Sequence[StackOf], facts: Facts) -> Iterator[str]:
    """Yields a table with a column for each of two stacks, innermost frames first, equal outer frames side by side."""
    paths = [telling_frames(stack.thread.frames)[::-1] for stack in stacks[:2]]
    rows = list(zip_longest(*paths))
    shared = next((at for at, row in enumerate(rows) if len({*map(_key, row)}) > 1), len(rows)) if len(paths) > 1 else 0
    yield "<h2>Stacks</h2><table><caption>Innermost frame first.</caption>\n<tr>"
    yield from (f'<th scope="col">{_text(stack_title(stack, facts))}</th>' for stack in stacks[:2])
    yield "</tr>\n"
    for at in range(len(rows) - 1, max(-1, len(rows) - 1 - _MOST_FRAMES), -1):
        # Two stacks part at the outermost frame that differs.
        kind = "" if len(paths) < 2 or at > shared else "part" if at == shared else "same"
        yield f'<tr class="{kind}">{"".join(f"<td>{_cell(frame)}</td>" for frame in rows[at])}</tr>\n'
    if len(rows) > _MOST_FRAMES:
        yield f'<tr><td colspan="{len(paths)}">and {plural(len(rows) - _MOST_FRAMES, "outer frame")}</td></tr>\n'
    if not rows:
        reasons = (stack.thread.native_missing or "no frame" for stack in stacks[:2])
        yield f"<tr>{''.join(f'<td>({_text(reason)})</td>' for reason in reasons)}</tr>\n"
    yield "</table>\n"


def _key(frame: Frame | None) -> tuple[str, str, int | None] | None:
    return None if frame is None else (frame.func, frame.file, frame.line)


def _cell(frame: Frame | None) -> str:
    if frame is None:
        return ""
    kind = "Native" if frame.native else "Python"
    shown = _text(frame_text(frame.func[:_MOST_NAME], frame.file[-_MOST_NAME:], frame.line, kind), 2 * _MOST_NAME + 40)
    values = frame.values[:_MOST_VALUES]
    return shown + "".join(
        f'<span class="value">{_text(f"{name} = {text}", _MOST_VALUE)}</span>' for name, text in values
    )


def _text(text: str, limit: int = _MOST_TEXT) -> str:
    return escape_html(escape(text, limit))
