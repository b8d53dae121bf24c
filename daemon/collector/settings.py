"""The configuration as the collector's parts want it."""

from __future__ import annotations

import mmap
import os
import pwd
from typing import Literal

from probing.api.errors import ConfigError
from probing.daemon.config import Config
from probing.daemon.store.retention import StoreLimits

__all__ = ("limits_of", "ring_size", "user_number")

_DAY_S = 86_400.0
# Of the ring of samples: for each CPU, and at least and at most.
SAMPLES_BYTES = 256 << 10
MIN_SAMPLES_BYTES, MAX_SAMPLES_BYTES = 2 << 20, 32 << 20


def limits_of(config: Config) -> StoreLimits:
    store = config.store
    return StoreLimits(
        max_bytes=store.max_bytes,
        keep_free_bytes=store.keep_free_bytes,
        max_age_s=store.max_age_days * _DAY_S,
        part_bytes=store.part_bytes,
        sync_interval_s=store.sync_interval_s,
    )


def ring_size(config: Config, section: Literal["probes", "sampling"]) -> int:
    """Bytes of the ring that a section speaks of. Raises ConfigError for what the kernel would refuse."""
    size: int = getattr(config, section).ring_bytes
    if section == "sampling" and not size:
        # 128 samples a CPU: a second of it at 99 Hz, with some that leave it.
        wanted = (os.cpu_count() or 1) * SAMPLES_BYTES
        return min(max(1 << (wanted - 1).bit_length(), MIN_SAMPLES_BYTES), MAX_SAMPLES_BYTES)
    if size & (size - 1) or size < mmap.PAGESIZE:
        hint = f"a power of two, for example {max(1 << size.bit_length(), 1 << 16)}"
        raise ConfigError(f"{section}.ring_bytes is {size}", hint=hint)
    return size


def user_number(user: str) -> int:
    """The uid of a user given by name or number. Raises ConfigError."""
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError as e:
        raise ConfigError(f"there is no user {user!r}", hint="create it, or set [users] in the configuration") from e
