"""What nodes answer, as plain dicts of JSON's types. docs/json.md describes them."""

from __future__ import annotations

from typing import Any

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.render.text import utc

__all__ = ("failure", "setting", "thread", "value")


def thread(node: str, t: pb.Thread, *, native: bool, local_variables: bool) -> dict[str, Any]:
    """``native`` adds native_missing, ``local_variables`` adds locals to each frame."""
    missing = {"native_missing": t.native_missing or None} if native else {}
    return {
        "node": node,
        "job": t.job,
        "rank": t.rank if t.HasField("rank") else None,
        "pid": t.pid,
        "tid": t.tid,
        "thread": t.thread,
        "state": t.state,
        "gil": t.gil if t.HasField("gil") else None,
        "complete": t.complete,
        **missing,
        "frames": [_frame(f, local_variables) for f in t.frames],
    }


def _frame(f: pb.Frame, local_variables: bool) -> dict[str, Any]:
    lineno = f.lineno if f.HasField("lineno") else None
    found = {"locals": [_variable(v) for v in f.locals]} if local_variables else {}
    return {"func": f.func, "file": f.file, "lineno": lineno, "frame_type": f.frame_type, **found}


def _variable(v: pb.Variable) -> dict[str, Any]:
    return {
        "name": v.name,
        "type": v.type,
        "value": v.value if v.HasField("value") else None,
        "number": v.number if v.HasField("number") else None,
        "reason": v.reason or None,
    }


def value(node: str, v: pb.Value) -> dict[str, Any]:
    rank = v.rank if v.HasField("rank") else None
    where = {"node": node, "job": v.job, "rank": rank, "pid": v.pid, "tid": v.tid, "func": v.func}
    return {**where, **_variable(v.variable)}


def setting(node: str, s: pb.Setting) -> dict[str, Any]:
    return {
        "node": node,
        "key": s.key,
        "value": s.value,
        "default": s.default,
        "job": s.job or None,
        "pid": s.pid or None,
        "until": utc(s.until_ns) if s.until_ns else None,
        "persisted": s.persisted,
        "doc": s.doc,
    }


def failure(node: str, f: pb.TargetFailure) -> dict[str, Any]:
    rank = f.rank if f.HasField("rank") else None
    error = {"kind": f.error.kind, "reason": f.error.message, "hint": f.error.hint}
    return {"node": node, "pid": f.pid, "rank": rank, "job": f.job, **error}
