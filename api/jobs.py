"""Names of jobs of several users: ``4711 (uid 1002)`` is the job 4711 of a user who does not have the name 4711."""

from __future__ import annotations

import re

__all__ = ("names_owner", "with_owner")

_OWNER = re.compile(r" \(uid [0-9]{1,10}\)$")


def with_owner(job: str, owner: int) -> str:
    """Returns the name of the job of ``owner``, a uid."""
    return f"{job} (uid {owner})"


def names_owner(job: str) -> bool:
    """Returns whether a name of a job says whose it is."""
    return _OWNER.search(job) is not None
