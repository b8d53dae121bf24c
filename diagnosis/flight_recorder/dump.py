"""Reads dumps of PyTorch's flight recorder: the calls of each rank, and which of them have not completed.

The keys come from torch/csrc/distributed/c10d/FlightRecorder.hpp, format versions 1.0 to 2.10 (torch 2.3 to 2.13). A
dump is a pickle, or JSON if the job asked its WorkerServer for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from probing.api.errors import CorruptTarget, UnsupportedTarget
from probing.api.text import ranks_of, time_text
from probing.diagnosis.flight_recorder.plain_pickle import load_plain
from probing.diagnosis.words import clean

__all__ = (
    "DEFAULT",
    "MAX_FILE",
    "MAX_RECORDS",
    "Group",
    "RankDump",
    "Record",
    "contradictions",
    "load_dump",
    "read_dump",
)

DEFAULT = "default_pg"
"""``Group.desc`` of the group that has all ranks."""
MAX_FILE = 64 << 20
"""The maximum size of a dump; a larger dump is not read."""
MAX_RECORDS = 20_000
"""The maximum number of records that are read: ten times the default size of torch's buffer. The newest are read."""
MAX_GROUPS = 4_096
MAX_MEMBERS = 16_384
_MAX_TEXT = 256
_PICKLE = 0x80
_NUMBER = re.compile(r"\d{1,9}")
# Texts such as "nccl:send 0->3" and "nccl:recv 0<-3", whose numbers are ranks within the group.
_P2P = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. Its fields are the same in the dumps of all its ranks. ``ranks``: ranks of the job, in the order
    of the group; empty if the dump does not list them, as for gloo.
    """

    name: str
    ranks: tuple[int, ...]
    desc: str = field(default="", compare=False)

    def __hash__(self) -> int:
        # The hash uses only the name, because a group may have ten thousand ranks.
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Record:
    """An operation of a dump. ``peer``: the other rank of a send or receive, as a rank of the job; None for a
    collective.
    """

    group: Group
    seq: int
    op: str
    completed: bool
    created_ns: int | None = None
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class RankDump:
    """The dump of a rank. ``called``: the highest sequence number in the records of each group. ``status``: the highest
    sequence number of each group, by the group's number in this process. ``numbers``: the groups by their numbers in
    this process, as far as records show them.

    ``world``: the ranks of the default group; empty if the dump does not list them.
    """

    rank: int
    world: tuple[int, ...]
    records: tuple[Record, ...]
    called: Mapping[Group, int]
    status: Mapping[str, int]
    numbers: Mapping[str, Group]
    groups: tuple[Group, ...]


def load_dump(data: bytes) -> Any:
    """Returns the plain data of a dump in pickle or JSON form. Raises UnsupportedTarget, CorruptTarget."""
    if data[:1] == bytes([_PICKLE]):
        return load_plain(data)
    if data[:64].lstrip()[:1] not in (b"{", b"["):
        raise UnsupportedTarget("the file is not a dump of a flight recorder", hint="dumps are pickles or JSON")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CorruptTarget("the dump begins like JSON, but is not valid JSON") from e


def read_dump(rank: int, data: bytes, known: dict[object, Group] | None = None) -> RankDump:
    """Returns the dump of ``rank``. ``known``: the groups of the dumps that were read before. Dumps share equal groups,
    because a list of ten thousand ranks in each of ten thousand dumps takes gigabytes.

    Raises UnsupportedTarget and CorruptTarget if ``data`` is not a dump.
    """
    dump = load_dump(data)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise CorruptTarget("the dump has no list of records")
    config = dump.get("pg_config")
    groups = _groups(config if isinstance(config, dict) else {})
    own = {name: group for name, group in groups.items() if rank in group.ranks}
    if known is not None:
        own = {name: known.setdefault((name, group.desc, group.ranks), group) for name, group in own.items()}
    records, numbers = [], dict[str, Group]()
    for entry in dump["entries"][-MAX_RECORDS:]:
        record = _record(entry, own) if isinstance(entry, dict) else None
        if record is not None:
            records.append(record)
            numbers[str(_integer(entry.get("pg_id")))] = record.group
    if dump["entries"] and not records:
        version = clean(_text(dump.get("version")) or "unknown", 16)
        raise UnsupportedTarget(f"none of its {len(dump['entries'])} records has a known form (version {version})")
    called: dict[Group, int] = {}
    for record in records:
        called[record.group] = max(called.get(record.group, record.seq), record.seq)
    status = dict(_enqueued(dump.get("pg_status")))
    world = max((group.ranks for group in own.values()), key=len, default=())
    return RankDump(rank, world, tuple(records), called, status, numbers, tuple(own.values()))


def _groups(config: Mapping[Any, Any]) -> dict[str, Group]:
    found = {}
    for name, about in list(config.items())[:MAX_GROUPS]:
        if not isinstance(about, dict):
            continue
        ranks = about.get("ranks")
        # The value is a list of numbers, or its text.
        numbers = _NUMBER.findall(ranks[: 8 * MAX_MEMBERS]) if isinstance(ranks, str) else ranks
        if isinstance(numbers, list | tuple):
            members = tuple(n for one in numbers[:MAX_MEMBERS] if (n := _rank(one)) is not None)
            found[_text(str(name))] = Group(_text(str(name)), members, _text(about.get("desc")))
    return found


def _rank(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if _NUMBER.fullmatch(value) else None
    return _integer(value)


def _record(entry: Mapping[str, Any], groups: Mapping[str, Group]) -> Record | None:
    about = entry.get("process_group")
    name = _text(about[0]) if isinstance(about, list | tuple) and about else ""
    desc = _text(about[1]) if isinstance(about, list | tuple) and len(about) > 1 else ""
    group = groups.get(name) or Group(name, (), desc)
    op = _text(entry.get("profiling_name")).partition(":")[2]
    match = _P2P.search(op)
    seq = _integer(entry.get("collective_seq_id", entry.get("seq_id")))
    if seq is None or not name or not op:
        return None
    peer = None
    if match is not None:
        peer = _member(group, int(match[3]))
        if peer is None:
            return None
        op, seq = match[1], _integer(entry.get("p2p_seq_id")) or seq
    created = _integer(entry.get("time_created_ns"))
    completed = entry.get("state") == "completed" or entry.get("retired") is True
    return Record(group, seq, op, completed, created, peer)


def _member(group: Group, number: int) -> int | None:
    """Returns the rank in the job of a rank of the group; None if unknown."""
    if not group.ranks:
        return number if group.desc == DEFAULT else None
    return group.ranks[number] if number < len(group.ranks) else None


def _enqueued(status: Any) -> Iterable[tuple[str, int]]:
    if not isinstance(status, dict):
        return
    for name, about in list(status.items())[:MAX_GROUPS]:
        number = _integer(about.get("last_enqueued_collective")) if isinstance(about, dict) else None
        if number is not None:
            yield str(name)[:16], number


def _text(value: Any) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 63 else None


# Ranks that wait for each other call within this time, ns; the longest usual time-out is half an hour.
_APART_NS = 3_600 * 10**9
# These operations end only after all ranks have called them; in other operations a root may send and go on.
_TOGETHER = frozenset(("all_reduce", "allreduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


def contradictions(dumps: Sequence[RankDump]) -> tuple[str, ...]:
    """Returns a sentence for each contradiction between dumps that should be of one job at one moment; empty if there
    is none.
    """
    found = (_worlds(dumps), _other_groups(dumps), _times(dumps), _calls(dumps))
    return tuple(text for each in found for text in each)


def _worlds(dumps: Sequence[RankDump]) -> Iterator[str]:
    worlds = {dump.world for dump in dumps if dump.world}
    if len(worlds) > 1:
        yield f"the dumps are of {len(worlds)} jobs, with different ranks: diagnose each job separately"


def _other_groups(dumps: Sequence[RankDump]) -> Iterator[str]:
    members: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        for group in dump.groups:
            if members.setdefault(group.name, group.ranks) != group.ranks:
                yield f"group {clean(group.name)} of rank {dump.rank} has other ranks than in other dumps"
                return


def _times(dumps: Sequence[RankDump]) -> Iterator[str]:
    newest = {dump.rank: max((one.created_ns or 0 for one in dump.records), default=0) for dump in dumps}
    called = {rank: at for rank, at in newest.items() if at}
    if not called:
        return
    last = max(called.values())
    old = [rank for rank, at in called.items() if last - at > _APART_NS]
    if old:
        apart = time_text(last - max(called[rank] for rank in old))
        yield f"the last call of {ranks_of(old)} is {apart} older than that of other ranks"


def _calls(dumps: Sequence[RankDump]) -> Iterator[str]:
    called = {dump.rank: {group.name: seq for group, seq in dump.called.items()} for dump in dumps}
    least: dict[str, int] = {}
    for own in called.values():
        for name, seq in own.items():
            least[name] = min(least.get(name, seq), seq)
    for dump in dumps:
        ended = {one.group: one for one in dump.records if one.completed and one.op in _TOGETHER}
        for group, record in ended.items():
            if least.get(group.name, record.seq) >= record.seq:
                continue
            behind = [r for r in group.ranks if r in called and called[r].get(group.name, record.seq) < record.seq]
            if behind:
                call = f"{record.op} seq {record.seq} of {clean(group.desc or group.name)}"
                yield f"{call} has completed on rank {dump.rank}, and not been called on {ranks_of(behind)}"
                return
