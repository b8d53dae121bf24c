"""The collector's answers as messages of probing.v1. What the collector read of its targets is bounded there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from probing.api.errors import InternalError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.service.errors import to_proto

__all__ = ("stacks_reply", "status_fields")


def status_fields(status: Mapping[str, Any]) -> pb.StatusReply:
    """The fields of a StatusReply that ``status`` has under the same names; others are ignored."""
    try:
        return ParseDict(dict(status), pb.StatusReply(), ignore_unknown_fields=True)
    except ParseError as e:
        raise InternalError(f"the collector's status makes no sense: {e}") from e


def stacks_reply(node: str, found: Mapping[str, Any]) -> pb.StacksReply:
    try:
        return pb.StacksReply(
            node=node,
            threads=[_thread(thread) for thread in found["threads"]],
            failures=[_failure(failure) for failure in found["failures"]],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector's stacks make no sense: {type(e).__name__}: {e}") from e


def _thread(thread: Mapping[str, Any]) -> pb.Thread:
    return pb.Thread(
        job=thread.get("job") or "",
        run=thread.get("run") or "",
        rank=thread.get("rank"),
        pid=thread["pid"],
        start_ns=thread.get("start_ns") or 0,
        tid=thread["tid"],
        thread=thread.get("thread") or "",
        state=thread.get("state") or "",
        gil=thread.get("gil"),
        complete=bool(thread.get("complete")),
        frames=[
            pb.Frame(
                func=frame.get("func") or "",
                file=frame.get("file") or "",
                lineno=frame.get("lineno"),
                frame_type=frame.get("frame_type") or "",
                ip=frame.get("ip") or 0,
            )
            for frame in thread["frames"]
        ],
    )


def _failure(failure: Mapping[str, Any]) -> pb.TargetFailure:
    error = failure["error"]
    return pb.TargetFailure(
        pid=failure["pid"],
        rank=failure.get("rank"),
        job=failure.get("job") or "",
        error=to_proto(str(error.get("kind")), str(error.get("message")), str(error.get("hint") or "")),
    )
