"""Opens the state directory into which rows are imported, and acts as its owner."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from probing.api.errors import StateLocked, StoreFull
from probing.api.tables import Table
from probing.daemon.arrow import batch_of
from probing.daemon.store.limits import StoreLimits
from probing.daemon.store.store import Store

__all__ = ("Target", "acting_as", "append_losses", "check_space", "open_target")


@dataclass(frozen=True, slots=True)
class Target:
    """The state directory of ``node``, into which rows are imported; ``tables``: the tables that it may have."""

    root: Path
    node: str
    limits: StoreLimits
    tables: Mapping[str, Table]


@contextmanager
def open_target(target: Target) -> Iterator[Store]:
    """Context manager that opens the store, and closes it as the owner of the directory. Raises StateLocked while a
    daemon uses the directory.
    """
    try:
        store = Store.open(target.root, node=target.node, limits=target.limits, tables=target.tables, background=False)
    except StateLocked as e:
        raise StateLocked(e.message, hint="stop it (`probingd stop`), import, and start it again") from e
    try:
        yield store
    finally:
        with acting_as(target.root):
            store.close()


def append_losses(store: Store, node: str, now_ns: int) -> None:
    """Appends a row to probing.losses for each loss that the store reports, as the daemon does."""
    losses = [*store.recovery_losses, *store.take_losses()]
    rows = [
        {
            "node": node,
            "ts": now_ns,
            "source": x.source,
            "table_name": x.table,
            "stage": x.stage,
            "reason": x.reason,
            "pid": x.pid,
            "ts_from": x.ts_from_ns,
            "ts_to": x.ts_to_ns,
            "count": x.count,
        }
        for x in losses
    ]
    if rows:
        store.append({"probing.losses": [batch_of("probing.losses", rows)]}, {})


def check_space(target: Target, store: Store, need: int) -> None:
    """Raises StoreFull when ``need`` more bytes would exceed the limit of the store."""
    used, limit = int(store.status()["bytes"]), target.limits.max_bytes
    if used + need > limit:
        hint = "raise store.max_bytes, or import less: otherwise the oldest rows are dropped for the new rows"
        raise StoreFull(f"{need} bytes do not fit: {used} are used, store.max_bytes is {limit}", hint=hint)


@contextmanager
def acting_as(root: Path) -> Iterator[None]:
    """Context manager that acts as the owner of the state directory, so that new files belong to the daemon's user."""
    owner = root.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    group = os.getegid()
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
