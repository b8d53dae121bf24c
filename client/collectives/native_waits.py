"""Names the native call in which a process waits: a collective, an NCCL call, a store or the GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from probing.client.messages import Frame, Thread

__all__ = ("innermost", "waits_in")

_LONG_NAME = 80
# The most specific kind first; of one kind the outermost frame counts.
_KINDS = (
    # gloo/allreduce.h and its siblings, which wait in gloo::transport.
    re.compile(r"^(gloo::)(?:\(anonymous namespace\)::)?(\w+)\("),
    re.compile(r"^(p?)(nccl[A-Z]\w+)"),
    re.compile(r"^(c10d::)(?:TCP|File|Hash|Prefix)?(Store::\w+)\("),
    re.compile(r"^()(cu(?:da)?(?:Stream|Event|Device|Ctx)Synchronize\w*|cudaMemcpy\w*|cudaFree\w*)"),
    re.compile(r"^(gloo::)(?:transport::\w+::)(?:\w+::)*(wait\w+)\("),
    re.compile(r"^(c10d::)(Work::wait|\w*Work::wait\w*)\("),
)


def waits_in(threads: Iterable[Thread]) -> str | None:
    """Returns the call, such as ``gloo::allreduce`` or ``ncclGroupEnd``, of a process's threads; None if unknown."""
    stacks = [[f["func"] for f in t["frames"] if f["frame_type"] == "Native"] for t in threads]
    for kind in _KINDS:
        for stack in stacks:
            for function in reversed(stack):
                if match := kind.match(function):
                    return match[1] + match[2]
    return None


def innermost(frames: Sequence[Frame]) -> str | None:
    """Returns the innermost Python frame as ``func (file:line)``; None if there is none."""
    frame = next((f for f in frames if f["frame_type"] == "Python"), None)
    if frame is None:
        return None
    func, file = str(frame["func"])[:_LONG_NAME], str(frame["file"]).rsplit("/", 1)[-1][:_LONG_NAME]
    return f"{func} ({file}:{frame['lineno']})" if frame["lineno"] is not None else f"{func} ({file})"
