"""Pictures of ``top``, in the colours of a terminal, beside the nodes that its tests use. Needs tmux, and no root.

``python tests/screens/pictures.py DIRECTORY`` writes an SVG a page and size.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "tests")]

from client_top_scene import Scene, Terminal, top  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

SIZES = ((80, 24), (200, 60))
# Keys of each page, and what it shows then.
PAGES = {"main": ((), "STUCK"), "plain": (("G",), "resnet"), "rank": (("Enter",), "STACK"), "help": (("?",), "KEYS")}


def picture(terminal: Terminal, title: str, columns: int) -> str:
    """Returns the screen as SVG."""
    console = Console(record=True, width=columns, force_terminal=True, color_system="truecolor", file=io.StringIO())
    # A style may go on in the next line.
    console.print(Text.from_ansi(terminal.screen(colours=True)), no_wrap=True, overflow="crop")
    return console.export_svg(title=title)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".build" / "screens")
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["PYTEST_CURRENT_TEST"] = "pictures of_top"
    for columns, lines in SIZES:
        for name, (keys, shown) in PAGES.items():
            with (
                tempfile.TemporaryDirectory() as base,
                Scene(Path(base)) as scene,
                top(scene.first.address, columns, lines, "--all-nodes") as terminal,
            ):
                terminal.shows("STUCK", "CPU")
                terminal.press(*keys or ("k",))
                terminal.shows(shown)
                file = directory / f"top-{name}-{columns}x{lines}.svg"
                file.write_text(picture(terminal, "probingctl top", columns))


if __name__ == "__main__":
    main()
