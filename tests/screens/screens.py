"""What probingctl shows of a job that runs, hangs, died or is paused, on terminals of 80x24 and 200x50.

``make screens`` writes a text file a command, state and size into .build/screens, or into the directory that is given:
as tmux shows it, with what has scrolled away above. It needs root and tmux; nothing else may run a daemon meanwhile.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "tests")]

from e2e_support import BIN, EXAMPLE, JOBS, Daemon, family, remove  # noqa: E402
from ports import free_port  # noqa: E402
from waiting import until  # noqa: E402

SIZES = ((80, 24), (200, 50))
ASKED = (["diagnose"], ["ps"], ["top", "--once"], ["top"], ["nccl"], ["stacks", "--merge"], ["events"])
# How long a live screen is left alone, s: native stacks come with a later frame.
LIVE_S = 6


@contextmanager
def job(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks under torchrun; their output goes to ``log``."""
    argv = [BIN / "torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), *command]
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["env", "OMP_NUM_THREADS=1", *map(str, argv)], stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield process
        finally:
            for pid in family(process.pid) if process.poll() is None else ():
                subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)
            process.wait()


@contextmanager
def daemon(base: Path) -> Iterator[Daemon]:
    made = Daemon(base, "gpu-node-17")
    try:
        yield made.start()
    finally:
        remove(made)


def screen(directory: Path, name: str, target: Daemon, arguments: list[str], columns: int, lines: int) -> None:
    """Runs one command in a terminal of its own and saves its screen."""
    command = shlex.join([str(BIN / "probingctl"), "-t", target.target, *arguments])
    live = arguments[0] == "top" and "--once" not in arguments
    # A server of its own: one that is being left takes no new session.
    tmux = ["tmux", "-L", f"screens-{uuid.uuid4()}", "-f", "/dev/null"]
    with tempfile.NamedTemporaryFile() as done:
        shell = f"{command}; echo $? >{done.name}; sleep 1000"
        size = ["-x", str(columns), "-y", str(lines)]
        subprocess.run([*tmux, "new-session", "-d", *size, "sh", "-c", shell], check=True)
        try:
            if live:
                time.sleep(LIVE_S)
            else:
                until(lambda: Path(done.name).read_bytes(), what=command)
            shown = subprocess.run([*tmux, "capture-pane", "-p", "-S", "-"], check=True, capture_output=True, text=True)
        finally:
            subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
    file = directory / f"{name}-{'-'.join(arguments).replace('--', '')}-{columns}x{lines}.txt"
    file.write_text(shown.stdout.rstrip("\n") + "\n")


def screens(directory: Path, name: str, target: Daemon, *more: list[str]) -> None:
    for columns, lines in SIZES:
        for arguments in [*ASKED, *more]:
            screen(directory, name, target, arguments, columns, lines)


def operations(target: Daemon, at_least: int) -> None:
    sql = "SELECT count(*) AS n FROM comm.ops"
    until(lambda: target.rows(sql)[0]["n"] >= at_least, what="operations")


def healthy(directory: Path, base: Path) -> None:
    with daemon(base) as target, job(base / "job.log", EXAMPLE, "--steps", "1000000", "--delay-ms", "20"):
        operations(target, 200)
        screens(directory, "healthy", target)


def paused(directory: Path, base: Path) -> None:
    with daemon(base) as target, job(base / "job.log", EXAMPLE, "--steps", "1000000", "--delay-ms", "20"):
        operations(target, 200)
        target.ctl("pause")
        screens(directory, "paused", target)


def hung(directory: Path, base: Path) -> None:
    with daemon(base) as target, job(base / "job.log", JOBS / "stops.py", "199", "sleep"):
        operations(target, 2 * 199)
        until(lambda: target.rows("SELECT 1 AS one FROM comm.inflight WHERE age_ns > 2e9"), what="who waits")
        screens(directory, "hung", target)


def hung_before(directory: Path, base: Path) -> None:
    """It hung before the daemon came."""
    with job(base / "job.log", JOBS / "stops.py", "199", "sleep"):
        until(lambda: (base / "job.log").read_text().count("waits") == 2, what="the hang")
        with daemon(base) as target:
            screens(directory, "hung_before", target, ["stacks", "--native"])


def dead(directory: Path, base: Path) -> None:
    with daemon(base) as target, job(base / "job.log", JOBS / "stops.py", "199", "kill") as process:
        process.wait()
        screens(directory, "dead", target, ["ps", "--ended"])


STATES: dict[str, Callable[[Path, Path], None]] = {
    "healthy": healthy,
    "paused": paused,
    "hung": hung,
    "hung_before": hung_before,
    "dead": dead,
}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".build" / "screens")
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or STATES:
        with tempfile.TemporaryDirectory(prefix="probingd-screens-") as base:
            Path(base).chmod(0o755)
            STATES[name](directory, Path(base))


if __name__ == "__main__":
    main()
