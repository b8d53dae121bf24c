"""The page for a night on call: a job hangs, is ended, a job is slow, a node is overloaded, and each command answers.

``make night`` prints how long each answer takes, and when the line of Python at fault is on the screen.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from diagnosis_jobs import FAULTS, Ranks, folder_of_job
from e2e_support import BIN, Daemon
from long import long
from network_namespaces import may_make_namespaces
from pages import ShownCommand, shape, shown_commands
from site_of_nodes import Site, site_of
from waiting import until

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces cannot be made here")

PAGE = "night-on-call.md"
NODES = ("gpu07", "gpu08")
HANG, ENDED, SLOW, OVERLOADED = "A job hangs", "It was ended", "A job is slow", "A node is overloaded"
# By section of the page: the job's script, its case, its number of ranks, and what names the line or process at fault.
SCENES = {
    HANG: ("hangs.py", "lock", 8, "record_metrics, hangs.py:"),
    SLOW: ("slow.py", "sleeps", 2, "augment, slow.py:"),
    OVERLOADED: ("slow.py", "beside_a_hog", 2, "hog (pid "),
}
# How long a fault may take until the daemon has named it, s. A rank is slow over many steps.
NAMED_S = 180.0


class Night:
    """Runs the commands of the page on the first node, as its user would.

    ``job``: the job of the section. ``answered_s``: how long the last answer took, s.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.job: Ranks | None = None
        self.answered_s = 0.0

    @contextmanager
    def training(self, script: str, case: str, size: int) -> Iterator[Ranks]:
        """A job whose ranks are on the nodes in turn."""
        nodes = [rank % len(NODES) for rank in range(size)]
        with folder_of_job() as folder:
            job = self.job = Ranks(NODES[0], folder, script, case, size)
            try:
                self.site.start(job, nodes)
                if case == "beside_a_hog":
                    self.run_hog(job)
                ranks = f"SELECT DISTINCT rank FROM comm.ops WHERE job = '{job.job}' AND op = 'all_reduce'"
                for number, daemon in enumerate(self.site.daemons):
                    until(lambda d=daemon: len(d.rows(ranks)) == nodes.count(number), what=job.output)  # type: ignore[misc] # noqa: B023
                yield job
            finally:
                job.kill()
                job.wait()

    def run_hog(self, job: Ranks) -> None:
        """Starts processes on the second node that take the CPU of rank 1 once the fault begins."""
        self.site.run(job, 1, [*job.command[:1], str(FAULTS / "hog.py"), "1", str(job.folder)])

    def answer(self, words: list[str]) -> str:
        """Returns what a command of the page prints; notes its time."""
        assert self.job is not None
        _, *options = [str(self.job.port) if word == "29500" else word for word in words]
        command = [str(BIN / "probingctl"), "-t", self.site.daemons[0].target, *self.site.shown, *options]
        began = time.monotonic()
        done = subprocess.run([*self.site.spaces[0].words, *command], capture_output=True, text=True)
        self.answered_s = time.monotonic() - began
        assert done.returncode in (0, 3), f"{shlex.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def look(self, name: str, commands: list[ShownCommand], job: Ranks, fault: str) -> None:
        """Begins the fault of a section, waits until a daemon has named it, and asks the commands of the section."""
        job.go()
        until(job.faults, what=job.output)
        began = time.monotonic()
        sql = f"SELECT 1 FROM diagnosis.findings WHERE job = '{job.job}' AND ranks = '1' AND severity <> 'note'"
        until(lambda: self.site.daemons[0].rows(sql), NAMED_S, what=self.site.daemons[0].tail)
        print(f"\n{name}: named {time.monotonic() - began:.1f} s after the fault")
        self.answer_all(name, commands, fault)

    def answer_all(self, name: str, commands: list[ShownCommand], fault: str) -> None:
        """Asks the commands of a section; the first one must name what is at fault."""
        for number, shown in enumerate(commands):
            text = self.ask(shown, NAMED_S)
            assert number or fault in text
            print(f"{name}: {shlex.join(shown.words)}: {self.answered_s:.2f} s\n{text}")

    def ask(self, shown: ShownCommand, seconds: float) -> str:
        """Asks until the first line has the shape that the page shows, and returns the output."""
        texts = [""]

        def as_shown() -> bool:
            texts.append(self.answer(shown.words))
            return shape(texts[-1].partition("\n")[0]) == shape(shown.output)

        until(as_shown, seconds, what=lambda: f"{shlex.join(shown.words)} to begin with: {shown.output}\n{texts[-1]}")
        return texts[-1]


@pytest.fixture
def night(base: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Night]:
    with site_of(base, make_daemon, NODES, clocks=(0.0, 0.0), more=((), ()), cpus=2.0) as site:
        yield Night(site)


@long
@pytest.mark.timeout(900)
def test_each_command_of_the_night_answers(night: Night) -> None:
    sections = {name: list(commands) for name, commands in groupby(shown_commands(PAGE), lambda shown: shown.section)}
    assert list(sections) == [HANG, ENDED, SLOW, OVERLOADED]
    for name, (script, case, size, fault) in SCENES.items():
        with night.training(script, case, size) as job:
            night.look(name, sections[name], job, fault)
            if name == HANG:
                for process in job.processes:
                    process.terminate()
                job.wait()
                night.answer_all(ENDED, sections[ENDED], SCENES[HANG][3])
