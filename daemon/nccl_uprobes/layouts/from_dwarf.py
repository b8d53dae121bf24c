"""Reads the offsets of the members of NCCL's structs from the DWARF of a library. Runs in the parser.

pyelftools walks the entries, over sections that ``elf.file`` has read within bounds. pyelftools checks little: damaged
entries can raise any error, and hostile entries are stopped by the parser's limits of memory and CPU time. The result
is not trusted: the BPF programs that use it check NCCL's two magic words first. The names of the members come from
src/include/comm.h and info.h of NCCL 2.18 to 2.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TypedDict

from elftools.dwarf.die import DIE
from elftools.dwarf.dwarf_expr import DWARFExprParser
from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DwarfConfig, DWARFInfo

from probing.api.errors import ProbingError, UnsupportedTarget, UsageError
from probing.daemon.elf.file import Elf
from probing.daemon.ipc import Message

__all__ = ("COMM_MEMBERS", "INFO_MEMBERS", "Layout", "handlers", "nccl_layout", "nccl_version")

COMM_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "start_magic": ("startMagic",),
    "magic": ("magic",),
    "comm_hash": ("commHash",),
    "rank": ("rank",),
    "nranks": ("nRanks",),
    "cuda_device": ("cudaDev",),
    "nvml_device": ("nvmlDev",),
    "bus_id": ("busId",),
    "node": ("node",),
    "nnodes": ("nNodes",),
    "async_result": ("asyncResult",),
    "abort_flag": ("abortFlag",),
    "config": ("config",),
    "comm_name": ("config.commName", "commName"),
    "seq_number": ("seqNumber",),
    "end_magic": ("endMagic",),
}
"""Our name -> possible names of the member of struct ncclComm; the first name that exists is used."""
INFO_MEMBERS: Mapping[str, tuple[str, ...]] = {
    name: (name,) for name in ("coll", "count", "datatype", "op", "root", "comm", "stream")
}
"""Our name -> possible names of the member of struct ncclInfo."""
# Entries refer to all of these sections, even if only names and types are read.
_READ = ("info", "abbrev", "str", "line_str", "str_offsets", "addr", "loclists", "rnglists")
_UNREAD = ("aranges", "frame", "line", "loc", "pubnames", "pubtypes", "ranges", "sup", "types")
# The limit of a section's size. The largest section in a published library has 22 MB.
_MAX_SECTION = 64 << 20
_MAX_CONSTANTS = 64 << 20
_VERSION = re.compile(rb"(?<![^\0])NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})\+cuda")
# The limit of the size of struct ncclComm. The struct has about 1 MB.
_MAX_STRUCT = 64 << 20
_NEEDED = ("comm_hash", "rank", "nranks", "cuda_device")
_SINCE_2_26 = "config.trafficClass"
_RECORDS = ("DW_TAG_class_type", "DW_TAG_structure_type", "DW_TAG_union_type")
_SAME = ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type", "DW_TAG_atomic_type")
# Forms of references to types in other units or in another file.
_ELSEWHERE = ("DW_FORM_ref_sig8", "DW_FORM_ref_sup4", "DW_FORM_ref_sup8", "DW_FORM_GNU_ref_alt")
_MAX_HOPS = 8
_MAX_DEPTH = 4
_MAX_LENGTH = 8192
_MAX_KNOWN = 4096
_Members = dict[str, tuple[int, DIE]]


def handlers() -> dict[str, Callable[[Message], bytes]]:
    """Returns the handler of the parser's request ``nccl_layout``. The request has ``known``, a list of build ids in
    hex, and one descriptor, of the library.

    Answers JSON with the keys of Layout, ``version`` as from ``nccl_version``, ``known`` (whether the build is in the
    request's list) and ``why``. ``comm`` and ``info`` are null for a known build. They are also null for a build
    without a layout; then ``why`` has the reason.
    """
    return {"nccl_layout": _answer}


class Layout(TypedDict):
    """The layouts that a library's DWARF describes. ``build_id`` is in hex. ``comm`` has the offset of each name of
    COMM_MEMBERS, the ``size`` of the struct in bytes, and ``seq_count``, the length of the array seqNumber. ``info``
    has the offset of each name of INFO_MEMBERS, and ``size``. Members that do not exist are left out."""

    build_id: str | None
    comm: dict[str, int]
    info: dict[str, int] | None


def nccl_layout(fd: int) -> Layout:
    """Returns the layouts of the libnccl that is open as ``fd``. The caller owns ``fd`` and closes it.

    Raises UnsupportedTarget for a library that is stripped or damaged.
    """
    elf = Elf(fd)
    try:
        comm, info = _search(_dwarf(elf))
    except (ProbingError, MemoryError):
        raise
    except Exception as e:
        raise UnsupportedTarget(f"the debugging information of the library is damaged: {type(e).__name__}") from e
    if comm is None:
        raise UnsupportedTarget(
            "the library has no debugging information about struct ncclComm", hint="was it stripped?"
        )
    _check(comm)
    build_id = elf.build_id()
    return {"build_id": build_id.hex() if build_id is not None else None, "comm": comm, "info": info}


def nccl_version(elf: Elf) -> str | None:
    """Returns a version such as "2.27.5", from the text that NCCL prints (showVersion in init.cc); stripped libraries
    contain this text, too.
    """
    found = _VERSION.search(elf.section(".rodata", _MAX_CONSTANTS))
    return found[1].decode() if found else None


def _dwarf(elf: Elf) -> DWARFInfo:
    sections: dict[str, DebugSectionDescriptor | None] = {f"debug_{name}_sec": None for name in _UNREAD}
    for name in _READ:
        data = elf.section(f".debug_{name}", _MAX_SECTION)
        sections[f"debug_{name}_sec"] = DebugSectionDescriptor(BytesIO(data), name, None, len(data), 0)
    return DWARFInfo(DwarfConfig(True, "", 8), eh_frame_sec=None, gnu_debugaltlink_sec=None, **sections)


def _search(dwarf: DWARFInfo) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """Returns the layouts of ncclComm and ncclInfo, each from the first usable definition of the struct."""
    comm, info = None, None
    for unit in dwarf.iter_CUs():
        for die in unit.get_top_DIE().iter_children():
            if die.tag in _RECORDS and "DW_AT_byte_size" in die.attributes:
                name = _name(die)
                if name == "ncclComm":
                    comm = comm or _layout(die, COMM_MEMBERS, _NEEDED)
                elif name == "ncclInfo":
                    info = info or _layout(die, INFO_MEMBERS, ("coll", "comm"))
                if comm and info:
                    return comm, info
    return comm, info


def _answer(request: Message) -> bytes:
    known = request.header.get("known", [])
    if len(request.fds) != 1 or not isinstance(known, list) or len(known) > _MAX_KNOWN:
        raise UsageError(f'the request "nccl_layout" takes one descriptor and at most {_MAX_KNOWN} known build ids')
    elf = Elf(request.fds[0])
    raw = elf.build_id()
    build_id = raw.hex() if raw is not None else None
    answer: dict[str, object] = {"build_id": build_id, "known": build_id in known, "version": None, "why": ""}
    answer |= {"comm": None, "info": None}
    if not answer["known"]:
        try:
            answer["version"] = nccl_version(elf)
            answer |= nccl_layout(request.fds[0])
        except UnsupportedTarget as e:
            answer["why"] = e.message
    return json.dumps(answer).encode()


def _layout(die: DIE, wanted: Mapping[str, tuple[str, ...]], needed: tuple[str, ...]) -> dict[str, int] | None:
    members = _members(die)
    if "config" in members and (config := _record(members["config"][1])):
        base = members["config"][0]
        members |= {f"config.{name}": (base + at, kind) for name, (at, kind) in _members(config).items()}
    layout = {"size": _number(die, "byte_size") or 0}
    for name, spellings in wanted.items():
        if found := next((members[spelling] for spelling in spellings if spelling in members), None):
            layout[name] = found[0]
    if "seq_number" in layout:
        # Before 2.26 NCCL counted operations only under a profiler (ncclProfilerStartTaskEvents in profiler.cc).
        if _SINCE_2_26 in members:
            layout["seq_count"] = _array_length(members["seqNumber"][1])
        else:
            del layout["seq_number"]
    usable = all(name in layout for name in needed) and max(layout.values()) <= layout["size"] <= _MAX_STRUCT
    return layout if usable else None


def _check(comm: Mapping[str, int]) -> None:
    """Raises UnsupportedTarget unless commHash and the four fields after it are adjacent, and the struct has a magic
    word at both ends or at neither.
    """
    first = comm["comm_hash"]
    row = (comm["rank"], comm["nranks"], comm["cuda_device"], comm.get("nvml_device", first + 20))
    guards = (comm.get("start_magic"), comm.get("end_magic"))
    if row != (first + 8, first + 12, first + 16, first + 20) or guards not in ((None, None), (0, comm["size"] - 8)):
        raise UnsupportedTarget("struct ncclComm of this library has an unknown layout")


def _members(record: DIE, depth: int = 0) -> _Members:
    """Returns name -> (offset, entry) of the members, including members of unnamed members."""
    members: _Members = {}
    for child in record.iter_children():
        if child.tag != "DW_TAG_member" or (at := _location(child)) is None:
            continue
        if name := _name(child):
            members.setdefault(name, (at, child))
        elif depth < _MAX_DEPTH and (inner := _record(child)):
            for name, (offset, kind) in _members(inner, depth + 1).items():
                members.setdefault(name, (at + offset, kind))
    return members


def _location(member: DIE) -> int | None:
    """Returns the offset of a member, which DWARF 2 gives as an expression; 0 for a member of a union."""
    place = member.attributes.get("DW_AT_data_member_location")
    value = place.value if place else 0
    if isinstance(value, list):
        parsed = DWARFExprParser(member.cu.structs).parse_expr(value)
        value = parsed[0].args[0] if [part.op_name for part in parsed] == ["DW_OP_plus_uconst"] else None
    return value if isinstance(value, int) and 0 <= value < _MAX_STRUCT else None


def _name(die: DIE) -> str:
    name = die.attributes.get("DW_AT_name")
    # If the name is in another file, the value is a number.
    return name.value.decode(errors="replace") if name and isinstance(name.value, bytes) else ""


def _number(die: DIE, attribute: str) -> int | None:
    found = die.attributes.get(f"DW_AT_{attribute}")
    return found.value if found and isinstance(found.value, int) else None


def _type(die: DIE) -> DIE | None:
    """Returns the type of an entry without typedefs and qualifiers; None if it is in another unit or file."""
    for _ in range(_MAX_HOPS):
        if "DW_AT_type" not in die.attributes or die.attributes["DW_AT_type"].form in _ELSEWHERE:
            return None
        die = die.get_DIE_from_attribute("DW_AT_type")
        if die.tag not in _SAME:
            return die
    return None


def _record(die: DIE) -> DIE | None:
    record = _type(die)
    return record if record is not None and record.tag in _RECORDS else None


def _array_length(die: DIE) -> int:
    """Returns the length of a one-dimensional array; 0 if unknown."""
    array = _type(die)
    if array is None or array.tag != "DW_TAG_array_type":
        return 0
    ranges = [child for child in array.iter_children() if child.tag == "DW_TAG_subrange_type"]
    if len(ranges) != 1:
        return 0
    last, count = _number(ranges[0], "upper_bound"), _number(ranges[0], "count")
    length = count if count is not None else last + 1 if last is not None else 0
    return length if 0 <= length <= _MAX_LENGTH else 0
