"""Draws a flame graph as one self-contained SVG file, outermost frames at the top.

In a browser a click zooms, a search marks frames, and the width follows the window; without scripts the file is a plain
picture. Style and script must contain neither ``&`` nor ``<``, because they are not escaped in the XML.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from xml.sax.saxutils import escape as escape_xml
from xml.sax.saxutils import quoteattr

from probing.api.text import age, encoded, escape, share_text
from probing.client.profile.model import Frame, Profile, Sample, label, merged, short_files

__all__ = (
    "MAX_DEPTH",
    "SCRIPT",
    "STYLE",
    "boxes",
    "flame_graph",
    "flame_graph_difference",
)

STYLE = """
:root { --paper: #fdfcfa; --ink: #23211e; --quiet: #77726a; --line: #d9d4cb; }
@media (prefers-color-scheme: dark) { :root { --paper: #1c1b1a; --ink: #ece8e1; --quiet: #9a948a; --line: #4a4640; } }
#page { background: var(--paper); }
#paper { fill: var(--paper); }
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.title { font-size: 17px; font-weight: 600; }
.quiet { fill: var(--quiet); }
.f { cursor: pointer; }
.f rect { stroke: var(--paper); stroke-width: 0.7; }
.f text { font: 11px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #23211e;
  pointer-events: none; }
.f:hover rect { stroke: var(--ink); stroke-width: 1.4; }
.f.parent rect { opacity: 0.6; }
.f.hit rect { fill: #b072e0; }
.f.gone { display: none; }
#controls { display: none; }
#controls div { display: flex; gap: 6px; align-items: center; justify-content: flex-end; height: 30px; }
#controls input, #controls button { font: 12px ui-sans-serif, system-ui, sans-serif; color: var(--ink);
  background: transparent; border: 1px solid var(--line); border-radius: 6px; padding: 4px 8px; outline-offset: 1px; }
#controls input { width: 150px; }
#controls button { cursor: pointer; }
#controls span { font: 12px ui-sans-serif, system-ui, sans-serif; color: var(--quiet); white-space: nowrap; }
"""

SCRIPT = """
(function () {
  "use strict";
  var byId = function (id) { return document.getElementById(id); };
  var page = byId("page"), frames = byId("frames"), details = byId("details"), search = byId("search");
  var margin = 12, zoomed = { x: 0, w: 1, d: 0 };
  var all = Array.prototype.map.call(document.querySelectorAll(".f"), function (box) {
    var lines = box.querySelector("title").textContent.split("\\n");
    return { box: box, text: box.querySelector("text"), name: lines[0], tip: lines[1],
      x: Number(box.dataset.x), w: Number(box.dataset.w), d: Number(box.dataset.d) };
  });

  function within(f, z) { return f.x >= z.x - 1e-6 ? z.x + z.w + 1e-6 >= f.x + f.w : false; }

  function draw() {
    var wide = Math.max(300, page.clientWidth || window.innerWidth) - 2 * margin;
    frames.setAttribute("width", wide);
    byId("controls").setAttribute("x", wide + margin - 330);
    all.forEach(function (f) {
      var parent = zoomed.d > f.d ? within(zoomed, f) : false;
      var inside = f.d >= zoomed.d ? within(f, zoomed) : false;
      var x = parent ? 0 : (f.x - zoomed.x) / zoomed.w, w = parent ? 1 : f.w / zoomed.w;
      f.box.classList.toggle("gone", !(parent || inside));
      f.box.classList.toggle("parent", parent);
      if (!(parent || inside)) { return; }
      f.box.setAttribute("x", 100 * x + "%");
      f.box.setAttribute("width", 100 * w + "%");
      var room = Math.floor((wide * w - 7) / 6.7);
      f.text.textContent = room >= f.name.length ? f.name : room > 3 ? f.name.slice(0, room - 1) + "\\u2026" : "";
    });
  }

  function mark() {
    var wanted = search.value.trim().toLowerCase(), end = 0, sum = 0;
    var hits = all.filter(function (f) {
      var hit = wanted ? f.d > 0 ? f.name.toLowerCase().includes(wanted) : false : false;
      f.box.classList.toggle("hit", hit);
      return hit;
    });
    hits.sort(function (a, b) { return a.x - b.x || a.d - b.d; });
    hits.forEach(function (f) {
      if (f.x >= end - 1e-6) { sum += f.w; end = f.x + f.w; }
    });
    byId("found").textContent = wanted ? (100 * sum).toFixed(1) + " % found" : "";
  }

  function zoom(f) { zoomed = f; draw(); }
  function reset() { search.value = ""; mark(); zoom(all[0]); }

  all.forEach(function (f) {
    f.box.addEventListener("click", function () { zoom(f); });
    f.box.addEventListener("mouseenter", function () { details.textContent = f.name + "  \\u2013  " + f.tip; });
    f.box.addEventListener("mouseleave", function () { details.textContent = " "; });
  });
  search.addEventListener("input", mark);
  byId("reset").addEventListener("click", reset);
  window.addEventListener("resize", draw);
  window.addEventListener("keydown", function (e) {
    if (e.key === "Escape") { reset(); search.blur(); }
    if (e.key === "/" ? document.activeElement !== search : false) { e.preventDefault(); search.focus(); }
  });
  page.removeAttribute("viewBox");
  page.setAttribute("width", "100%");
  byId("controls").style.display = "block";
  draw();
})();
"""


# The maximum depth that is shown, because recursion can make stacks of thousands of frames.
MAX_DEPTH = 400
# A box is drawn if its share of the whole width is at least this, about a third of a pixel.
_LEAST = 0.0003


@dataclass(frozen=True, slots=True)
class _Box:
    """One frame of the graph. ``left`` and ``width`` are shares of the whole width; the root has ``depth`` 0 and
    ``frame`` None.

    ``shares`` and ``ns`` have a value for each profile; ``own``: the part of ``ns`` in the frame itself, without the
    functions that it calls.
    """

    frame: Frame | None
    left: float
    width: float
    depth: int
    shares: tuple[float, ...]
    ns: tuple[int, ...]
    own: tuple[int, ...]


def boxes(profiles: Sequence[Profile]) -> Iterator[_Box]:
    """Yields the frames that are wide enough to be visible, parents first.

    A width is the mean of the frame's shares in the profiles, so a frame that only one profile has gets a box, too.
    """
    # Stacks with a common beginning are neighbours after sorting, so a frame is a range of stacks.
    marked = [s._replace(labels=(("", f"{i}"),)) for i, profile in enumerate(profiles) for s in profile.samples]
    samples = merged(marked, labels=True)
    stacks = [sample.frames for sample in samples]
    sums = [_sums(samples, f"{i}") for i in range(len(profiles))]
    wholes = [found[-1] or 1 for found in sums]
    waiting: list[tuple[Frame | None, int, int, float, int]] = [(None, 0, len(stacks), 0.0, 0)]
    while waiting:
        frame, first, end, left, depth = waiting.pop()
        ns = tuple(found[end] - found[first] for found in sums)
        ranges = list(_ranges(stacks, first, end, depth))
        inner = ranges[0][1] if ranges else end
        shares = tuple(n / whole for n, whole in zip(ns, wholes, strict=True))
        own = tuple(found[inner] - found[first] for found in sums)
        yield _Box(frame, left, sum(shares) / len(shares), depth, shares, ns, own)
        below = []
        for child, begin, stop in ranges if depth < MAX_DEPTH else ():
            parts = ((found[stop] - found[begin]) / whole for found, whole in zip(sums, wholes, strict=True))
            width = sum(parts) / len(wholes)
            if width >= _LEAST:
                below.append((child, begin, stop, left, depth + 1))
            left += width
        waiting += reversed(below)


def _sums(samples: Sequence[Sample], mark: str) -> list[int]:
    """Returns prefix sums over all ``samples``: entry i is the time that the first i samples add to the profile
    ``mark``.
    """
    return [0, *accumulate(s.ns if s.labels[0][1] == mark else 0 for s in samples)]


def _ranges(stacks: Sequence[tuple[Frame, ...]], first: int, end: int, depth: int) -> Iterator[tuple[Frame, int, int]]:
    """Yields the frames at ``depth``, each with its range of stacks. Stacks that end before this depth come first."""
    while first < end and len(stacks[first]) == depth:
        first += 1
    while first < end:
        frame, begin = stacks[first][depth], first
        while first < end and stacks[first][depth] == frame:
            first += 1
        yield frame, begin, first


_WIDTH = 1200
_MARGIN = 12
_TOP = 92
_ROW = 18
_CHARACTER = 6.7
# For each kind of code: hue, spread of the hue, saturation and lightness in per cent.
_PALETTE = {
    "own code": (14, 9, 88, 68),
    "packages": (41, 7, 88, 66),
    "standard library": (176, 12, 38, 68),
    "no code": (220, 4, 8, 76),
}
_MORE, _ALIKE, _LESS = "hsl(8,85%,62%)", "hsl(40,10%,88%)", "hsl(214,80%,64%)"


def flame_graph(profile: Profile, subtitle: str) -> str:
    """Returns an SVG in which widths are time; colours mark own code, installed packages and the standard library."""
    short = short_files([profile])
    drawn = [(box, _text(box, short, profile.title), _colour(box.frame), _tip(box)) for box in boxes([profile])]
    legend = [(kind, f"hsl({hue},{rich}%,{light}%)") for kind, (hue, _, rich, light) in _PALETTE.items()]
    return _document(profile.title, subtitle, legend, drawn)


def flame_graph_difference(base: Profile, chosen: Profile, subtitle: str, rival: str = "before") -> str:
    """Returns an SVG whose widths are the mean of both shares; red frames have a larger share in ``chosen``.

    ``rival`` is the name of ``base``, such as ``rank 0``.
    """
    short = short_files([base, chosen])
    drawn = [
        (box, _text(box, short, "all"), _change_colour(*box.shares), _difference_tip(box, rival))
        for box in boxes([base, chosen])
    ]
    legend = [(f"more than {rival}", _MORE), (f"as {rival}", _ALIKE), ("less", _LESS)]
    return _document(f"{chosen.title} compared with {base.title}", subtitle, legend, drawn)


def _text(box: _Box, short: dict[str, str], title: str) -> str:
    return escape(title if box.frame is None else label(box.frame, short))


def _colour(frame: Frame | None) -> str:
    hue, spread, rich, light = _PALETTE[_kind(frame)]
    # A function has the same colour in all graphs.
    seed = zlib.crc32(encoded(repr(frame[:2] if frame else "")))
    return f"hsl({hue + seed % (2 * spread + 1) - spread},{rich}%,{light + seed // 256 % 9 - 4}%)"


def _kind(frame: Frame | None) -> str:
    if frame is None or not frame.file:
        return "no code"
    if "/site-packages/" in frame.file or "/dist-packages/" in frame.file:
        return "packages"
    return "standard library" if "/lib/python3" in frame.file or frame.file.startswith("<frozen ") else "own code"


def _change_colour(before: float, after: float) -> str:
    change = (after - before) / ((after + before) or 1)
    if abs(change) < 0.02:
        return _ALIKE
    hue = 8 if change > 0 else 214
    strength = abs(change) ** 0.6
    return f"hsl({hue},{30 + 55 * strength:.0f}%,{88 - 26 * strength:.0f}%)"


def _tip(box: _Box) -> str:
    own = f", {age(box.own[0])} in itself" if 0 < box.own[0] < box.ns[0] else ""
    return f"{age(box.ns[0])}, {share_text(box.shares[0], 2)}{own}"


def _difference_tip(box: _Box, rival: str) -> str:
    was, now = box.shares
    other = "was" if rival == "before" else f"{rival}:"
    change = f"{share_text(now, 2)}, {other} {share_text(was, 2)}: {(now - was) * 100:+.2f} points"
    return f"{change} ({age(box.ns[1])}, {other} {age(box.ns[0])})"


def _document(
    title: str, subtitle: str, legend: Sequence[tuple[str, str]], drawn: Sequence[tuple[_Box, str, str, str]]
) -> str:
    height = _TOP + _ROW * (1 + max(box.depth for box, *_ in drawn)) + _MARGIN
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n',
        f'<svg xmlns="http://www.w3.org/2000/svg" id="page" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">\n',
        f"<title>{escape_xml(escape(title))}</title>\n<style>{STYLE}</style>\n",
        '<rect id="paper" width="100%" height="100%"/>\n',
        f'<text class="title" x="{_MARGIN}" y="28">{escape_xml(escape(title))}</text>\n',
        f'<text class="quiet" x="{_MARGIN}" y="47">{escape_xml(escape(subtitle))}</text>\n',
        *_legend(legend),
        f'<text id="details" x="{_MARGIN}" y="84"> </text>\n',
        '<foreignObject id="controls" x="0" y="10" width="330" height="34"><div xmlns="http://www.w3.org/1999/xhtml">'
        '<span id="found"></span><input id="search" type="search" placeholder="Search  ( / )" spellcheck="false"/>'
        '<button id="reset">Reset</button></div></foreignObject>\n',
        f'<svg id="frames" x="{_MARGIN}" y="{_TOP}" width="{_WIDTH - 2 * _MARGIN}" height="{height - _TOP}">\n',
        *(_box(*entry) for entry in drawn),
        f"</svg>\n<script>{SCRIPT}</script>\n</svg>\n",
    ]
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    at = float(_MARGIN)
    for name, colour in entries:
        yield f'<rect x="{at:.0f}" y="57" width="11" height="11" rx="2.5" fill="{colour}"/>'
        yield f'<text class="quiet" x="{at + 16:.0f}" y="66.5">{escape_xml(escape(name))}</text>\n'
        at += 34 + 6.2 * len(name)


def _box(box: _Box, text: str, colour: str, tip: str) -> str:
    room = int(((_WIDTH - 2 * _MARGIN) * box.width - 7) / _CHARACTER)
    shown = text if len(text) <= room else text[: room - 1] + "…" if room > 3 else ""
    return (
        f'<svg class="f" x="{box.left * 100:.4f}%" y="{box.depth * _ROW}" width="{box.width * 100:.4f}%" '
        f'height="{_ROW}" data-x="{box.left:.7f}" data-w="{box.width:.7f}" data-d="{box.depth}">'
        f"<title>{escape_xml(text)}\n{escape_xml(tip)}</title>"
        f'<rect width="100%" height="{_ROW - 1}" rx="2" fill={quoteattr(colour)}/>'
        f'<text x="4" y="12.5">{escape_xml(shown)}</text></svg>\n'
    )
