"""Converts the collector's answers to messages of probing.v1. Sizes are not checked in this module, since the collector
limits what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from probing.api.errors import InternalError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.ipc import error_of
from probing.daemon.service.errors import to_proto
from probing.daemon.stack_wire import ProcessStacks, ReadFailure, VariablesRead, threads_of

__all__ = ("config_reply", "eval_reply", "stacks_reply", "status_fields", "status_for_jobs", "vars_reply")

_VALUE = ("job", "run", "rank", "start_ns", "tid", "func")
_VARIABLE = ("type", "value", "number", "reason")
_FRAME = ("func", "file", "lineno", "frame_type", "ip")
_THREAD = ("job", "run", "rank", "start_ns", "thread", "state", "gil", "complete", "trains", "native_missing")
_NOT_SHOWN = "not shown to a token that is limited to jobs"


def status_fields(status: Mapping[str, Any]) -> pb.StatusReply:
    """Returns the fields of ``status`` that StatusReply has under the same names."""
    try:
        return ParseDict(dict(status), pb.StatusReply(), ignore_unknown_fields=True)
    except ParseError as e:
        raise InternalError(f"the collector returned a malformed status: {e}") from e


def status_for_jobs(status: pb.StatusReply) -> pb.StatusReply:
    """Returns ``status`` for a caller limited to jobs: without texts, which may name jobs, and without totals."""
    sources = [pb.Source(name=s.name, state=s.state, reason=_NOT_SHOWN if s.reason else "") for s in status.sources]
    shown = pb.StatusReply(sources=sources, reason=_NOT_SHOWN if status.reason else "")
    for name in ("node", "version", "instance", "state", "started_ns", "node_time_ns", "boot_id", "engine"):
        setattr(shown, name, getattr(status, name))
    return shown


def stacks_reply(node: str, processes: Iterable[ProcessStacks], failures: Sequence[ReadFailure]) -> pb.StacksReply:
    try:
        reply = pb.StacksReply(node=node, failures=[_failure(failure) for failure in failures])
        for process in processes:
            reply.threads.extend(_threads(process))
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector returned malformed stacks: {type(e).__name__}: {e}") from e
    return reply


# Messages are cached: a process that hangs has the same stacks each time, and making messages is most of the work.
@lru_cache(maxsize=256)
def _threads(process: ProcessStacks) -> tuple[pb.Thread, ...]:
    job, run, rank, pid, start_ns, trains, packed = process
    common = {"job": job, "run": run, "rank": rank, "pid": pid, "start_ns": start_ns}
    return tuple(_thread({**thread, **common, "trains": thread["tid"] == trains}) for thread in threads_of(packed))


def vars_reply(node: str, found: VariablesRead) -> pb.VarsReply:
    try:
        values = [_value(value) for value in found["values"]]
        return pb.VarsReply(node=node, values=values, failures=[_failure(failure) for failure in found["failures"]])
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector returned malformed values: {type(e).__name__}: {e}") from e


def eval_reply(node: str, found: Mapping[str, Any]) -> pb.EvalReply:
    """Returns the collector's answer to ``eval`` as an EvalReply. Raises InternalError for a malformed answer."""
    try:
        return pb.EvalReply(
            node=node,
            results=[_evaluated(result) for result in found["results"]],
            failures=[_failure(failure) for failure in found["failures"]],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector returned malformed results: {type(e).__name__}: {e}") from e


def _evaluated(result: Mapping[str, Any]) -> pb.Evaluated:
    found = result.get("error")
    frames = [pb.CodeFrame(file=file, line=line, function=name) for file, line, name in (found or {}).get("frames", ())]
    return pb.Evaluated(
        job=result.get("job") or "",
        run=result.get("run") or "",
        rank=result.get("rank"),
        pid=result["pid"],
        start_ns=result.get("start_ns") or 0,
        value=result.get("value"),
        type=result.get("type") or "",
        output=result.get("output") or "",
        dropped=min(result.get("dropped") or 0, 1 << 62),
        seconds=result.get("seconds") or 0.0,
        raised=pb.Raised(type=found["type"], message=found["message"], frames=frames) if found else None,
        stops=result.get("stops") or 0,
        longest_stop_us=min(result.get("longest_stop_us") or 0, (1 << 32) - 1),
    )


def config_reply(node: str, found: Mapping[str, Any]) -> pb.ConfigReply:
    """Returns the collector's answer as a ConfigReply; an older collector sends no ``effect``. Raises InternalError."""
    try:
        effect = pb.Deletion(**found["effect"]) if "effect" in found else None
        return pb.ConfigReply(node=node, settings=[_setting(setting) for setting in found["settings"]], effect=effect)
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector returned malformed settings: {type(e).__name__}: {e}") from e


def _setting(setting: Mapping[str, Any]) -> pb.Setting:
    fields = {name: value for name, value in setting.items() if name != "deletes"}
    deletes = pb.Deletion(**setting["deletes"]) if "deletes" in setting else None
    return pb.Setting(**fields, deletes=deletes)


def _value(value: Mapping[str, Any]) -> pb.Value:
    return pb.Value(pid=value["pid"], variable=_variable(value), **_of(value, _VALUE))


def _variable(variable: Mapping[str, Any]) -> pb.Variable:
    return pb.Variable(name=variable["name"], **_of(variable, _VARIABLE))


def _thread(thread: Mapping[str, Any]) -> pb.Thread:
    frames = [
        pb.Frame(**_of(frame, _FRAME), locals=[_variable(variable) for variable in frame.get("locals") or ()])
        for frame in thread["frames"]
    ]
    return pb.Thread(pid=thread["pid"], tid=thread["tid"], **_of(thread, _THREAD), frames=frames)


def _of(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the ``fields`` called ``names`` for a message; a field that is missing or None stays unset in it."""
    return {name: fields.get(name) for name in names}


def _failure(failure: Mapping[str, Any]) -> pb.TargetFailure:
    return pb.TargetFailure(
        pid=failure["pid"],
        rank=failure.get("rank"),
        job=failure.get("job"),
        error=to_proto(error_of(failure["error"])),
    )
