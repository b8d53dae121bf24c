"""Facts about a process from a reader, checked and frozen. Identities are computed only from these facts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from probing.api.errors import InternalError
from probing.api.typed import typed
from probing.daemon.source import ProcessKey

__all__ = ("Facts",)

_FRAMEWORKS = frozenset({"torch", "nccl", "jax"})
_PYTHON = re.compile(r"python[0-9.]*[a-z-]*$")
# Name prefixes of the threads that a process group starts (torch/csrc/distributed/c10d: ProcessGroupGloo, -NCCL; gloo).
_GROUP_THREADS = ("pt_gloo", "pt_nccl", "pt_ucc", "pt_mpi", "gloo_")


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a process. ``ancestors`` has (pid, start_ns, name of the program) for each ancestor, the parent
    first. All texts went through ``clean_text``.

    ``environ``: the variables that the process has now or had at exec; ``current``: the names of the variables that it
    has now. ``uid``: the real uid. ``owner``: see ``owners.owner_of``. ``coordinator``: "HOST:PORT" where the ranks of
    the job meet, if Python modules of the process contain it.
    """

    pid: int
    start_ns: int
    ppid: int = 0
    uid: int = 0
    owner: int = 0
    comm: str = ""
    exe: str = ""
    cmdline: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    current: frozenset[str] = frozenset()
    cgroup: tuple[str, ...] = ()
    libraries: frozenset[str] = frozenset()
    threads: frozenset[str] = frozenset()
    ancestors: tuple[tuple[int, int, str], ...] = ()
    coordinator: str = ""

    @property
    def key(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ns)

    @property
    def program(self) -> str:
        return self.exe.removesuffix(" (deleted)").rpartition("/")[2]

    @property
    def python(self) -> bool:
        return "python" in self.libraries or _PYTHON.match(self.program) is not None

    @property
    def framework(self) -> bool:
        """Whether the process maps torch, NCCL or jaxlib."""
        return not self.libraries.isdisjoint(_FRAMEWORKS)

    @property
    def in_group(self) -> bool:
        """Whether the process has threads of a process group."""
        return any(name.startswith(_GROUP_THREADS) for name in self.threads)

    def after(self, before: Facts) -> Facts:
        """Returns these facts, completed by ``before``, an earlier reading of the same program.

        A variable from exec is kept even if the process has since removed it or overwritten its text with a title. The
        ancestors are kept even if an ancestor has ended, so that its child now has the first process as its parent.
        """
        now = {name: self.environ[name] for name in self.current}
        return replace(
            self,
            environ={**self.environ, **before.environ, **now},
            current=self.current | before.current,
            ancestors=before.ancestors or self.ancestors,
            coordinator=self.coordinator or before.coordinator,
        )

    @classmethod
    def from_reader(cls, header: Mapping[str, Any]) -> Facts:
        """Returns the facts in a reader's answer to ``identity``. Raises InternalError if the answer is malformed."""
        try:
            current = header["variables"] or {}
            environ = {**header["environ"], **current}
            return typed(cls, {**header, "environ": environ, "current": list(current)})
        except (KeyError, TypeError, ValueError) as e:
            raise InternalError("a reader's answer contains no identity") from e
