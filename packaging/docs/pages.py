"""Writes the pages of docs/ that are made from the code: ``pages.py DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

import commands
import tables

from probing.diagnosis import vocabulary

PAGES = {"commands.md": commands.page, "tables.md": tables.page, "verdicts.md": vocabulary.page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(sys.argv[1], name).write_text(page())
