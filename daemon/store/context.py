"""The objects that all parts of one open store share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from probing.api.tables import Table
from probing.daemon.clock import Clock
from probing.daemon.store.files import Files
from probing.daemon.store.state import StoreState
from probing.daemon.store.tasks.worker import Worker

__all__ = ("StoreContext",)


class StoreContext(NamedTuple):
    """The shared objects of an open store. ``root``: the state directory; ``worker`` runs the tasks that seal, merge
    and salvage. ``synced``: see ``SegmentFile``.
    """

    root: Path
    files: Files
    clock: Clock
    tables: Mapping[str, Table]
    state: StoreState
    worker: Worker
    synced: set[Path]
