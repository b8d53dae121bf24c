"""Prolog and epilog of packaging/slurm with a real daemon, and without one: a job never fails for its watcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.nvml_double import NvmlDouble, build_nvml, recorded
from e2e_support import BIN, Daemon
from waiting import until

SLURM = Path(__file__).resolve().parents[2] / "packaging" / "slurm"
JOB = "4711"
# NVML_ERROR_GPU_IS_LOST
GPU_IS_LOST = 15


class Scripts:
    """The scripts as slurmd starts them, with settings of a node; ``said`` is what they logged."""

    def __init__(self, folder: Path, target: str, probingctl: Path = BIN / "probingctl") -> None:
        self.answers = folder / "answers"
        self._folder = folder
        self._target = target
        self._settings = {"probingctl": str(probingctl), "directory": str(self.answers), "limit_s": "30"}

    def run(self, name: str, job: str = JOB, **settings: str) -> int:
        lines = [f"{key}='{value}'" for key, value in {**self._settings, **settings}.items()]
        file = self._folder / "settings"
        file.write_text("\n".join([*lines, f'say() {{ echo "$1" >>{self._folder}/said; }}', ""]))
        environment = {
            "PATH": "/usr/bin:/bin",
            "SLURM_JOB_ID": job,
            "PROBINGD_SLURM_SETTINGS": str(file),
            "PROBING_TARGET": self._target,
        }
        done = subprocess.run([SLURM / f"{name}.sh"], env=environment, capture_output=True, text=True, check=False)
        assert done.stdout + done.stderr == ""
        return done.returncode

    def said(self) -> str:
        file = self._folder / "said"
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return text

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.answers.iterdir()) if self.answers.is_dir() else []


def rank_of(number: int) -> dict[str, str]:
    """The environment of one of two tasks of srun, which start torch's ranks."""
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon that accepts connections and never answers."""
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield f"unix:{path}"


def test_a_node_before_and_after_a_job(
    base: Path, make_daemon: Callable[..., Daemon], run_job: Callable[..., Any], tmp_path: Path
) -> None:
    folder = base / "nvml"
    folder.mkdir(mode=0o755)
    # The recorded values have errors of memory.
    double = NvmlDouble(build_nvml(folder), {**recorded(1), "gpu0.field.4": 0, "gpu0.field.143": "u0"})
    options = (f"--gpu.library={double.library}", f"--gpu.sysfs={base}/sys", "--gpu.interval_s=0.2")
    daemon = make_daemon("n1", *options).start()
    scripts = Scripts(tmp_path, daemon.target)
    # A job of which one rank is killed, and then the other by srun.
    words = ("/usr/bin/python3", "-c", "import signal; signal.pause()")
    ranks = [run_job(*words, env=rank_of(number)) for number in range(2)]
    until(lambda: {row["pid"] for row in daemon.json("ps")} >= {rank.pid for rank in ranks}, what="both ranks in ps")
    for rank, number in ((ranks[1], signal.SIGKILL), (ranks[0], signal.SIGTERM)):
        rank.send_signal(number)
        rank.wait()
    ended = ("events", "--job", JOB)
    until(lambda: len([each for each in daemon.json(*ended) if each["event"] == "exit"]) == 2, what="both exits")
    # The daemon has stored what it finds itself.
    until(lambda: daemon.rows("SELECT 1 FROM diagnosis.findings WHERE verdict = 'rank_died'"), what=daemon.tail)
    assert scripts.run("epilog") == 0
    assert scripts.kept() == [f"{JOB}.facts", f"{JOB}.txt"]
    text = (scripts.answers / f"{JOB}.txt").read_text()
    first = text.splitlines()[0]
    assert "Rank 1" in first
    assert "was killed by SIGKILL" in first
    assert scripts.said() == f"job {JOB}: {first}\n"
    assert "rank_died" in text.partition("Do next")[2]
    again = daemon.ctl("-f", "json", "diagnose", "--facts", str(scripts.answers / f"{JOB}.facts"), check=3)
    assert json.loads(again.stdout)["verdict"] == "rank_died"
    # Of a job that trained nothing there is no answer; answers go when they are old.
    os.utime(scripts.answers / f"{JOB}.txt", (0, 0))
    assert scripts.run("epilog", "815") == 0
    assert scripts.kept() == [f"{JOB}.facts"]
    assert "job 815: no diagnosis" in scripts.said()
    # A GPU that fails between two jobs.
    until(lambda: daemon.rows("SELECT 1 FROM gpu.utilization LIMIT 1"), what=daemon.tail)
    # The machine of the test may have other faults, such as a full file system.
    assert "fail    gpu_health" not in daemon.ctl("preflight", check=None).stdout
    double.set({"gpu0.lost": GPU_IS_LOST})
    until(lambda: "fail    gpu_health" in daemon.ctl("preflight", check=None).stdout, what="a failed check")
    assert scripts.run("prolog") == 0
    assert "finds a fault" in scripts.said()
    assert scripts.run("prolog", drain="preflight") == 1


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_no_daemon_fails_no_job(name: str, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, f"unix:{tmp_path}/nobody.sock")
    assert scripts.run(name, drain="preflight health") == 0
    assert scripts.kept() == []
    assert "nobody.sock" in scripts.said()


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_daemon_that_does_not_answer_fails_no_job(name: str, silent: str, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, silent)
    assert scripts.run(name, drain="preflight health", checks="health", limit_s="1") == 0
    assert scripts.kept() == []
    assert "within 1 s" in scripts.said()


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_node_without_probingctl_fails_no_job(name: str, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, "", tmp_path / "absent")
    assert scripts.run(name) == 0
    assert (scripts.kept(), scripts.said()) == ([], "")


@pytest.mark.parametrize("job", ["", "../4711", "4711 -o /etc/passwd"])
def test_only_numbers_become_names_of_files(job: str, tmp_path: Path) -> None:
    scripts = Scripts(tmp_path, f"unix:{tmp_path}/nobody.sock")
    assert scripts.run("epilog", job) == 0
    assert (scripts.kept(), scripts.said()) == ([], "")


def test_a_directory_that_cannot_be_written_fails_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scripts = Scripts(tmp_path, f"unix:{tmp_path}/nobody.sock")
    assert scripts.run("epilog", directory=f"{tmp_path}/file/answers") == 0
    assert "cannot write to" in scripts.said()
