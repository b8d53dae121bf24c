"""Style and script of the flame graph. Neither may contain ``&`` or ``<``: they are not escaped in the XML."""

from __future__ import annotations

__all__ = ("SCRIPT", "STYLE")

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
