"""Converts the collector's answers to messages of probing.v1. Checks no sizes: the collector bounds what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from probing.api.errors import InternalError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.ipc import error_of
from probing.daemon.service.errors import to_proto
from probing.daemon.stack_wire import ProcessStacks, threads_of

__all__ = ("config_reply", "eval_reply", "stacks_reply", "status_fields", "status_for_jobs", "vars_reply")

_NOT_SHOWN = "not shown to a token that is limited to jobs"


def status_fields(status: Mapping[str, Any]) -> pb.StatusReply:
    """Returns the fields of ``status`` that StatusReply has under the same names."""
    try:
        return ParseDict(dict(status), pb.StatusReply(), ignore_unknown_fields=True)
    except ParseError as e:
        raise InternalError(f"the collector's status makes no sense: {e}") from e


def status_for_jobs(status: pb.StatusReply) -> pb.StatusReply:
    """Returns ``status`` for a caller that is limited to jobs: without texts, which may name jobs, and total counts."""
    sources = [pb.Source(name=s.name, state=s.state, reason=_NOT_SHOWN if s.reason else "") for s in status.sources]
    shown = pb.StatusReply(sources=sources, reason=_NOT_SHOWN if status.reason else "")
    for name in ("node", "version", "instance", "state", "started_ns", "node_time_ns", "boot_id", "engine"):
        setattr(shown, name, getattr(status, name))
    return shown


def stacks_reply(
    node: str, processes: Iterable[ProcessStacks], failures: Sequence[Mapping[str, Any]]
) -> pb.StacksReply:
    try:
        reply = pb.StacksReply(node=node, failures=[_failure(failure) for failure in failures])
        for process in processes:
            reply.threads.extend(_threads(process))
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector's stacks make no sense: {type(e).__name__}: {e}") from e
    return reply


# A process that hangs gives the same bytes each time: making messages of it costs more than all else here.
@lru_cache(maxsize=256)
def _threads(process: ProcessStacks) -> tuple[pb.Thread, ...]:
    job, run, rank, pid, start_ns, trains, packed = process
    common = {"job": job, "run": run, "rank": rank, "pid": pid, "start_ns": start_ns}
    return tuple(_thread({**thread, **common, "trains": thread["tid"] == trains}) for thread in threads_of(packed))


def vars_reply(node: str, found: Mapping[str, Any]) -> pb.VarsReply:
    try:
        return pb.VarsReply(
            node=node,
            values=[_value(value) for value in found["values"]],
            failures=[_failure(failure) for failure in found["failures"]],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector's values make no sense: {type(e).__name__}: {e}") from e


def eval_reply(node: str, found: Mapping[str, Any]) -> pb.EvalReply:
    """Returns the collector's answer to ``eval``. Raises InternalError when it makes no sense."""
    try:
        return pb.EvalReply(
            node=node,
            results=[_evaluated(result) for result in found["results"]],
            failures=[_failure(failure) for failure in found["failures"]],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector's results make no sense: {type(e).__name__}: {e}") from e


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
    """Returns the collector's answer, whose ``effect`` an older collector lacks. Raises InternalError."""
    try:
        effect = pb.Deletion(**found["effect"]) if "effect" in found else None
        return pb.ConfigReply(node=node, settings=[_setting(setting) for setting in found["settings"]], effect=effect)
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError(f"the collector's settings make no sense: {type(e).__name__}: {e}") from e


def _setting(setting: Mapping[str, Any]) -> pb.Setting:
    fields = {name: value for name, value in setting.items() if name != "deletes"}
    deletes = pb.Deletion(**setting["deletes"]) if "deletes" in setting else None
    return pb.Setting(**fields, deletes=deletes)


def _value(value: Mapping[str, Any]) -> pb.Value:
    return pb.Value(
        job=value.get("job") or "",
        run=value.get("run") or "",
        rank=value.get("rank"),
        pid=value["pid"],
        start_ns=value.get("start_ns") or 0,
        tid=value.get("tid") or 0,
        func=value.get("func") or "",
        variable=_variable(value),
    )


def _variable(variable: Mapping[str, Any]) -> pb.Variable:
    return pb.Variable(
        name=variable["name"],
        type=variable.get("type") or "",
        value=variable.get("value"),
        number=variable.get("number"),
        reason=variable.get("reason") or "",
    )


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
        trains=thread.get("trains"),
        native_missing=thread.get("native_missing") or "",
        frames=[
            pb.Frame(
                func=frame.get("func") or "",
                file=frame.get("file") or "",
                lineno=frame.get("lineno"),
                frame_type=frame.get("frame_type") or "",
                ip=frame.get("ip") or 0,
                locals=[_variable(variable) for variable in frame.get("locals") or ()],
            )
            for frame in thread["frames"]
        ],
    )


def _failure(failure: Mapping[str, Any]) -> pb.TargetFailure:
    return pb.TargetFailure(
        pid=failure["pid"],
        rank=failure.get("rank"),
        job=failure.get("job") or "",
        error=to_proto(error_of(failure["error"])),
    )
