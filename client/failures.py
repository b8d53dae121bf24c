"""Processes that could not be read."""

from __future__ import annotations

from collections.abc import Sequence

from probing.api.errors import error_from
from probing.client.messages import Failure
from probing.client.session import warn

__all__ = ("report_failures",)


def report_failures(failures: Sequence[Failure], *, all_failed: bool) -> None:
    """Warns of each of ``failures``; with ``all_failed`` raises the first one instead."""
    if failures and all_failed:
        first = failures[0]
        raise error_from(first["kind"], _text(first), first["hint"])
    for failure in failures:
        warn(_text(failure))


def _text(failure: Failure) -> str:
    rank = "" if failure["rank"] is None else f" (rank {failure['rank']})"
    return f"pid {failure['pid']}{rank} on {failure['node']}: {failure['reason']}"
