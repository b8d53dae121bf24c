"""Real frameworks beside a real daemon: who is which rank, what they call, and who holds them up.

``make frameworks`` installs them and writes what was seen to .build/frameworks/seen.json.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Daemon, directory_for_daemons, end_process, remove, start_process
from ports import free_port
from process_tree import family
from waiting import until

HERE = Path(__file__).resolve().parent
VENV = HERE.parents[1] / ".build" / "frameworks"
VLLM = HERE.parents[1] / ".build" / "vllm"
SEEN = VENV / "seen.json"
# The line of common.py that stands still.
LINE = next(
    number
    for number, line in enumerate((HERE / "jobs" / "common.py").read_text().splitlines(), 1)
    if "the line that the finding names" in line
)
PLACE = f"common.py:{LINE}"
WATCHED_S = 60
PATIENCE_S = 180
# Names of the flight recorder for what comm.ops calls otherwise.
SAME = {
    "all_gather_into_tensor": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
_FINDING = (
    "SELECT verdict, sentence, ranks, stacks, state FROM diagnosis.findings WHERE state = 'open' AND severity = 'error'"
    " AND job = '{}' ORDER BY ts DESC LIMIT 1"
)


@dataclass(frozen=True)
class Framework:
    """``command``: FOLDER, PORT and BIN stand for what they say; ``each``: it is run once for each RANK.

    ``sources``: the evidence for the ranks; ``thread``: part of the name of the thread that trains; ``least``: how many
    operations of a rank to wait for before the minute of looks; ``env``: of its processes; ``venv``: of its Python.
    """

    name: str
    command: str
    sources: tuple[str, ...] = ("environment",)
    thread: str = "MainThread"
    each: bool = False
    least: int = 50
    env: tuple[tuple[str, str], ...] = ()
    venv: Path = VENV


TORCHRUN = "BIN/torchrun --nproc-per-node 2 --master-port PORT"
FRAMEWORKS = (
    Framework("torchrun", f"{TORCHRUN} ddp.py FOLDER"),
    Framework("setproctitle", f"{TORCHRUN} titled.py FOLDER"),
    Framework("mp.spawn", "BIN/python spawned.py FOLDER PORT", sources=("communicator", "module")),
    Framework("accelerate", f"{TORCHRUN} accelerated.py FOLDER"),
    Framework(
        "lightning",
        "BIN/python lightning_fit.py FOLDER",
        sources=("communicator", "module"),
        env=(("MASTER_PORT", "PORT"),),
    ),
    Framework(
        "deepspeed",
        "BIN/deepspeed --num_gpus 2 --master_port PORT deepspeed_zero.py FOLDER",
        env=(("DS_ACCELERATOR", "cpu"), ("TORCH_EXTENSIONS_DIR", str(VENV / "extensions"))),
    ),
    Framework("ray train", "BIN/python ray_train.py FOLDER", thread="TrainingThread"),
    Framework(
        "jax",
        "BIN/python jax_psum.py FOLDER PORT RANK",
        sources=("module",),
        each=True,
        env=(("JAX_PLATFORMS", "cpu"),),
    ),
    # It has collectives only when it begins and ends.
    Framework("rpc", f"{TORCHRUN} rpc_master.py FOLDER", thread="", least=3),
    Framework("vllm", "BIN/python vllm_engine.py FOLDER", sources=("communicator", "title"), venv=VLLM),
)


class Job:
    """A job of a framework, in a folder of its own."""

    def __init__(self, framework: Framework, folder: Path) -> None:
        self.framework = framework
        self.folder = folder
        port, self.log = str(free_port()), folder / "job.log"
        binaries = framework.venv / "bin"
        values = {"FOLDER": str(folder), "PORT": port, "BIN": str(binaries)}
        env = {"PATH": f"{binaries}:/usr/bin:/bin", "TORCH_FR_BUFFER_SIZE": "50000", "PYTHONUNBUFFERED": "1"}
        env |= {name: _filled(value, values) for name, value in framework.env}
        self.processes = []
        with self.log.open("ab") as log:
            for rank in range(2 if framework.each else 1):
                words = _filled(framework.command, {**values, "RANK": str(rank)}).split()
                options: dict[str, Any] = {"cwd": HERE / "jobs", "stdout": log, "stderr": subprocess.STDOUT}
                self.processes.append(start_process(*words, env=env, **options))

    def counts(self) -> dict[int, dict[str, int]]:
        """What the ranks called, by pid."""
        (self.folder / "count").touch()
        until(lambda: all((self.folder / f"counts-{rank}").exists() for rank in range(2)), what=self.tail)
        found = [json.loads((self.folder / f"counts-{rank}").read_text()) for rank in range(2)]
        return {one.pop("pid"): one for one in found}

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        for process in self.processes:
            end_process(process)


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    yield from directory_for_daemons()


@pytest.fixture(scope="module")
def daemon(base: Path) -> Iterator[Daemon]:
    with _daemon(base, "n1") as started:
        yield started


@contextlib.contextmanager
def _daemon(base: Path, name: str) -> Iterator[Daemon]:
    made = Daemon(base, name)
    try:
        yield made.start()
    finally:
        remove(made)


class Watch:
    """Asks once a second who trains, from another thread: no rank and no job that was known may be lost."""

    def __init__(self, daemon: Daemon) -> None:
        self.wrong: list[str] = []
        self.times = 0
        self._daemon = daemon
        self._known: dict[int, tuple[str, int]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(1.0):
            self.times += 1
            for row in trainers(self._daemon):
                now, before = (row["job"], row["rank"]), self._known.get(row["pid"])
                if before is not None and now != before:
                    self.wrong.append(f"pid {row['pid']} was {before} and is {now}")
                elif now[1] is not None:
                    self._known[row["pid"]] = now


def trainers(daemon: Daemon) -> list[dict[str, Any]]:
    return daemon.rows(
        "SELECT pid, job, rank, world_size, role, rank_source, train_tid, python FROM process.processes"
        " WHERE role = 'trainer' AND state <> 'exited' ORDER BY rank"
    )


def ranks_of(daemon: Daemon, job: Job) -> list[dict[str, Any]]:
    """The two ranks of the job, once both are known."""

    def found() -> list[dict[str, Any]]:
        pids = {pid for process in job.processes for pid in family(process.pid)}
        rows = [row for row in trainers(daemon) if row["rank"] is not None and row["pid"] in pids]
        return rows if [(row["rank"], row["world_size"]) for row in rows] == [(0, 2), (1, 2)] else []

    return until(found, PATIENCE_S, what=lambda: f"{trainers(daemon)}\n{job.tail()}\n{daemon.tail()}")


def finding_of(daemon: Daemon, name: str, job: Job) -> dict[str, Any]:
    """The finding about the job, once it names rank 1 at the line that stands still."""

    def found() -> dict[str, Any]:
        rows = daemon.rows(_FINDING.format(name))
        return rows[0] if rows and rows[0]["ranks"] == "1" and PLACE in rows[0]["sentence"] else {}

    return until(found, PATIENCE_S, what=lambda: f"{daemon.ctl('diagnose', check=None).stdout}\n{job.tail()}")


def calls(daemon: Daemon, name: str) -> dict[int, Counter[str]]:
    """The operations of a job by pid, those in flight as well."""
    counted: dict[int, Counter[str]] = {}
    for table in ("comm.ops", "comm.inflight"):
        for row in daemon.rows(f"SELECT pid, op, count(*) AS n FROM {table} WHERE job = '{name}' GROUP BY pid, op"):
            counted.setdefault(row["pid"], Counter())[row["op"]] += row["n"]
    return counted


def note(framework: Framework, **values: object) -> None:
    """Adds what was seen of a framework to SEEN."""
    seen = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    seen.setdefault(framework.name, {}).update(values)
    SEEN.write_text(json.dumps(seen, indent=1))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_a_framework_is_seen_from_its_start_and_late(framework: Framework, daemon: Daemon, base: Path) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="probingd-framework-")))
        folder.chmod(0o755)
        job = Job(framework, folder)
        stack.callback(job.close)
        ranks = ranks_of(daemon, job)
        (name,) = {row["job"] for row in ranks}
        until(
            lambda: sum(calls(daemon, name).get(ranks[0]["pid"], Counter()).values()) >= framework.least,
            PATIENCE_S,
            what=job.tail,
        )
        # A communicator goes before a module, and may be seen later.
        sources = sorted({row["rank_source"] for row in ranks_of(daemon, job)})
        assert set(sources) <= set(framework.sources)
        watch = Watch(daemon)
        stack.callback(watch.close)
        until(lambda: watch.times >= WATCHED_S, 3 * WATCHED_S, what=lambda: f"{watch.times} looks")
        assert not watch.wrong

        (folder / "go").touch()
        until(lambda: (folder / "fault-1").exists(), what=lambda: f"the fault of {framework.name}:\n{job.tail()}")
        finding = finding_of(daemon, name, job)
        culprit = next(one for one in json.loads(finding["stacks"]) if one["role"] == "culprit")
        assert framework.thread in culprit["thread"]
        late = _late(framework, base, job, ranks)
        own = {
            pid: Counter({SAME.get(op, op): n for op, n in Counter(counts).items()})
            for pid, counts in job.counts().items()
        }
        assert calls(daemon, name) == own
        began = int((folder / "fault-1").read_text())
        note(framework, job=name, sources=sources, verdict=finding["verdict"], late=late, fault_ns=began)


def _late(framework: Framework, base: Path, job: Job, ranks: list[dict[str, Any]]) -> str:
    """What a daemon says that starts beside the job that hangs."""
    with _daemon(base, "n2") as daemon:
        began = time.monotonic()
        again = ranks_of(daemon, job)
        assert [(row["pid"], row["rank"]) for row in again] == [(row["pid"], row["rank"]) for row in ranks]
        finding = finding_of(daemon, again[0]["job"], job)
        note(framework, late_s=round(time.monotonic() - began, 1))
        return str(finding["verdict"])
