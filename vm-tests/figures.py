"""Figures that the tests measure in guests, a JSON file a kernel; ``figures.py FOLDER`` prints them as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ("Figures",)


class Figures(dict[str, float]):
    """Name with its unit -> value, of one kernel."""

    def __init__(self, series: str) -> None:
        super().__init__()
        self._series = series

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"figures-{self._series}.json").write_text(json.dumps(self, indent=1) + "\n")


def main(folder: str) -> None:
    """Prints a column a kernel."""
    paths = Path(folder).glob("figures-*.json")
    found = {path.stem.removeprefix("figures-"): json.loads(path.read_text()) for path in paths}
    found = dict(sorted(found.items(), key=lambda item: [int(number) for number in item[0].split(".")]))
    print(f"| | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        values = (figures.get(name) for figures in found.values())
        print(f"| {name} | {' | '.join('' if value is None else f'{value:g}' for value in values)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
