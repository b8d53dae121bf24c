"""What native stacks show of a process that waits: the collective, NCCL call, store or GPU that it is in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from probing.client.messages import Frame, Thread

__all__ = ("innermost", "waits_in")

_LONG_NAME = 80
# By what they say, the most particular first; of one kind the outermost frame counts.
_KINDS = (
    # gloo/allreduce.h and its siblings; gloo::transport below them is how they wait.
    re.compile(r"^(gloo::)(?:\(anonymous namespace\)::)?(\w+)\("),
    re.compile(r"^(p?)(nccl[A-Z]\w+)"),
    re.compile(r"^(c10d::)(?:TCP|File|Hash|Prefix)?(Store::\w+)\("),
    re.compile(r"^()(cu(?:da)?(?:Stream|Event|Device|Ctx)Synchronize\w*|cudaMemcpy\w*|cudaFree\w*)"),
    re.compile(r"^(gloo::)(?:transport::\w+::)(?:\w+::)*(wait\w+)\("),
    re.compile(r"^(c10d::)(Work::wait|\w*Work::wait\w*)\("),
)


def waits_in(threads: Iterable[Thread]) -> str | None:
    """Such as ``gloo::allreduce`` or ``ncclGroupEnd``, from the frames of one process; None where nothing shows it."""
    stacks = [[f["func"] for f in t["frames"] if f["frame_type"] == "Native"] for t in threads]
    for kind in _KINDS:
        for stack in stacks:
            for function in reversed(stack):
                if match := kind.match(function):
                    return match[1] + match[2]
    return None


def innermost(frames: Sequence[Frame]) -> str | None:
    """The innermost Python frame as ``func (file:line)``; None where there is none."""
    frame = next((f for f in frames if f["frame_type"] == "Python"), None)
    if frame is None:
        return None
    func, file = str(frame["func"])[:_LONG_NAME], str(frame["file"]).rsplit("/", 1)[-1][:_LONG_NAME]
    return f"{func} ({file}:{frame['lineno']})" if frame["lineno"] is not None else f"{func} ({file})"
