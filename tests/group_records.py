"""Specifications, owners and records of groups for tests."""

from __future__ import annotations

import hashlib
from typing import Any

from probing.groups.group import Action, Group, created, order_of
from probing.groups.keys import OwnerKey
from probing.groups.spec import Spec

__all__ = (
    "BASE",
    "BEGUN_NS",
    "FENCE_S",
    "NS",
    "finding_of",
    "group_of",
    "key_of",
    "newer",
    "ordered",
    "record",
    "running",
    "spec_of",
)

NS = 1_000_000_000
BEGUN_NS = 1_800_000_000 * NS
FENCE_S = 20.0
BASE: dict[str, Any] = {
    "name": "llama",
    "version": 1,
    "owner": "ada",
    "uid": 1000,
    "signed_on": "gn6",
    "workers": ("gn6-0", "gn6-1", "gn7-0", "gn7-1"),
    "master": "gn6",
    "command": ("python", "train.py"),
}


def key_of(name: str = "ada") -> OwnerKey:
    """Returns the key of a user; always the same one for a name."""
    return OwnerKey(hashlib.sha256(name.encode()).digest())


def spec_of(**fields: Any) -> Spec:
    return Spec(**{**BASE, **fields})


def record(**fields: Any) -> Group:
    """Returns the record of a new group."""
    return created(spec_of(**fields), key_of())


def ordered(group: Group, action: Action, *without: str, now_ns: int = BEGUN_NS) -> Group:
    """Returns the record after an order of the owner."""
    return group.ordered(order_of(group, action, key_of(), without), now_ns)


def running(*without: str, **fields: Any) -> Group:
    """Returns the record of a group that runs its first generation."""
    return ordered(record(**fields), "start", *without).running(BEGUN_NS, address="10.0.0.6", port=29500)


def group_of(*names: str, slots: int = 1, **fields: Any) -> Group:
    """Returns the record of a new group of the first workers of nodes; the first node is the master."""
    workers = tuple(f"{name}-{number}" for name in names for number in range(slots))
    return record(**{"workers": workers, "master": names[0], "grace_s": 3.0, "fence_s": FENCE_S, **fields})


def newer(group: Group, **fields: Any) -> Group:
    """Returns the record for a newer specification of a group."""
    old = group.spec
    known = {name: getattr(old, name) for name in ("workers", "master", "grace_s", "fence_s", "min_nodes", "restart")}
    more = {"on_hang": old.on_hang, "max_restarts": old.max_restarts, "version": old.version + 1}
    return record(**{**known, **more, **fields})


def finding_of(*ranks: int, number: int = 1, **more: Any) -> dict[str, Any]:
    """Returns a row of ``diagnosis.findings`` that blames ranks of the group."""
    blamed = ",".join(map(str, ranks))
    known = {"job": "llama", "finding_id": f"f{number}", "severity": "error", "state": "open", "found_by": "gn7"}
    return {**known, "sentence": f"rank {blamed} hangs", "ranks": blamed, **more}
