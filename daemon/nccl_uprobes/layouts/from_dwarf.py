"""Reads the offsets of the members of NCCL's structs from the DWARF of a library. Runs in the parser.

The result is not trusted: the BPF programs that use it check NCCL's two magic words first. The names of the members are
those of src/include/comm.h and info.h of NCCL 2.18 to 2.32.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from probing.api.errors import UnsupportedTarget, UsageError
from probing.daemon.elf.dwarf_search import COUNT, LOCATION, SIZE, TYPE, UPPER_BOUND, Die, Dwarf, Texts
from probing.daemon.elf.dwarf_units import Damaged, Units, uleb
from probing.daemon.elf.file import Elf
from probing.daemon.ipc import Message

__all__ = ("COMM_MEMBERS", "INFO_MEMBERS", "MAX_SECONDS", "Layout", "handlers", "nccl_layout", "nccl_version")

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
"""Our name -> possible names of the member of struct ncclComm; the first that exists counts."""
INFO_MEMBERS: Mapping[str, tuple[str, ...]] = {
    name: (name,) for name in ("coll", "count", "datatype", "op", "root", "comm", "stream")
}
"""The same for struct ncclInfo."""
MAX_SECONDS = 2.0
"""The published libraries take at most 0.1 s."""
# The limit of .debug_info; the largest published library has 22 MB.
_MAX_INFO = 64 << 20
_MAX_TABLE = 64 << 20
_MAX_CONSTANTS = 64 << 20
_VERSION = re.compile(rb"(?<![^\0])NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})\+cuda")
# The limit of the size of struct ncclComm, which has some 1 MB.
_MAX_STRUCT = 64 << 20
_NEEDED = ("comm_hash", "rank", "nranks", "cuda_device")
_SINCE_2_26 = "config.trafficClass"
_PLUS_UCONST = 0x23  # DW_OP_plus_uconst
_MEMBER, _ARRAY, _SUBRANGE = 0x0D, 0x01, 0x21  # DW_TAG_*
_RECORDS = (0x02, 0x13, 0x17)  # class, structure, union
_SAME = (0x16, 0x26, 0x35, 0x47)  # typedef, const, volatile, atomic
_MAX_HOPS = 8
_MAX_DEPTH = 4
_MAX_MEMBERS = 8192
_MAX_KNOWN = 4096
_Members = dict[str, tuple[int, Die | None]]


def handlers() -> dict[str, Callable[[Message], bytes]]:
    """Returns the handler of the parser's request ``nccl_layout`` (``known``: build ids in hex; one descriptor: the
    library).

    Answers JSON with the keys of Layout, ``version`` as from ``nccl_version``, ``known`` (whether the build is in the
    request's list) and ``why``. ``comm`` and ``info`` are null for a known build. They are also null for a build
    without a layout; then ``why`` has the reason.
    """
    return {"nccl_layout": _answer}


class Layout(TypedDict):
    """The layout that a library's DWARF describes. ``build_id`` in hex; ``comm``: a name of COMM_MEMBERS -> offset,
    ``size`` -> bytes, ``seq_count`` -> number; ``info``: a name of INFO_MEMBERS -> offset, ``size`` -> bytes. Members
    that do not exist are left out."""

    build_id: str | None
    comm: dict[str, int]
    info: dict[str, int] | None


def nccl_layout(fd: int, seconds: float = MAX_SECONDS) -> Layout:
    """Returns the layouts of the libnccl with descriptor ``fd``, which the caller keeps.

    Raises UnsupportedTarget for a library that is stripped, damaged, or takes more than ``seconds``.
    """
    elf = Elf(fd)
    info_section, abbrev = elf.section(".debug_info", _MAX_INFO), elf.section(".debug_abbrev", _MAX_TABLE)
    units = Units(info_section, abbrev, time.monotonic() + seconds)
    texts = (elf.section(name, _MAX_TABLE) for name in (".debug_str", ".debug_line_str", ".debug_str_offsets"))
    try:
        comm, info = _search(units, Dwarf(units, Texts(units, *texts)))
    except Damaged as e:
        raise UnsupportedTarget(str(e)) from e
    if comm is None:
        raise UnsupportedTarget(
            "the library has no debugging information about struct ncclComm", hint="was it stripped?"
        )
    _check(comm)
    build_id = elf.build_id()
    return {"build_id": build_id.hex() if build_id is not None else None, "comm": comm, "info": info}


def nccl_version(elf: Elf) -> str | None:
    """Returns a version such as "2.27.5", from the text that NCCL prints (showVersion in init.cc); stripped libraries
    have it, too.
    """
    found = _VERSION.search(elf.section(".rodata", _MAX_CONSTANTS))
    return found[1].decode() if found else None


def _search(units: Units, dwarf: Dwarf) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    comm, info = None, None
    for unit in units:
        comm = comm or next(_layouts(dwarf, dwarf.structures(unit, "ncclComm"), COMM_MEMBERS, _NEEDED), None)
        info = info or next(_layouts(dwarf, dwarf.structures(unit, "ncclInfo"), INFO_MEMBERS, ("coll", "comm")), None)
        if comm and info:
            break
    return comm, info


def _answer(request: Message) -> bytes:
    known = request.header.get("known", [])
    if len(request.fds) != 1 or not isinstance(known, list) or len(known) > _MAX_KNOWN:
        raise UsageError(f"nccl_layout takes one descriptor and {_MAX_KNOWN} known build ids at most")
    elf = Elf(request.fds[0])
    raw = elf.build_id()
    build_id = raw.hex() if raw is not None else None
    answer: dict[str, Any] = {"build_id": build_id, "known": build_id in known, "version": None, "why": ""}
    answer |= {"comm": None, "info": None}
    if not answer["known"]:
        try:
            answer["version"] = nccl_version(elf)
            answer |= nccl_layout(request.fds[0])
        except UnsupportedTarget as e:
            answer["why"] = e.message
    return json.dumps(answer).encode()


def _layouts(
    dwarf: Dwarf, found: Iterator[Die], wanted: Mapping[str, tuple[str, ...]], needed: tuple[str, ...]
) -> Iterator[dict[str, int]]:
    for die in found:
        try:
            layout = _layout(dwarf, die, wanted)
        except Damaged:
            # Another unit may describe the struct too.
            continue
        if all(name in layout for name in needed) and max(layout.values()) <= layout["size"] <= _MAX_STRUCT:
            yield layout


def _layout(dwarf: Dwarf, die: Die, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    members = _members(dwarf, die)
    if "config" in members and (config := _record(dwarf, members["config"][1])):
        base = members["config"][0]
        members |= {f"config.{name}": (base + at, kind) for name, (at, kind) in _members(dwarf, config).items()}
    layout = {"size": die.number(SIZE) or 0}
    for name, spellings in wanted.items():
        if found := next((members[spelling] for spelling in spellings if spelling in members), None):
            layout[name] = found[0]
    if "seq_number" in layout:
        # Before 2.26 NCCL counted operations only under a profiler (ncclProfilerStartTaskEvents in profiler.cc).
        if _SINCE_2_26 in members:
            layout["seq_count"] = _array_length(dwarf, members["seqNumber"][1])
        else:
            del layout["seq_number"]
    return layout


def _check(comm: Mapping[str, int]) -> None:
    """Raises UnsupportedTarget unless the five fields follow each other, with a magic word at both ends or at none."""
    first = comm["comm_hash"]
    row = (comm["rank"], comm["nranks"], comm["cuda_device"], comm.get("nvml_device", first + 20))
    guards = (comm.get("start_magic"), comm.get("end_magic"))
    if row != (first + 8, first + 12, first + 16, first + 20) or guards not in ((None, None), (0, comm["size"] - 8)):
        raise UnsupportedTarget("struct ncclComm of this library has an unknown layout")


def _members(dwarf: Dwarf, record: Die, depth: int = 0) -> _Members:
    """Returns name -> (offset, entry) of the members, including members of unnamed members."""
    members: _Members = {}
    for child in dwarf.children(record):
        if child.tag != _MEMBER or (at := _location(child)) is None:
            continue
        if child.name:
            members.setdefault(child.name, (at, child))
        elif depth < _MAX_DEPTH and (inner := _record(dwarf, child)):
            for name, (offset, kind) in _members(dwarf, inner, depth + 1).items():
                members.setdefault(name, (at + offset, kind))
        if len(members) > _MAX_MEMBERS:
            raise UnsupportedTarget("a struct of the library has too many members")
    return members


def _location(member: Die) -> int | None:
    value = member.values.get(LOCATION, 0)
    if isinstance(value, int):
        return value if 0 <= value < _MAX_STRUCT else None
    if value[:1] != bytes([_PLUS_UCONST]):
        return None
    offset, end = uleb(value, 1)
    return offset if end == len(value) and offset < _MAX_STRUCT else None


def _type(dwarf: Dwarf, die: Die | None) -> Die | None:
    """Returns the type of an entry, without typedef and const; None if the type lies in another unit."""
    for _ in range(_MAX_HOPS):
        at = die.number(TYPE) if die else None
        if die is None or at is None or not die.unit.first <= at < die.unit.end:
            return None
        die = dwarf.die(die.unit, at)
        if die.tag not in _SAME:
            return die
    return None


def _record(dwarf: Dwarf, die: Die | None) -> Die | None:
    found = _type(dwarf, die)
    return found if found is not None and found.tag in _RECORDS else None


def _array_length(dwarf: Dwarf, die: Die | None) -> int:
    """Returns the length of a one-dimensional array; 0 if unknown."""
    found = _type(dwarf, die)
    ranges = [child for child in dwarf.children(found) if child.tag == _SUBRANGE] if found else []
    if found is None or found.tag != _ARRAY or len(ranges) != 1:
        return 0
    last, count = ranges[0].number(UPPER_BOUND), ranges[0].number(COUNT)
    length = count if count is not None else last + 1 if last is not None else 0
    return length if 0 <= length <= _MAX_MEMBERS else 0
