"""Lists the probes for libtorch_cpu, libnccl and JAX's library (each probe: a BPF program and the functions that it is
attached to), and attaches the probes to a library file.

Mangled names contain argument types, which change between versions of torch; the patterns contain the constant parts.
``*`` matches any characters.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from probing.api.errors import ProbingError, UnsupportedTarget
from probing.daemon.bpf.probe_points import point_of
from probing.daemon.bpf.probe_slots import SLOTS
from probing.daemon.bpf.session import Link, Session
from probing.daemon.elf.symbols import Symbol, SymbolFinder
from probing.daemon.nccl_uprobes.layouts.gloo import gloo_layout_index

__all__ = ("GLOO", "JAX", "LIBRARIES", "NCCL", "Library", "library_of", "place_probes")

_GROUP = "_ZN4c10d16ProcessGroupGloo"


class _Probe(NamedTuple):
    """A probe: ``program`` is attached to the functions that match ``pattern``.

    ``needed``: a library without a matching function is not supported. ``unless``: the probe is left out if a function
    matches this pattern. ``variant``: a pattern of functions with the same effect and the same first arguments.
    ``operation``: passed to the program in the attach cookie.
    """

    program: str
    pattern: str
    needed: bool = False
    unless: str = ""
    on_return: bool = False
    variant: str = ""
    operation: int = 0

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern, self.variant) if self.variant else (self.pattern,)


class _Placement(NamedTuple):
    """A placed probe: ``program`` at ``offset`` of the file. ``slot`` counts its hits. ``cost``: the cost of a hit,
    "cheap" or "dear".
    """

    program: str
    slot: int
    offset: int
    symbol: str
    cost: str
    on_return: bool = False
    operation: int = 0


@dataclass(frozen=True, slots=True)
class Library:
    """A library and its probes. ``files``: prefixes of the file name. ``probes`` are in the order of attachment: probes
    on ends of operations come first, so that no operation is opened whose end is missed. ``marks``: functions
    that are looked up to tell builds apart."""

    name: str
    files: tuple[bytes, ...]
    slots: range
    probes: tuple[_Probe, ...]
    marks: tuple[str, ...] = ()

    @property
    def patterns(self) -> list[str]:
        return [pattern for probe in self.probes for pattern in probe.patterns]

    def placements(self, symbols: Iterable[Symbol]) -> list[_Placement]:
        """Returns the placements of the probes, each at the cheapest instruction of its function, one per address.

        Raises UnsupportedTarget if a needed function is missing.
        """
        matches: dict[str, list[Symbol]] = {probe.pattern: [] for probe in self.probes}
        for symbol in symbols:
            for probe in self.probes:
                if any(_matches(symbol.name, pattern) for pattern in probe.patterns):
                    matches[probe.pattern].append(symbol)
        missing = [probe.pattern for probe in self.probes if probe.needed and not matches[probe.pattern]]
        if missing:
            raise UnsupportedTarget(
                f"this {self.name} library has no function {missing[0]}",
                hint="report the version of torch, NCCL or jaxlib; until it is supported, its operations are missing",
            )
        placements: dict[tuple[int, bool], _Placement] = {}
        for slot, probe in zip(self.slots, self.probes, strict=True):
            if any(symbol.file_offset is not None for symbol in matches.get(probe.unless, ())):
                continue
            for symbol in matches[probe.pattern]:
                key = (symbol.address, probe.on_return)
                if symbol.file_offset is not None and key not in placements:
                    placements[key] = _placement(probe, slot, symbol, symbol.file_offset)
        return list(placements.values())


def _placement(probe: _Probe, slot: int, symbol: Symbol, file_offset: int) -> _Placement:
    point = point_of(symbol)
    offset = file_offset + point.offset
    return _Placement(probe.program, slot, offset, symbol.name, point.cost, probe.on_return, probe.operation)


_GLOO_PROBES = (
    _Probe("gloo_finish", f"{_GROUP}9AsyncWork14finishWorkGlooEv", needed=True),
    _Probe("gloo_finish_error", f"{_GROUP}9AsyncWork19finishWorkGlooErrorE*", needed=True),
    _Probe("gloo_waited", "_ZN4c10d4Work14finishAndThrowE*"),
    _Probe("gloo_execute", f"{_GROUP}9AsyncWork7executeE*", needed=True),
    # Versions of torch that pass the operation type to this function pass the sequence number, too.
    _Probe("gloo_work", f"{_GROUP}9AsyncWorkC*NS_6OpTypeEm*", needed=True),
    _Probe("gloo_send_work", f"{_GROUP}8SendWorkC*Em"),
    _Probe("gloo_recv_work", f"{_GROUP}8RecvWorkC*NS_6OpTypeEm*"),
    _Probe("gloo_allreduce", f"{_GROUP}9allreduceE*", needed=True),
    _Probe("gloo_allreduce", f"{_GROUP}19allreduce_coalescedE*"),
    _Probe("gloo_broadcast", f"{_GROUP}9broadcastE*", needed=True),
    _Probe("gloo_reduce", f"{_GROUP}6reduceE*"),
    _Probe("gloo_allgather", f"{_GROUP}9allgatherE*"),
    _Probe("gloo_allgather", f"{_GROUP}19allgather_coalescedE*"),
    _Probe("gloo_allgather", f"{_GROUP}31allgather_into_tensor_coalescedE*"),
    _Probe("gloo_gather", f"{_GROUP}6gatherE*"),
    _Probe("gloo_scatter", f"{_GROUP}7scatterE*"),
    _Probe("gloo_reduce_scatter", f"{_GROUP}14reduce_scatterE*"),
    _Probe("gloo_reduce_scatter_tensors", f"{_GROUP}31reduce_scatter_tensor_coalescedE*"),
    _Probe("gloo_alltoall", f"{_GROUP}8alltoallE*"),
    _Probe("gloo_alltoall_base", f"{_GROUP}13alltoall_baseE*"),
    _Probe("gloo_barrier", f"{_GROUP}7barrierE*", needed=True),
    _Probe("gloo_point_to_point", f"{_GROUP}4sendE*"),
    _Probe("gloo_point_to_point", f"{_GROUP}4recvE*"),
    _Probe("gloo_recv_any", f"{_GROUP}13recvAnysourceE*"),
    # The next three functions have these names since torch 2.14. monitoredBarrier needs no probe: it calls send and
    # recv.
    _Probe("gloo_allgather", f"{_GROUP}27all_gather_single_coalescedE*"),
    _Probe("gloo_reduce_scatter_tensors", f"{_GROUP}31reduce_scatter_single_coalescedE*"),
    _Probe("gloo_alltoall_base", f"{_GROUP}17all_to_all_singleE*"),
)
GLOO = Library(
    "gloo",
    (b"libtorch_cpu.so",),
    SLOTS.reserve("gloo", 64, len(_GLOO_PROBES)),
    _GLOO_PROBES,
    # All builds export HasVariableHooks, which is in the same namespace as has_names. So if a build lacks has_names,
    # ``matching_symbols`` does not search .symtab for it.
    (
        f"{_GROUP}5splitE*",
        f"{_GROUP}5mergeE*",
        "_ZN2at4impl9has_namesEPKN3c1010TensorImplE",
        "_ZN2at4impl16HasVariableHooksEv",
    ),
)

# ncclEnqueueCheck(ncclInfo *), which all operations call. It is an internal function, so only .symtab has it.
_ENQUEUE = "_Z16ncclEnqueueCheckP8ncclInfo"
# Public call -> its number in enum nccl_function (nccl.bpf.c). The program nccl_call receives the number. Since NCCL
# 2.31.2 most calls have a variant with a ncclCollConfig_t after the arguments (nccl.h). Neither the call nor its
# variant calls the other (src/collectives.cc).
_OPERATIONS = {
    "ncclAllReduce": 4,
    "ncclReduceScatter": 3,
    "ncclAllGather": 2,
    "ncclBroadcast": 0,
    "ncclReduce": 1,
    "ncclSend": 6,
    "ncclRecv": 7,
    "ncclAlltoAll": 8,
    "ncclGather": 10,
    "ncclScatter": 9,
}
_MAKERS = {
    "ncclCommInitRank": "nccl_init_rank",
    "ncclCommInitRankConfig": "nccl_init_rank_config",
    "ncclCommInitRankScalable": "nccl_init_rank_scalable",
    "ncclCommInitAll": "nccl_init_all",
    "ncclCommSplit": "nccl_split",
    "ncclCommShrink": "nccl_shrink",
    "ncclCommGrow": "nccl_grow",
}

# pnccl* are aliases at the same addresses. ncclBcast calls ncclBroadcast. Probes on ends come first, and probes on
# returns before probes on entries: if the return of an entry were missed, a later return would count for this entry.
_NCCL_PROBES = (
    _Probe("nccl_destroy", "ncclCommDestroy"),
    _Probe("nccl_abort", "ncclCommAbort"),
    _Probe("nccl_finalize", "ncclCommFinalize"),
    _Probe("nccl_error_string", "ncclGetErrorString"),
    _Probe("nccl_async_error_reported", "ncclCommGetAsyncError", on_return=True),
    _Probe("nccl_async_error", "ncclCommGetAsyncError"),
    *(_Probe("nccl_made", function, on_return=True) for function in _MAKERS),
    *(_Probe(program, function) for function, program in _MAKERS.items()),
    _Probe("nccl_enqueue", _ENQUEUE),
    *(
        _Probe(
            "nccl_call",
            function,
            function in ("ncclAllReduce", "ncclBroadcast"),
            _ENQUEUE,
            variant=f"{function}Config",
            operation=operation,
        )
        for function, operation in _OPERATIONS.items()
    ),
    _Probe("nccl_group_end", "ncclGroupEnd", needed=True),
    _Probe("nccl_group_simulate_end", "ncclGroupSimulateEnd"),
    _Probe("nccl_group_start", "ncclGroupStart", needed=True),
)
NCCL = Library(
    "nccl",
    (b"libnccl.so", b"libnccl-net.so", b"libnccl_static.so"),
    SLOTS.reserve("nccl", 92, len(_NCCL_PROBES)),
    _NCCL_PROBES,
)


# These functions are synchronous: the return of each ends its operation. The operation is a number of c10d::OpType, or
# our own number 64 (records/names.py). The patterns are whole signatures (of jaxlib 0.5 to 0.10), since only the
# signature says where the arguments are.
_XLA = "_ZN3xla3cpu16GlooCommunicator"
_BUFFERS = "EN15stream_executor1*BaseES3_NS_13PrimitiveTypeEm"
_EXECUTOR = "RKNS_12Communicator8ExecutorE"
_XLA_OPERATIONS = {
    f"{_XLA}9AllReduce{_BUFFERS}NS_13ReductionKindE{_EXECUTOR}": 1,
    f"{_XLA}9AllGather{_BUFFERS}{_EXECUTOR}": 4,
    f"{_XLA}13ReduceScatter{_BUFFERS}NS_13ReductionKindE{_EXECUTOR}": 9,
    f"{_XLA}8AllToAllEN4absl*InlinedVectorIN15stream_executor1*NS_13PrimitiveTypeEm{_EXECUTOR}": 10,
    f"{_XLA}17CollectivePermute{_BUFFERS}St8optional*{_EXECUTOR}": 64,
}
_CREATE = (
    "_ZN3xla3cpu15GlooCollectives19CreateCommunicatorsERKNS_9CliqueKeyERKSt8optionalINS_9CliqueIdsEEN4absl*6ConfigE"
)
_JAX_PROBES = (
    *(_Probe("jax_done", pattern, on_return=True) for pattern in _XLA_OPERATIONS),
    _Probe("jax_created", _CREATE, on_return=True),
    _Probe("jax_communicator", f"{_XLA}C2ESt10shared_ptrIN4gloo7ContextEEmm"),
    _Probe("jax_create", _CREATE),
    *(
        _Probe("jax_call", pattern, operation == 1, operation=operation)
        for pattern, operation in _XLA_OPERATIONS.items()
    ),
)
JAX = Library(
    "jax",
    (b"libjax_common.so", b"xla_extension.so"),
    SLOTS.reserve("jax", 176, len(_JAX_PROBES)),
    _JAX_PROBES,
)
LIBRARIES = (GLOO, NCCL, JAX)


def library_of(path: bytes) -> Library | None:
    """Returns the library that a mapped file can be, by the file name in its path; None if no library fits."""
    name = path.rpartition(b"/")[2]
    for library in LIBRARIES:
        if name.startswith(library.files) and name.find(b".so") >= 0:
            return library
    return None


def _matches(name: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


# The cookie has three fields, from the low bits up: the slot, the tag (``_tag``), and the operation of the probe.
_SLOT_BITS, _OPERATION_SHIFT = 16, 48


def place_probes(
    session: Session, symbols: SymbolFinder, library: Library, fd: int, identity: tuple[int, int]
) -> list[Link]:
    """Attaches all probes to the library with descriptor ``fd``; if one fails, detaches all. Returns the links in the
    order in which they were made.

    Raises UnsupportedTarget, AttachError, PrivilegeError.
    """
    matches = symbols(fd, [*library.patterns, *library.marks])
    tag = _tag(library, [symbol.name for symbol in matches], identity)
    links: list[Link] = []
    try:
        for (program, on_return), placements in _by_program(library.placements(matches)).items():
            offsets = [placement.offset for placement in placements]
            cookies = [_cookie(placement, tag) for placement in placements]
            links.append(session.attach_uprobe(program, fd, offsets, cookies, library.name, on_return=on_return))
    except ProbingError:
        for link in links:
            session.detach(link)
        raise
    return links


def _tag(library: Library, marks: Iterable[str], identity: tuple[int, int]) -> int:
    """Returns the tag of the cookies: for gloo the index of the layout, else a hash of the file's identity."""
    if library is GLOO:
        return gloo_layout_index(marks)
    return zlib.crc32(repr(identity).encode())


def _cookie(placement: _Placement, tag: int) -> int:
    return placement.operation << _OPERATION_SHIFT | tag << _SLOT_BITS | placement.slot


def _by_program(placements: Iterable[_Placement]) -> dict[tuple[str, bool], list[_Placement]]:
    grouped: dict[tuple[str, bool], list[_Placement]] = {}
    for placement in placements:
        grouped.setdefault((placement.program, placement.on_return), []).append(placement)
    return grouped
