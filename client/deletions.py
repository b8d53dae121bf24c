"""Says in words which rows of nodes a new limit would delete, before any node changes the limit."""

from __future__ import annotations

from collections.abc import Sequence

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import plural, size, utc
from probing.client.zone import when

__all__ = ("amount", "require_no_deletion")


def amount(rows: int, size_bytes: int, segments: int) -> str:
    """Returns a text such as ``1,234 rows (5.6 MiB in 7 segments)``."""
    return f"{plural(rows, 'row')} ({size(size_bytes)} in {plural(segments, 'segment')})"


def require_no_deletion(key: str, value: str | None, replies: Sequence[pb.ConfigReply]) -> None:
    """Raises UsageError if a reply to a proposal says that rows would be deleted, or comes from an older node that
    cannot say.

    ``value`` None means that the setting is to be reset.
    """
    change = f"{key} {'--reset' if value is None else f'= {value}'}"
    if older := [reply.node for reply in replies if not reply.HasField("effect")]:
        raise UsageError(
            f"{change}: the probingd of {', '.join(older[:3])} is older, and does not say what it would delete",
            hint="it deletes at once: upgrade it first, or confirm the change with --yes",
        )
    if doomed := [reply for reply in replies if reply.effect.segments]:
        effects = [reply.effect for reply in doomed]
        what = amount(sum(e.rows for e in effects), sum(e.bytes for e in effects), sum(e.segments for e in effects))
        where = doomed[0].node if len(doomed) == 1 else f"{len(doomed)} nodes"
        begins = when(utc(min(e.begins_ns for e in effects)))
        raise UsageError(
            f"{change} would delete {what} of {where}",
            hint=f"confirm it with --yes: rows are deleted from {begins} on, unless the limit is reset before that",
        )
