"""Prints the versions of a report of pip as constraints: ``python packaging/constraints.py REPORT``.

The format of the report: https://pip.pypa.io/en/stable/reference/installation-report/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Named by the Makefile, or ours.
_LEFT_OUT = ("torch", "probingd")


def main(report: str) -> None:
    parts = [part["metadata"] for part in json.loads(Path(report).read_text())["install"]]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for part in sorted(parts, key=lambda part: part["name"].lower()):
        if part["name"] not in _LEFT_OUT:
            print(f'{part["name"]}=={part["version"]}; python_version == "{python}"')


if __name__ == "__main__":
    main(*sys.argv[1:])
