"""Where a part runs: the facts about the machine, the daemon beside it, and the jobs that it starts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gpu_kit.part import Checks, Skip
from gpu_kit.patience import patient
from gpu_kit.watch import Watch
from gpu_kit.work import Job

__all__ = ("JOBS", "Closing", "Libraries", "Machine", "Scene", "until")

T = TypeVar("T")
# The programs that are watched.
JOBS = Path(__file__).resolve().parent / "jobs"


class Closing(Protocol):
    """Something that is closed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Libraries:
    """Paths of libraries; "" where there is none. In a rehearsal they are the doubles."""

    nccl: str = ""
    cudart: str = ""
    nvml: str = ""


@dataclass(frozen=True)
class Machine:
    """``missing``: need -> why it cannot be met, "" or absent where it can. ``facts`` are for the report."""

    python: str
    libraries: Libraries
    facts: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rehearsal: bool = False

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Machine:
        return cls(**{**content, "libraries": Libraries(**content["libraries"])})


@dataclass
class Scene:
    """``folder`` has a folder for each part. ``socket`` is the daemon's, "" where none runs.

    ``parts`` is the module whose PARTS a process of a part looks in.
    """

    folder: Path
    machine: Machine
    socket: str = ""
    bin: str = ""
    ras_port: int = 28028
    parts: str = "gpu_kit.parts"
    part: str = ""
    checks: Checks = field(init=False, repr=False)
    _undo: contextlib.ExitStack = field(init=False, repr=False)
    _watch: Watch | None = field(init=False, repr=False, default=None)

    def save(self) -> None:
        """Writes ``scene.json``, which ``load`` reads in the process of a part."""
        content = {
            "machine": asdict(self.machine),
            "socket": self.socket,
            "bin": self.bin,
            "ras_port": self.ras_port,
            "parts": self.parts,
        }
        (self.folder / "scene.json").write_text(json.dumps(content))

    @classmethod
    def load(cls, folder: Path) -> Scene:
        content = json.loads((folder / "scene.json").read_text())
        return cls(folder, **{**content, "machine": Machine.from_dict(content["machine"])})

    def of_part(self, name: str) -> Scene:
        """Returns the scene of one part, with its checks."""
        scene = replace(self, part=name)
        scene._watch = None
        scene.place.mkdir(parents=True, exist_ok=True)
        scene.checks = Checks(scene.place / "checks.jsonl")
        scene._undo = contextlib.ExitStack()
        return scene

    @property
    def place(self) -> Path:
        return self.folder / self.part

    def need(self, *names: str) -> None:
        """Raises Skip where one of ``names`` is missing here."""
        for name in names:
            if why := self.machine.missing.get(name):
                raise Skip(why)

    def has(self, name: str) -> bool:
        return not self.machine.missing.get(name)

    @property
    def daemon(self) -> Watch:
        """The client of the daemon; Skip where none runs."""
        self.need("daemon")
        if self._watch is None:
            self._watch = self._undo.enter_context(Watch(self.socket, self.bin))
        return self._watch

    def job(self, script: str, *args: str, size: int = 1, name: str = "", **environ: str) -> Job:
        """Starts ranks of ``jobs/script.py`` by the machine's Python; they end with the part."""
        folder = self.place / (name or script)
        folder.mkdir(parents=True, exist_ok=True)
        made = Job([self.machine.python, str(JOBS / f"{script}.py"), *args], folder, size, environ)
        return self._undo.enter_context(made)

    def keeper(self) -> Job:
        """Starts a rank that keeps the probes in place on the libraries, so that each job need not wait for them."""
        self.need("nccl")
        found = self.machine.libraries
        environ = {"LD_LIBRARY_PATH": str(Path(found.cudart).parent)} if self.machine.rehearsal else {}
        return self.job("keeper", found.cudart, found.nccl, **environ)

    def direct_job(self, *, size: int = 1, name: str = "direct", **environ: str) -> Job:
        """Starts ranks that call NCCL and the CUDA runtime by ctypes: the real ones, or the doubles."""
        self.need("nccl")
        folder = self.place / name
        folder.mkdir(parents=True, exist_ok=True)
        found = self.machine.libraries
        args = ["--nccl", found.nccl, "--cudart", found.cudart, "--folder", str(folder)]
        if self.machine.rehearsal:
            environ = {"NCCL_DOUBLE_DIR": str(folder), "LD_LIBRARY_PATH": str(Path(found.cudart).parent)} | environ
        return self.job("direct", *args, size=size, name=name, **environ)

    def serve(self, server: Closing) -> None:
        """Closes ``server`` when the part ends."""
        self._undo.callback(server.close)

    def close(self) -> None:
        """Ends the jobs and the connection to the daemon."""
        self._undo.close()


def until(condition: Callable[[], T], seconds: float, what: str, poll_s: float = 0.1) -> T:
    """Returns the first true value of ``condition``. Raises TimeoutError, which names ``what``, after ``seconds``."""
    end = time.monotonic() + patient(seconds)
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {patient(seconds):g} s: {what}")
        time.sleep(poll_s)
    return value
