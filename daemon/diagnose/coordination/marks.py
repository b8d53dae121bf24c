"""Marks of jobs: what a node publishes of the jobs whose ranks it holds, in 8 bytes each."""

from __future__ import annotations

import hashlib

__all__ = ("LIVING", "job_mark")

LIVING = 1
"""The bit of a mark that says that a rank of the job lives on the node."""


def job_mark(job: str, run: str, *, living: bool) -> int:
    """Returns the mark of a run of a job: 64 bits of a hash, the lowest of them ``LIVING``."""
    text = f"{job}\0{run}".encode(errors="replace")
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return number & ~LIVING | (LIVING if living else 0)
