"""Finds the call of a communication library in a stack: its name, group and data, from Python and native frames."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from probing.diagnosis.facts import Frame

__all__ = ("StackCall", "native_wait", "python_wait")


@dataclass(frozen=True, slots=True)
class StackCall:
    """A call in a stack. ``kind``: ``collective``, ``p2p``, ``device`` (waits for a GPU), ``store`` or ``init`` (waits
    for other ranks).

    ``op``: a name as in comm.ops; None if unknown. ``default``: the call is on the default group.
    """

    kind: str
    op: str | None = None
    comm: str | None = None
    peer: int | None = None
    dtype: str | None = None
    count: int | None = None
    default: bool = False


# Functions of distributed_c10d.py that wait, with the operation's name in comm.ops.
_COLLECTIVES = {
    **{name: name for name in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "barrier")},
    **{name: name for name in ("reduce_scatter", "all_to_all")},
    "all_reduce_coalesced": "all_reduce",
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single", "_all_gather_base"), "all_gather"),
    "all_gather_coalesced": "all_gather",
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"), "reduce_scatter"),
    "all_to_all_single": "all_to_all",
    "monitored_barrier": "barrier",
}
_P2P = {
    **{name: name for name in ("send", "recv")},
    "send_object_list": "send",
    "recv_object_list": "recv",
    "isend": "send",
    "irecv": "recv",
}
_INIT = frozenset(
    (
        "init_process_group",
        "_new_process_group_helper",
        "_store_based_barrier",
        "new_group",
        "_new_group_with_tag",
        "split_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "_create_c10d_store",
        "_tcp_rendezvous_handler",
        "_env_rendezvous_handler",
        "_file_rendezvous_handler",
    )
)
# Files of wrappers, whose frames are between the call and the wait.
_LOGGER = "torch/distributed/c10d_logger.py"
_WRAPPERS = (_LOGGER, "torch/_ops.py")
# Texts of values that are longer than this may have been cut.
_WHOLE = 150
_FUNCTIONAL = "torch/distributed/_functional_collectives.py"
_GROUP_NAME = re.compile(r"group_name='?([\w.:-]{1,64})|^'?(\d{1,9})'?$")
_SHAPE = re.compile(r"shape=\[([\d, ]{0,64})\]")
_DTYPE = re.compile(r"dtype=(?:torch\.)?(\w{1,16})")
_DATA = ("tensor", "object_tensor", "input", "input_tensor", "tensors")
_PEERS = ("dst", "src", "group_dst", "group_src")

# The most specific kind comes first; within a kind, the outermost frame counts.
_NATIVE = (
    # gloo/allreduce.h and its siblings, which wait in gloo::transport.
    re.compile(r"^(gloo::)(?:\(anonymous namespace\)::)?(\w+)\("),
    re.compile(r"^(p?)(nccl[A-Z]\w+)"),
    re.compile(r"^(c10d::)(?:TCP|File|Hash|Prefix)?(Store::\w+)\("),
    re.compile(r"^()(cu(?:da)?(?:Stream|Event|Device|Ctx)Synchronize\w*|cudaMemcpy\w*|cudaFree\w*)"),
    re.compile(r"^(gloo::)(?:transport::\w+::)(?:\w+::)*(wait\w+)\("),
    # DistributedDataParallel waits for its buckets in finalize_backward. That frame is listed, because compilers may
    # inline Future::wait into it.
    re.compile(r"^(c10d::)(\w*Work::wait\w*|Reducer::finalize_backward)\("),
    # JAX waits for arrays that other threads compute.
    re.compile(r"^(jax::)(BlockUntilReady\w*|AwaitBuffersReady)\("),
    re.compile(r"^(c10::ivalue::|torch::jit::Python)(Future(?:Wrapper)?::wait)\("),
)


def native_wait(frames: Iterable[Frame]) -> str | None:
    """Returns the native call in which ``frames`` wait, such as gloo::allreduce, ncclGroupEnd or c10d::Store::wait."""
    functions = [f.func for f in frames if f.native]
    if functions:
        for kind in _NATIVE:
            for function in reversed(functions):
                if match := kind.match(function):
                    return match[1] + match[2]
    return None


def python_wait(frames: Sequence[Frame]) -> StackCall | None:
    """Returns the call of torch.distributed in which the Python ``frames``, innermost first, wait; None if there is
    none.
    """
    python = [f for f in frames if not f.native and not f.file.endswith(_WRAPPERS)]
    if not python:
        return None
    inner, func = python[0], python[0].func.rpartition(".")[2]
    if inner.file.endswith(_FUNCTIONAL):
        return StackCall("collective") if func == "wait_tensor" else None
    if not inner.file.endswith(("distributed_c10d.py", "torch/distributed/rendezvous.py")):
        return None
    default = _in_default_group(frames)
    if func in _COLLECTIVES:
        dtype, count = _data(inner)
        return StackCall("collective", _COLLECTIVES[func], _group(inner), None, dtype, count, default)
    if func in _P2P:
        return StackCall("p2p", _P2P[func], _group(inner), _peer(inner), default=default)
    return StackCall("init", func.strip("_")) if func in _INIT else None


def _value(frame: Frame, *names: str) -> str | None:
    return next((text for wanted in names for name, text in frame.values if name == wanted), None)


def _group(frame: Frame) -> str | None:
    text = _value(frame, "group_name") or _value(frame, "group") or ""
    match = _GROUP_NAME.search(text)
    return (match[1] or match[2]) if match else None


def _in_default_group(frames: Sequence[Frame]) -> bool:
    # The frame of the wrapper shows the caller's arguments; in the frame of the function the default is filled in.
    python = [f for f in frames if not f.native]
    if len(python) < 2 or not python[1].file.endswith(_LOGGER):
        return False
    given = [_value(python[1], name) for name in ("args", "kwargs")]
    return all(text is not None and len(text) < _WHOLE and "ProcessGroup" not in text for text in given)


def _peer(frame: Frame) -> int | None:
    text = _value(frame, *_PEERS) or ""
    return int(text) if text.isdecimal() and len(text) < 8 else None


def _data(frame: Frame) -> tuple[str | None, int | None]:
    text = _value(frame, *_DATA) or ""
    dtype, shape = _DTYPE.search(text), _SHAPE.search(text)
    if not shape:
        return (dtype[1] if dtype else None), None
    return (dtype[1] if dtype else None), prod(int(size) for size in re.findall(r"\d+", shape[1]))
