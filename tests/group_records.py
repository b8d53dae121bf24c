"""Specifications, owners and records of groups for tests."""

from __future__ import annotations

import hashlib
from typing import Any

from probing.groups.group import Action, Group, created, order_of
from probing.groups.keys import OwnerKey
from probing.groups.spec import Spec

__all__ = ("BASE", "BEGUN_NS", "NS", "key_of", "ordered", "record", "running", "spec_of")

NS = 1_000_000_000
BEGUN_NS = 1_800_000_000 * NS
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
