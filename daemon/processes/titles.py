"""Reads the rank of a process, or its coordinates in the job, from the title or the arguments that its framework set.

Titles: vLLM 0.32 (vllm/v1/executor/multiproc_executor.py), SGLang 0.5 (sglang/srt/managers/scheduler.py) and Ray 2.60
(the name of the actor's class). Arguments: DeepSpeed's launcher and torch.distributed.launch pass --local_rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from math import prod
from typing import NamedTuple

from probing.daemon.processes.identity import MAX_WORLD, Ranks

__all__ = ("Grid", "Place", "grid_of", "place_in_arguments", "place_in_title", "rank_in_grid", "role_in_title")


class Place(NamedTuple):
    """The ``coordinates`` of a process in the grid of its job; the last coordinate changes fastest with the rank.

    ``kind``: only places of the same kind belong to one grid. ``size``: the number of ranks, if the title or the
    arguments name it. In this case the only coordinate is the rank.
    """

    kind: str
    coordinates: tuple[int, ...]
    size: int | None = None


class _Pattern(NamedTuple):
    """A pattern of titles. ``role``: the role of processes with such a title. ``parts``: names of the coordinates."""

    title: re.Pattern[str]
    role: str
    parts: tuple[str, ...] = ()


_PARTS = r"((?:_[A-Z]+(?:_[A-Z]+)?[0-9]{1,6})*)"
_PART = re.compile(r"_([A-Z]+(?:_[A-Z]+)?)([0-9]{1,6})")
# VLLM_PROCESS_NAME_PREFIX replaces VLLM. DCP and EP of vLLM, and EP of SGLang, only divide the ranks of TP, so they are
# not coordinates.
_PATTERNS = (
    _Pattern(re.compile(rf"[\w.-]{{1,64}}::Worker{_PARTS}"), "trainer", ("DP", "PP", "PCP", "TP")),
    _Pattern(re.compile(r"[\w.-]{1,64}::EngineCore(?:_DP[0-9]+)?"), "engine"),
    _Pattern(re.compile(r"[\w.-]{1,64}::(?:DPCoordinator|APIServer(?:_[0-9]+)?)"), "other"),
    _Pattern(re.compile(rf"sglang::scheduler{_PARTS}"), "trainer", ("PP", "TP")),
    _Pattern(re.compile(r"sglang::data_parallel_controller"), "launcher"),
    _Pattern(re.compile(r"sglang::(?:detokenizer|tokenizer_worker).{0,64}"), "other"),
    _Pattern(re.compile(r"ray::TrainController.{0,64}"), "launcher"),
)
_RANK = re.compile(r"(?<![a-z])rank[ _=:#-]?([0-9]{1,8})(?![0-9])(?: ?(?:/|of) ?([0-9]{1,8})(?![0-9]))?", re.IGNORECASE)
_ARGUMENTS = (("rank", "world_size"), ("process_id", "num_processes"), ("local_rank", ""))


def role_in_title(cmdline: tuple[str, ...]) -> str:
    """Returns the role that the title names: trainer, launcher, other, or engine; empty for an unknown title. An engine
    starts trainers, or trains itself.
    """
    pattern, _ = _pattern(cmdline)
    return pattern.role if pattern else ""


def place_in_title(cmdline: tuple[str, ...]) -> Place | None:
    """Returns the place that the title of a process names: ``VLLM::Worker_PP1_TP3``, or any title with ``rank 3/8``."""
    pattern, match = _pattern(cmdline)
    if pattern is not None and match is not None:
        if not pattern.parts:
            return None
        numbers = {name: int(number) for name, number in _PART.findall(match[1])}
        return Place(pattern.parts[-1], tuple(numbers.get(name, 0) for name in pattern.parts))
    if len(cmdline) != 1 or (found := _RANK.search(cmdline[0])) is None:
        return None
    return _place("title", int(found[1]), int(found[2]) if found[2] else None)


def place_in_arguments(cmdline: tuple[str, ...]) -> Place | None:
    """Returns the place in the arguments of a process: ``--rank 3 --world-size 8``, or ``--local_rank=3``."""
    values = dict(_options(cmdline))
    for rank_name, size_name in _ARGUMENTS:
        rank, size = values.get(rank_name), values.get(size_name)
        if rank is not None and (place := _place(rank_name, rank, size)) is not None:
            return place
    return None


def rank_in_grid(place: Place, places: Collection[Place]) -> Ranks | None:
    """Returns the rank of ``place``; None if ``places``, the places of the job's processes, do not form a complete
    grid.
    """
    if place.size is not None:
        return Ranks(place.coordinates[0], place.size)
    grid = grid_of(places)
    return grid.rank_of(place) if grid is not None else None


class Grid(NamedTuple):
    """A complete grid of places of one ``kind``. ``lengths``: its size in each dimension. ``taken``: its places."""

    kind: str
    lengths: tuple[int, ...]
    taken: frozenset[tuple[int, ...]]

    def rank_of(self, place: Place) -> Ranks | None:
        """Returns the rank of a place; None if the place is not in the grid."""
        if place.kind != self.kind or place.coordinates not in self.taken:
            return None
        rank = 0
        for number, length in zip(place.coordinates, self.lengths, strict=True):
            rank = rank * length + number
        return Ranks(rank, len(self.taken), rank if place.kind == "local_rank" else None)


def grid_of(places: Collection[Place]) -> Grid | None:
    """Returns the grid that ``places`` form; None if the grid would not be complete."""
    # vLLM's and SGLang's titles both have the kind TP, but different numbers of coordinates.
    kinds = {(place.kind, place.size, len(place.coordinates)) for place in places}
    taken = frozenset(place.coordinates for place in places)
    # A single place may belong to a larger job whose other processes have not been seen yet.
    if len(kinds) != 1 or len(taken) < max(2, len(places)):
        return None
    ((kind, size, _),) = kinds
    lengths = tuple(max(numbers) + 1 for numbers in zip(*taken, strict=True))
    return Grid(kind, lengths, taken) if size is None and prod(lengths) == len(taken) else None


def _pattern(cmdline: tuple[str, ...]) -> tuple[_Pattern, re.Match[str]] | tuple[None, None]:
    # A title replaces all arguments, so a process with a title has a single argument.
    if len(cmdline) == 1:
        for pattern in _PATTERNS:
            if match := pattern.title.fullmatch(cmdline[0].rstrip()):
                return pattern, match
    return None, None


def _place(kind: str, rank: int, size: int | None) -> Place | None:
    return Place(kind, (rank,), size) if size is None or rank < size <= MAX_WORLD else None


def _options(cmdline: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for at, word in enumerate(cmdline):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            value = value if equals else (cmdline[at + 1] if at + 1 < len(cmdline) else "")
            if value.isascii() and value.isdigit() and len(value) <= 8:
                yield name.replace("-", "_"), int(value)
