"""The configured sizes of rings, checked before the kernel refuses them."""

from __future__ import annotations

import mmap

from probing.api.errors import ConfigError

__all__ = ("checked_ring_size",)


def checked_ring_size(key: str, size: int) -> int:
    """Returns ``size``, bytes. Raises ConfigError where the kernel takes no ring of it; ``key`` is the setting."""
    if size & (size - 1) or size < mmap.PAGESIZE:
        hint = f"a power of two, for example {max(1 << size.bit_length(), 1 << 16)}"
        raise ConfigError(f"{key} is {size}", hint=hint)
    return size
