"""The tasks of the store that need no rights, by name. Each reads open files and yields steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from probing.daemon.store.tasks.merge import merge
from probing.daemon.store.tasks.messages import Step
from probing.daemon.store.tasks.salvage import salvage
from probing.daemon.store.tasks.seal import seal
from probing.daemon.store.tasks.segment_output import Source

__all__ = ("TASKS",)

# A task's fields come from JSON.
TASKS: dict[str, Callable[[Sequence[Source], Mapping[str, Any]], Iterator[Step]]] = {
    "merge": merge,
    "salvage": salvage,
    "seal": seal,
}
