"""Writes a timeline as one HTML file that a browser shows without a network: the timeline panels of the page, and the
columns that they show.

All texts of targets and nodes are in the columns. These are deflated and written as base64 into an element that
browsers do not execute, so no text can become markup or code. ``web/build.mjs`` makes the script and the style. The
content security policy of the file allows these two by their hashes, and forbids network requests.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from html import escape
from pathlib import Path
from typing import IO, cast

from probing.api.errors import NotFound
from probing.client.timeline.columns import MOST_ROWS, write_columns
from probing.client.timeline.reading import Timeline
from probing.client.version import program
from probing.client.zone import now_text

__all__ = ("write_html",)

_BUILT = Path(__file__).parents[1] / "web" / "static"
_LINE = 48 << 10
"""The number of bytes that one line of base64 encodes. It is a multiple of 3, so only the last line is padded."""
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M2 13V8h3v5zm4.500 0V3h3v10zM11 13V6h3v7z' fill='%230b62c4'/%3E%3C/svg%3E"
)
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Timeline</title>
<link rel="icon" href="{icon}">
<style>{style}</style></head>
<body><main id="page"><p>The timeline is being read. If this text stays, the file is cut, or no script runs here.</p>
<noscript><h1>This file needs JavaScript</h1>
<p>Save it, and open it in a browser that runs scripts. The file makes no network requests. A trace for Perfetto has
the same operations:</p>
<pre>probingctl timeline --all-nodes --job JOB -o job.pftrace</pre></noscript></main>
<footer class="file-end">{footer}</footer>
<script type="application/octet-stream" id="columns">
"""
_TAIL = "</script>\n<script>{script}</script></body></html>\n"


def write_html(timeline: Timeline, sink: IO[bytes], most: int = MOST_ROWS) -> None:
    """Writes ``timeline`` to ``sink``, with the rows that ``write_columns`` chooses for ``most``.

    Raises the errors of the reads, and NotFound if the page is not built.
    """
    script, style = _built("timeline-file.js"), _built("timeline-file.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    footer = escape(f"{program()}, {now_text('%Y-%m-%d %H:%M:%S')}")
    sink.write(_HEAD.format(policy=policy, icon=_ICON, style=style, footer=footer).encode())
    packed = _Packed(sink)
    write_columns(timeline, cast("IO[bytes]", packed), most)
    packed.end()
    sink.write(_TAIL.format(script=script).encode())


def _built(name: str) -> str:
    try:
        return (_BUILT / name).read_text("utf-8")
    except FileNotFoundError:
        hint = "use -o NAME.pftrace; in a checkout, `make web` makes the page"
        raise NotFound("the page is not part of this installation", hint=hint) from None


def _hash(text: str) -> str:
    """Returns the hash source of a Content-Security-Policy that allows an inline element with the content ``text``."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _Packed:
    """A write-only file that deflates its data and writes them to ``sink`` as lines of base64."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        # A higher level makes a file of a million operations 4 % smaller, and takes four times as long.
        self._deflate = zlib.compressobj(1)
        self._rest = b""

    def write(self, data: bytes) -> int:
        self._encode(self._deflate.compress(data))
        return len(data)

    def end(self) -> None:
        """Writes the data that are still buffered."""
        self._encode(self._deflate.flush(), last=True)

    def _encode(self, part: bytes, *, last: bool = False) -> None:
        data = self._rest + part
        whole = len(data) if last else len(data) - len(data) % _LINE
        for start in range(0, whole, _LINE):
            self._sink.write(base64.b64encode(data[start : min(start + _LINE, whole)]) + b"\n")
        self._rest = data[whole:]
