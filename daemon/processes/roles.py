"""Assigns roles to the processes to watch: trainer, launcher, data_loader or other.

Roles depend only on facts, so two daemons on a node agree, and a process that imports its framework late gets its role
from its new facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Ranks, ranks_of
from probing.daemon.processes.titles import role_in_title
from probing.daemon.source import ProcessKey

__all__ = ("NATIVE_LAUNCHERS", "interpreter_target", "launches", "roles")

# Programs other than Python that start the ranks of a job.
NATIVE_LAUNCHERS = frozenset(
    (
        *("hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "mpirun", "mpirun.mpich"),
        *("mpirun.openmpi", "orted", "orterun", "prted", "prterun", "slurmstepd", "srun"),
    )
)
_LAUNCH_PROGRAMS = frozenset({"deepspeed", "horovodrun", "torchrun"})
_LAUNCH_MODULES = re.compile(
    r"torch[./]distributed[./](?:run|launch)(?:\.py)?$|deepspeed[./]launcher[./](?:runner|launch)(?:\.py)?$"
    r"|accelerate[./]commands[./]launch(?:\.py)?$|horovod[./]runner(?:[./]launch(?:\.py)?)?$"
)
_ACCELERATE = re.compile(r"accelerate(?:[./]commands[./]accelerate_cli(?:\.py)?)?$")
_HELPER_CODE = re.compile(r"from multiprocessing\.(?:resource_tracker|semaphore_tracker|forkserver) import")
_HELPER_MODULES = re.compile(r"torch[./]_inductor[./]compile_worker|torch[./]_inductor[./].*subproc")
# The program may be the dynamic loader, whose arguments are its options and then the command line of the real program.
_LOADER = re.compile(r"(?:.*/)?ld(?:-[\w.-]+)?\.so(?:\.[0-9]+)*$")
_LOADER_OPTIONS = ("--argv0", "--audit", "--glibc-hwcaps-mask", "--glibc-hwcaps-prepend", "--library-path", "--preload")
_ELASTIC_THREAD = "pt_elastic"
_LOADER_THREAD = "pt_data_worker"


def interpreter_target(cmdline: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    """Returns the program that a Python runs: ("script" | "module" | "code" | "", its name or code, its arguments)."""
    rest = _of_interpreter(list(cmdline))[1:]
    while rest:
        word = rest.pop(0)
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            rest[:1] = []
        elif re.fullmatch(r"-[A-Za-z]*[mc]", word):
            kind = "module" if word.endswith("m") else "code"
            return (kind, rest[0], tuple(rest[1:])) if rest else ("", "", ())
        elif not word.startswith("-"):
            return "script", word, tuple(rest)
    return "", "", ()


def _of_interpreter(words: list[str]) -> list[str]:
    """Returns the command line of the Python interpreter, without a dynamic loader and its options before it."""
    if words and _LOADER.match(words[0]):
        del words[:1]
        while words and words[0].startswith("--"):
            del words[: 2 if words[0] in _LOADER_OPTIONS else 1]
    return words


def launches(facts: Facts) -> bool:
    """Returns whether the program starts the ranks of a job."""
    if facts.program in NATIVE_LAUNCHERS:
        return True
    if not facts.python:
        return False
    kind, name, arguments = interpreter_target(facts.cmdline)
    if kind not in ("script", "module"):
        return False
    if _ACCELERATE.search(name):
        return arguments[:1] == ("launch",)
    named = name.rpartition("/")[2] in _LAUNCH_PROGRAMS if kind == "script" else False
    return named or _LAUNCH_MODULES.search(name) is not None


def roles(processes: Iterable[Facts]) -> dict[ProcessKey, str]:
    """Returns the role of each watched process; other processes are left out.

    A process is watched if it maps torch, NCCL or jaxlib; if it is a Python process with the environment variables of a
    rank; if it is a Python helper of a trainer, such as a data loader; or if it is a launcher. A launcher that is not a
    Python process is watched only if a watched process descends from it.
    """
    known = {facts.key: facts for facts in processes}
    assigned = _Assignment(known)
    for key in sorted(known, key=lambda key: (key[1], len(known[key].ancestors), key[0])):
        assigned.decide(known[key])
    assigned.promote_parents()
    return assigned.watched()


class _Assignment:
    def __init__(self, known: Mapping[ProcessKey, Facts]) -> None:
        self.known = known
        self.ranks = {key: ranks_of(facts.environ) for key, facts in known.items()}
        self.titles = {key: role_in_title(facts.cmdline) for key, facts in known.items()}
        self.role: dict[ProcessKey, str] = {}

    def ancestors(self, facts: Facts) -> list[Facts]:
        keys = (ProcessKey(pid, start) for pid, start, _ in facts.ancestors)
        return [self.known[key] for key in keys if key in self.known]

    def decide(self, facts: Facts) -> None:
        role = self._role(facts)
        if role:
            self.role[facts.key] = role

    def _role(self, facts: Facts) -> str:
        if launches(facts):
            return "launcher"
        if not facts.python:
            return "trainer" if facts.framework else ""
        title = self.titles[facts.key]
        if title == "launcher" or (title == "trainer" and facts.framework):
            return title
        ranks = self.ranks[facts.key]
        watched = facts.framework or ranks is not None
        above = self._trainer_above(facts)
        if title == "other" or _helper(facts):
            return "other" if above or watched else ""
        if _LOADER_THREAD in facts.threads or facts.comm == _LOADER_THREAD:
            return "data_loader"
        if above is not None:
            return self._below(facts, above, ranks)
        if facts.comm == _ELASTIC_THREAD:
            return "launcher"
        if not watched:
            return ""
        return "trainer" if facts.framework or (ranks is not None and ranks.certain) else "other"

    def _trainer_above(self, facts: Facts) -> Facts | None:
        # If a launcher is between the process and a trainer, the process is a rank of that launcher.
        for above in self.ancestors(facts):
            role = self.role.get(above.key)
            if role in ("trainer", "launcher"):
                return above if role == "trainer" else None
        return None

    def _below(self, facts: Facts, above: Facts, ranks: Ranks | None) -> str:
        """Returns the role of a process below a trainer: trainer (if ``above`` is only a wrapper, or the process is
        another rank), data_loader, or other.
        """
        # Lightning's rank 0 starts the other ranks with its own command line. A process that is only a fork has no
        # threads of a process group.
        again = _runs(facts) == _runs(above) and not (ranks and ranks.same(self.ranks[above.key]))
        if facts.in_group and (again or not above.in_group):
            return "trainer"
        if facts.framework and not above.framework:
            return "trainer"
        if ranks is not None and ranks.certain and not ranks.same(self.ranks[above.key]):
            return "trainer"
        if _forked(facts, above) or (_spawned(facts) and self.ranks[above.key] is not None):
            return "data_loader"
        return "other"

    def promote_parents(self) -> None:
        """Gives the role launcher to ancestors of trainers that do not train themselves: callers of ``mp.spawn``, and
        wrappers.

        A Python without a framework becomes a launcher if it started trainers with multiprocessing, as the engine of an
        inference server does.
        """
        for key in [key for key, role in self.role.items() if role == "trainer"]:
            for above in self.ancestors(self.known[key]):
                ranks, role = self.ranks[above.key], self.role.get(above.key)
                trains = above.in_group or (above.framework and ranks is not None and ranks.certain)
                if role == "trainer" and (not trains or self.titles[above.key] == "engine"):
                    self.role[above.key] = "launcher"
            parent = self._parent(self.known[key])
            if parent is not None and parent.key not in self.role and parent.python and self._started(key, parent):
                self.role[parent.key] = "launcher"

    def _parent(self, facts: Facts) -> Facts | None:
        return next((self.known.get(ProcessKey(pid, start)) for pid, start, _ in facts.ancestors[:1]), None)

    def _started(self, key: ProcessKey, parent: Facts) -> bool:
        """Returns whether multiprocessing started a trainer. A title hides the arguments that would show this, so every
        trainer with a title counts as started by multiprocessing.
        """
        facts = self.known[key]
        return _forked(facts, parent) or _spawned(facts) or self.titles[key] == "trainer"

    def watched(self) -> dict[ProcessKey, str]:
        needed = {
            (pid, start)
            for key, role in self.role.items()
            if role != "launcher" or self.known[key].python
            for pid, start, _ in self.known[key].ancestors
        }
        return {
            key: role
            for key, role in self.role.items()
            if role != "launcher" or self.known[key].python or key in needed
        }


def _forked(facts: Facts, above: Facts) -> bool:
    return facts.exe == above.exe and facts.cmdline == above.cmdline


def _spawned(facts: Facts) -> bool:
    return "--multiprocessing-fork" in facts.cmdline


def _runs(facts: Facts) -> tuple[str, str, tuple[str, ...]]:
    """Returns the program that a Python runs: kind, name without its folder, and arguments."""
    kind, name, arguments = interpreter_target(facts.cmdline)
    return kind, name.rpartition("/")[2], arguments


def _helper(facts: Facts) -> bool:
    kind, name, _ = interpreter_target(facts.cmdline)
    if kind == "code":
        return _HELPER_CODE.search(name) is not None
    return _HELPER_MODULES.search(name) is not None
