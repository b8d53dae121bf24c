"""Builds of NCCL that the table lacks: which layouts enter the map, at which index, and why others do not."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

from probing.api.errors import TargetTimeout
from probing.daemon.nccl_uprobes.layouts import finder as finder_module
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.layouts.nccl import MAX_LAYOUTS, NCCL_LAYOUTS, UNGUARDED_LAYOUTS, NcclLayout

DEADLINE = 30.0
SIZE = len(NCCL_LAYOUTS[0].pack())
FIRST = len(NCCL_LAYOUTS)


class Map:
    """Like the kernel's map, it keeps its entries over a restart."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}

    def update(self, key: int, value: bytes) -> None:
        assert 0 <= key < MAX_LAYOUTS
        assert len(value) == SIZE
        self.values[key] = value

    def lookup(self, key: int) -> Any:
        return np.void(self.values.get(key, bytes(SIZE)))

    @property
    def entries(self) -> list[bytes]:
        """Up to the end of the list, as the programs see them."""
        values = [self.values[index] for index in sorted(self.values)]
        return values[: next((i for i, value in enumerate(values) if not any(value[:4])), len(values))]


class Parsers:
    """Answers with the JSON that the file contains."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def call(self, op: str, *, fds: Sequence[int], timeout: float, known: Sequence[str]) -> dict[str, Any]:
        assert op == "nccl_layout"
        (fd,) = fds
        assert self.go_on.wait(DEADLINE)
        self.asked.append(os.fstat(fd).st_ino)
        answer: dict[str, Any] = json.loads(os.pread(fd, 1 << 16, 0))
        if self.asked.count(self.asked[-1]) <= answer.get("stuck", 0):
            raise TargetTimeout("a file could not be parsed in time")
        if answer.get("build_id") in known:
            return {**answer, "known": True, "comm": None}
        return answer


def comm(end_magic: int, comm_hash: int = 64, **more: Any) -> dict[str, Any]:
    return {"end_magic": end_magic, "comm_hash": comm_hash, "start_magic": 0, "size": end_magic + 8, **more}


Library = Callable[..., Path]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    numbers = iter(range(1000))

    def make(build_id: Any = None, layout: Any = None, **more: Any) -> Path:
        path = tmp_path / f"libnccl.so.{next(numbers)}"
        path.write_text(json.dumps({"build_id": build_id, "known": False, "comm": layout, "why": "", **more}))
        return path

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., LayoutFinder]]:
    started: list[LayoutFinder] = []

    def make(parsers: Parsers, layouts: Map, cache: Path | None = None) -> LayoutFinder:
        finder = LayoutFinder(parsers, layouts, cache)
        finder.start()
        started.append(finder)
        return finder

    yield make
    for finder in started:
        finder.stop()


def attach(finder: LayoutFinder, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        finder.attach(fd)
    finally:
        os.close(fd)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_shipped_table_comes_first_and_unknown_builds_behind_it(
    library: Library, start: Callable[..., LayoutFinder]
) -> None:
    layouts, parsers = Map(), Parsers()
    finder = start(parsers, layouts)
    table = [layout.pack() for layout in NCCL_LAYOUTS]
    assert layouts.entries == table
    attach(finder, library("aa" * 20, comm(4096, 1024, seq_number=2048, seq_count=5)))
    attach(finder, library(None, comm(8192, 1024)))
    until(lambda: len(finder.added) == 2)
    assert layouts.entries == [*table, *(layout.pack() for layout in finder.added)]
    assert [layout.end_magic for layout in finder.added] == [4096, 8192]
    assert finder.reasons == {}


def test_a_file_and_a_layout_are_looked_at_once(library: Library, start: Callable[..., LayoutFinder]) -> None:
    parsers = Parsers()
    finder = start(parsers, Map())
    path, same, last = library("aa" * 20, comm(4096)), library("bb" * 20, comm(4096)), library("cc" * 20, comm(512))
    for file in (path, path, same, path, library(NCCL_LAYOUTS[0].build_ids[0]), last):
        attach(finder, file)
    until(lambda: len(finder.added) == 2)
    assert parsers.asked[:2] == [path.stat().st_ino, same.stat().st_ino]
    assert len(parsers.asked) == 4
    assert finder.reasons == {}


def test_a_restart_needs_no_library(library: Library, start: Callable[..., LayoutFinder], tmp_path: Path) -> None:
    layouts, cache = Map(), tmp_path / "layouts.json"
    before = start(Parsers(), layouts, cache)
    for end_magic in (4096, 512, 2048):
        attach(before, library(f"{end_magic:040x}", comm(end_magic, bus_id=80)))
    until(lambda: len(before.added) == 3)
    before.stop()
    entries = layouts.entries
    parsers = Parsers()
    after = start(parsers, layouts, cache)
    assert layouts.entries == entries
    attach(after, library(f"{512:040x}", comm(512, bus_id=80)))
    attach(after, library("dd" * 20, comm(256)))
    until(lambda: len(after.added) == 4)
    assert layouts.entries[: len(entries)] == entries
    after.stop()
    # Without the file they are not known any more: what is there fits no communicator.
    assert start(Parsers(), layouts).added == ()
    assert layouts.entries[:FIRST] == [layout.pack() for layout in NCCL_LAYOUTS]
    assert {value[:4] for value in layouts.entries[FIRST:]} == {b"\xff\xff\xff\xff"}


def test_layouts_keep_their_indexes_when_the_next_daemon_ships_others(
    library: Library, start: Callable[..., LayoutFinder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts, cache = Map(), tmp_path / "layouts.json"
    before = start(Parsers(), layouts, cache)
    for end_magic in (4096, 8192):
        attach(before, library(f"{end_magic:040x}", comm(end_magic, 1024)))
    until(lambda: len(before.added) == 2)
    before.stop()
    entries = layouts.entries
    # GIVEN a daemon that ships two more, of which one was found before
    more = [NcclLayout.of(comm(end_magic, 1024), (f"9.{end_magic}",), ("ab" * 20,)) for end_magic in (2048, 8192)]
    monkeypatch.setattr(finder_module, "NCCL_LAYOUTS", (*NCCL_LAYOUTS, *more))
    after = start(Parsers(), layouts, cache)
    # THEN what programs remember by its index is what it was
    assert layouts.entries == [*entries, more[0].pack()]
    assert [layout.end_magic for layout in after.added] == [4096]
    attach(after, library("dd" * 20, comm(16384, 1024)))
    until(lambda: len(after.added) == 2)
    after.stop()
    entries = layouts.entries
    assert len(entries) == FIRST + 4
    # and stays so.
    start(Parsers(), layouts, cache)
    assert layouts.entries == entries


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "{}",
        "7",
        "null",
        "[1]",
        '[{"build_ids": 1}]',
        '[{"build_ids": [], "end_magic": -1, "comm_hash": 1}]',
        '[{"build_ids": [], "end_magic": 9, "comm_hash": 8}]',
        '["\\ud800"]',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_as_none(content: str, start: Callable[..., LayoutFinder], tmp_path: Path) -> None:
    cache = tmp_path / "layouts.json"
    cache.write_text(content)
    layouts = Map()
    assert start(Parsers(), layouts, cache).added == ()
    assert layouts.entries == [layout.pack() for layout in NCCL_LAYOUTS]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"layout": None}, "unknown and stripped: only communicators whose creation was seen are known"),
        ({"layout": None, "version": "2.99.1"}, "unknown and stripped"),
        ({"layout": None, "version": ["2.27.5"]}, "unknown and stripped"),
        ({"layout": None, "version": UNGUARDED_LAYOUTS[0].version}, "before 2.21"),
        ({"layout": {"comm_hash": 16}}, "before 2.21"),
        ({"layout": comm(4100)}, "impossible offsets"),
        ({"layout": comm(4096, 4080)}, "impossible offsets"),
        ({"layout": comm(4096, 0)}, "impossible offsets"),
        ({"layout": comm(4096, "x")}, "impossible offsets"),  # type: ignore[arg-type]
        ({"layout": comm(4096, bus_id=1 << 40)}, "impossible offsets"),
        ({"layout": comm(NCCL_LAYOUTS[0].end_magic)}, "laid out in another way"),
        ({"layout": None, "stuck": 3}, "could not be parsed in time"),
    ],
)
def test_what_is_not_taken_has_a_reason(
    answer: dict[str, Any], why: str, library: Library, start: Callable[..., LayoutFinder]
) -> None:
    layouts = Map()
    finder = start(Parsers(), layouts)
    path = library("ab" * 20, answer.pop("layout"), **answer)
    attach(finder, path)
    until(lambda: finder.reasons)
    (name, reason), *more = finder.reasons.items()
    status = path.stat()
    assert name == ("ab" * 20 if "stuck" not in answer else f"file {status.st_dev}:{status.st_ino}")
    assert why in reason
    assert more == []
    assert len(layouts.entries) == FIRST
    # It goes on.
    attach(finder, library("cd" * 20, comm(4096)))
    until(lambda: len(finder.added) == 1)


def test_a_stripped_build_of_a_known_version_needs_nothing(
    library: Library, start: Callable[..., LayoutFinder]
) -> None:
    parsers = Parsers()
    finder = start(parsers, Map())
    attach(finder, library("ab" * 20, None, version=NCCL_LAYOUTS[0].version))
    attach(finder, library("cd" * 20, comm(4096)))
    until(lambda: finder.added)
    assert len(parsers.asked) == 2
    assert finder.reasons == {}


def test_builds_without_magic_words_are_known(library: Library, start: Callable[..., LayoutFinder]) -> None:
    finder = start(Parsers(), Map())
    build = UNGUARDED_LAYOUTS[0].build_ids[0]
    attach(finder, library(build))
    until(lambda: finder.reasons)
    assert "before 2.21" in finder.reasons[build]


def test_a_parser_that_is_late_is_asked_again(library: Library, start: Callable[..., LayoutFinder]) -> None:
    parsers = Parsers()
    finder = start(parsers, Map())
    attach(finder, library("ab" * 20, comm(4096), stuck=2))
    until(lambda: finder.added)
    assert len(parsers.asked) == 3
    assert finder.reasons == {}


def test_the_map_has_an_end(library: Library, start: Callable[..., LayoutFinder]) -> None:
    layouts = Map()
    finder = start(Parsers(), layouts)
    for number in range(MAX_LAYOUTS - FIRST + 1):
        attach(finder, library(f"{number:040x}", comm(4096 + 8 * number)))
    until(lambda: finder.reasons)
    assert len(layouts.entries) == MAX_LAYOUTS
    assert "too many builds" in next(iter(finder.reasons.values()))


def test_what_waits_is_bounded_and_left_at_the_end(library: Library, start: Callable[..., LayoutFinder]) -> None:
    parsers = Parsers()
    parsers.go_on.clear()
    finder = start(parsers, Map())
    open_before = descriptors()
    for number in range(80):
        attach(finder, library(f"{number:040x}", None))
    assert 64 <= descriptors() - open_before <= 65
    assert "too many builds of NCCL wait to be examined" in finder.reasons.values()
    parsers.go_on.set()
    finder.stop()
    assert descriptors() == open_before


def of_user(path: Path, uid: int) -> Path:
    os.chown(path, uid, uid)
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_owners_of_files_take_turns(library: Library, start: Callable[..., LayoutFinder]) -> None:
    parsers = Parsers()
    parsers.go_on.clear()
    finder = start(parsers, Map())
    attach(finder, library(f"{99:040x}", comm(8192)))
    until(lambda: not finder._waiting, what="the first file to be examined")
    # GIVEN a user with several files, and then another with one
    many = [of_user(library(f"{number:040x}", None), 1007) for number in range(3)]
    one = of_user(library(f"{50:040x}", None), 1008)
    for path in (*many, one):
        attach(finder, path)
    parsers.go_on.set()
    until(lambda: len(parsers.asked) == 5, what="all files to be examined")
    assert parsers.asked[1:] == [path.stat().st_ino for path in (many[0], one, many[1], many[2])]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_user_does_not_fill_the_map(library: Library, start: Callable[..., LayoutFinder]) -> None:
    finder = start(Parsers(), Map())
    for number in range(9):
        attach(finder, of_user(library(f"{number:040x}", comm(4096 + 8 * number)), 1007))
    until(lambda: finder.reasons)
    reason = next(iter(finder.reasons.values()))
    assert "8 builds of NCCL, the maximum for one user, are already known for uid 1007" in reason
    assert len(finder.added) == 8
    attach(finder, library(f"{99:040x}", comm(8192)))
    until(lambda: len(finder.added) == 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_user_does_not_fill_the_map_over_restarts(
    library: Library, start: Callable[..., LayoutFinder], tmp_path: Path
) -> None:
    cache = tmp_path / "layouts.json"
    first = start(Parsers(), Map(), cache)
    for number in range(8):
        attach(first, of_user(library(f"{number:040x}", comm(4096 + 8 * number)), 1007))
    until(lambda: len(first.added) == 8)
    first.stop()
    second = start(Parsers(), Map(), cache)
    assert len(second.added) == 8
    attach(second, of_user(library(f"{8:040x}", comm(8192)), 1007))
    until(lambda: second.reasons)
    assert "known for uid 1007" in next(iter(second.reasons.values()))
    attach(second, of_user(library(f"{9:040x}", comm(8192)), 1008))
    until(lambda: len(second.added) == 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_library_of_root_is_believed_before_that_of_a_user(
    library: Library, start: Callable[..., LayoutFinder], tmp_path: Path
) -> None:
    layouts, cache = Map(), tmp_path / "layouts.json"
    finder = start(Parsers(), layouts, cache)
    # GIVEN a user's library with the size of another build, but wrong offsets
    attach(finder, of_user(library("aa" * 20, comm(4096, 64)), 1007))
    attach(finder, of_user(library("bb" * 20, comm(8192, 64)), 1007))
    until(lambda: len(finder.added) == 2)
    attach(finder, library("cc" * 20, comm(4096, 1024)))
    until(lambda: finder.added[0].comm_hash == 1024)
    # THEN root's has its place, and no other entry another
    assert layouts.entries[FIRST:] == [layout.pack() for layout in finder.added]
    assert [layout.end_magic for layout in finder.added] == [4096, 8192]
    # and another user's does not get it again.
    attach(finder, of_user(library("dd" * 20, comm(4096, 128)), 1008))
    until(lambda: finder.reasons)
    assert "laid out in another way" in finder.reasons["dd" * 20]
    finder.stop()
    assert start(Parsers(), Map(), cache).added == finder.added


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_build_id_of_a_users_library_stands_for_no_other_file(
    library: Library, start: Callable[..., LayoutFinder]
) -> None:
    parsers = Parsers()
    finder = start(parsers, Map())
    build = "aa" * 20
    for number, uid in enumerate((1007, 1008, 0, 1009)):
        attach(finder, of_user(library(build, comm(4096 + 8 * number)), uid))
    until(lambda: len(finder.added) == 3)
    # The file of the fourth is known by that of root, and a stripped one may be of any build that is known.
    attach(finder, of_user(library("bb" * 20, comm(8192)), 1010))
    until(lambda: len(finder.added) == 4)
    attach(finder, of_user(library("bb" * 20, None), 1011))
    until(lambda: len(parsers.asked) == 6)
    finder.stop()
    assert [layout.end_magic for layout in finder.added] == [4096, 4104, 4112, 8192]
    assert finder.reasons == {}
