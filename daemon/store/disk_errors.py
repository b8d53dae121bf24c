"""Turns errors of the file system into errors of the store."""

from __future__ import annotations

import errno
from pathlib import Path

from probing.api.errors import StoreError, StoreFull

__all__ = ("NO_SPACE", "TRANSIENT", "store_error")

# A quota that is used up is a full disk, too.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# The process recovers from these, and they are no fault of the file.
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def store_error(e: OSError, root: Path) -> StoreError:
    """Returns ``e``, met in the state directory ``root``, as StoreFull or StoreError with a hint."""
    reason = e.strerror or str(e)
    if e.errno in NO_SPACE:
        return StoreFull(f"the state directory {root} is full: {reason}")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "give it to the user that the collector runs as, or choose another --state-dir"
        return StoreError(f"the state directory {root} is not writable: {reason}", hint=hint)
    return StoreError(f"the state directory {root} cannot be used: {reason}", hint="look at the disk in the kernel log")
