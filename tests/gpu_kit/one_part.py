"""The process of one part: ``python -m gpu_kit.one_part NAME FOLDER``; FOLDER has ``scene.json``.

It ends with 0, with EXIT_SKIPPED where something was missing, or with 1 after an exception; ``why`` then has the text.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpu_kit.part import Part, Skip
from gpu_kit.runner import EXIT_SKIPPED
from gpu_kit.scene import Scene

__all__ = ("main", "run")


def run(name: str, folder: Path) -> int:
    """Runs the part ``name``, and returns its exit code."""
    scene = Scene.load(folder).of_part(name)
    try:
        parts: Sequence[Part] = importlib.import_module(scene.parts).PARTS
        next(part for part in parts if part.name == name).run(scene)
    except Skip as e:
        (folder / name / "why").write_text(str(e))
        return EXIT_SKIPPED
    except Exception as e:  # whatever is wrong with a part is its result
        traceback.print_exc()
        (folder / name / "why").write_text(f"{type(e).__name__}: {e}")
        return 1
    finally:
        scene.close()
    return 0


def main() -> int:
    """Runs the part that the arguments name."""
    return run(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
