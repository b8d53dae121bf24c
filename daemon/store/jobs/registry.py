"""The jobs of the store that need no rights, by name. Each reads open files and yields steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from probing.daemon.store.jobs.merge import merge
from probing.daemon.store.jobs.messages import Step
from probing.daemon.store.jobs.salvage import salvage
from probing.daemon.store.jobs.seal import seal
from probing.daemon.store.jobs.segment_output import Source

__all__ = ("JOBS",)

# A job's fields come from JSON.
JOBS: dict[str, Callable[[Sequence[Source], Mapping[str, Any]], Iterator[Step]]] = {
    "merge": merge,
    "salvage": salvage,
    "seal": seal,
}
