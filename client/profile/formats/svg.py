"""A flame graph as one self-contained SVG file, outermost frames at the top.

In a browser a click zooms, a search marks, and the width follows the window; without scripts it is a picture.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape as escape_xml
from xml.sax.saxutils import quoteattr

from probing.api.text import age, encoded, escape, share_text
from probing.client.profile.formats.svg_page import SCRIPT, STYLE
from probing.client.profile.formats.tree import Box, boxes
from probing.client.profile.model import Frame, Profile, label, short_files

__all__ = ("flame_graph", "flame_graph_difference")

_WIDTH = 1200
_MARGIN = 12
_TOP = 92
_ROW = 18
_CHARACTER = 6.7
# Hue, spread of the hue, saturation and lightness in per cent.
_PALETTE = {
    "own code": (14, 9, 88, 68),
    "packages": (41, 7, 88, 66),
    "standard library": (176, 12, 38, 68),
    "no code": (220, 4, 8, 76),
}
_MORE, _ALIKE, _LESS = "hsl(8,85%,62%)", "hsl(40,10%,88%)", "hsl(214,80%,64%)"


def flame_graph(profile: Profile, subtitle: str) -> str:
    """Returns an SVG whose widths are time; colours mark own code, installed packages and the standard library."""
    short = short_files([profile])
    drawn = [(box, _text(box, short, profile.title), _colour(box.frame), _tip(box)) for box in boxes([profile])]
    legend = [(kind, f"hsl({hue},{rich}%,{light}%)") for kind, (hue, _, rich, light) in _PALETTE.items()]
    return _document(profile.title, subtitle, legend, drawn)


def flame_graph_difference(base: Profile, chosen: Profile, subtitle: str, rival: str = "before") -> str:
    """Returns an SVG whose widths are the mean of both shares; red frames have a larger share in ``chosen``.

    ``rival`` names ``base``, as ``rank 0``.
    """
    short = short_files([base, chosen])
    drawn = [
        (box, _text(box, short, "all"), _change_colour(*box.shares), _difference_tip(box, rival))
        for box in boxes([base, chosen])
    ]
    legend = [(f"more than {rival}", _MORE), (f"as {rival}", _ALIKE), ("less", _LESS)]
    return _document(f"{chosen.title} compared with {base.title}", subtitle, legend, drawn)


def _text(box: Box, short: dict[str, str], title: str) -> str:
    return escape(title if box.frame is None else label(box.frame, short))


def _colour(frame: Frame | None) -> str:
    hue, spread, rich, light = _PALETTE[_kind(frame)]
    # Equal functions have equal colours in all graphs.
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


def _tip(box: Box) -> str:
    own = f", {age(box.own[0])} in itself" if 0 < box.own[0] < box.ns[0] else ""
    return f"{age(box.ns[0])}, {share_text(box.shares[0], 2)}{own}"


def _difference_tip(box: Box, rival: str) -> str:
    was, now = box.shares
    other = "was" if rival == "before" else f"{rival}:"
    change = f"{share_text(now, 2)}, {other} {share_text(was, 2)}: {(now - was) * 100:+.2f} points"
    return f"{change} ({age(box.ns[1])}, {other} {age(box.ns[0])})"


def _document(
    title: str, subtitle: str, legend: Sequence[tuple[str, str]], drawn: Sequence[tuple[Box, str, str, str]]
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


def _box(box: Box, text: str, colour: str, tip: str) -> str:
    room = int(((_WIDTH - 2 * _MARGIN) * box.width - 7) / _CHARACTER)
    shown = text if len(text) <= room else text[: room - 1] + "…" if room > 3 else ""
    return (
        f'<svg class="f" x="{box.left * 100:.4f}%" y="{box.depth * _ROW}" width="{box.width * 100:.4f}%" '
        f'height="{_ROW}" data-x="{box.left:.7f}" data-w="{box.width:.7f}" data-d="{box.depth}">'
        f"<title>{escape_xml(text)}\n{escape_xml(tip)}</title>"
        f'<rect width="100%" height="{_ROW - 1}" rx="2" fill={quoteattr(colour)}/>'
        f'<text x="4" y="12.5">{escape_xml(shown)}</text></svg>\n'
    )
