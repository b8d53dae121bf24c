"""Parts that end in each way that a part can end in, for the tests of the runner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from gpu_kit.part import Part, Skip
from gpu_kit.scene import Scene


def good(scene: Scene) -> None:
    scene.checks.equal("sum", 4, 2 + 2)
    scene.checks.measured("figure", 23)


def wrong(scene: Scene) -> None:
    scene.checks.equal("sum", 4, 2 + 2)
    scene.checks.equal("product", 5, 2 * 2)


def crashes(scene: Scene) -> None:
    scene.checks.equal("sum", 4, 2 + 2)
    raise ValueError("seven is no even number")


def dies(scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(scene: Scene) -> None:
    scene.checks.equal("sum", 4, 2 + 2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (scene.place / "child").write_text(str(child.pid))
    time.sleep(1000)


def leaves_a_child(scene: Scene) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (scene.place / "child").write_text(str(child.pid))
    scene.checks.equal("sum", 4, 2 + 2)


def finds_nothing(scene: Scene) -> None:
    raise Skip("no GPU is here")


def skips_all_checks(scene: Scene) -> None:
    scene.checks.skip("sum", "no GPU is here")


def checks_nothing(scene: Scene) -> None:
    pass


def needs_a_gpu(scene: Scene) -> None:
    scene.checks.add("never called", False, "", "")


PARTS = (
    *(Part(run.__name__, f"it {run.__name__}", 30, run) for run in (good, wrong, crashes, dies, hangs, leaves_a_child)),
    *(Part(run.__name__, f"it {run.__name__}", 30, run) for run in (finds_nothing, skips_all_checks, checks_nothing)),
    Part("needs_a_gpu", "it needs a GPU", 30, needs_a_gpu, ("gpu",)),
)
