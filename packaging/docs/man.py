"""Writes the man pages: ``man.py DIRECTORY`` makes DIRECTORY/man1/probingctl.1 and the others of man/ beside this file.

A line ``include PAGE.md#SECTION`` stands for a section of a page of docs/, ``include PAGE.md`` for what stands before
its first section. The date is today's, or the day of SOURCE_DATE_EPOCH, for builds that can be repeated.
"""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

from roff import escape, parse, render

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"


def write(directory: Path) -> None:
    """Writes all pages below ``directory``. Raises LookupError for a section that docs/ lacks."""
    for source in sorted((HERE / "man").glob("*.md")):
        name, _, number = source.stem.rpartition(".")
        path = directory / f"man{number}" / source.stem
        path.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"^include (\S+\.md)(?:#(.+))?$", lambda m: included(m[1], m[2]), source.read_text(), flags=re.M)
        path.write_text("\n".join([_title(name, number), *render(parse(text)), ""]), encoding="ascii")


def included(page: str, section: str | None) -> str:
    """Returns a section of a page without its heading, or what stands between title and first section (None)."""
    found: list[str] | None = [] if section is None else None
    in_code = False
    for line in (DOCS / page).read_text().splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("## ") and not in_code:
            if found is not None:
                break
            found = [] if line[3:] == section else None
        elif found is not None and not line.startswith("# "):
            found.append(line)
    if found is None:
        raise LookupError(f"docs/{page} has no section {section}")
    return "\n".join(found)


def _title(name: str, number: str) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    return f'.TH {escape(name.upper())} {number} {day} "probingd {version("probingd")}"'


if __name__ == "__main__":
    write(Path(sys.argv[1]))
