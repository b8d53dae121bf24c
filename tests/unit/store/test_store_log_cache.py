"""Rows of the log from the cache are those that are decoded without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import FormatError
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.store.files import SystemFiles
from probing.daemon.store.log.cache import MAX_PIECES, LogCache
from probing.daemon.store.log.decode import read_part
from probing.daemon.store.log.parts import PartWriter
from probing.daemon.store.log.records import Chunk, PartHeader, pack_header, pack_record

OPS, LOSSES = "comm.ops", "probing.losses"
T0 = 1_795_000_000_000_000_000


class Log:
    """A part that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = PartWriter(SystemFiles(), path, PartHeader(1, 1, "n0", T0))
        self._clock = ClockPair(1, 1, T0)

    @property
    def length(self) -> int:
        return self._writer.part.length

    def append(self, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
        self._writer.append({name: [batch_of(name, found)] for name, found in rows.items()}, "boot", self._clock, {})
        return self.length


def operations(*seqs: int) -> list[dict[str, Any]]:
    return [{"node": "n0", "ts": T0 + i * 1000, "job": f"j{i % 5}", "seq": i, "op": f"op{i}"} for i in seqs]


def losses(*counts: int) -> list[dict[str, Any]]:
    return [{"node": "n0", "ts": T0, "source": f"s{i}", "reason": f"reason {i}", "count": i} for i in counts]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "000000000001.wal")


def rows_of(tail: Any) -> dict[str, list[Any]]:
    return {name: rows.to_pylist() for name, rows in tail.tables.items()}


def same(tails: LogCache, log: Log, length: int, *tables: str) -> None:
    cached, expected = tails.read(str(log.path), length, tables), read_part(log.path, length, tables)
    assert rows_of(cached) == rows_of(expected)
    assert cached.problems == expected.problems
    assert {name: rows.schema for name, rows in cached.tables.items()} == {
        name: rows.schema for name, rows in expected.tables.items()
    }


def test_a_part_that_grows_by_more_records_than_pieces_are_kept(log: Log) -> None:
    tails = LogCache()
    for number in range(3 * MAX_PIECES):
        same(tails, log, log.append({OPS: operations(number, number + 1)}), OPS)
    rows = tails.read(str(log.path), log.length, [OPS]).tables[OPS]
    assert rows.num_rows == 6 * MAX_PIECES
    assert rows.column("seq").num_chunks <= MAX_PIECES


_APPENDED = st.fixed_dictionaries(
    {},
    optional={
        OPS: st.lists(st.integers(0, 50), min_size=1, max_size=3).map(lambda seqs: operations(*seqs)),
        LOSSES: st.lists(st.integers(0, 50), min_size=1, max_size=3).map(lambda counts: losses(*counts)),
    },
).filter(bool)
_ASKED = st.lists(st.sampled_from([OPS, LOSSES]), min_size=1, unique=True)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(_APPENDED, _ASKED), min_size=1, max_size=12), st.integers(0, 11))
def test_whatever_is_asked_of_a_part_as_it_grows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, list[str]]], before: int
) -> None:
    log = Log(tmp_path_factory.mktemp("log") / "000000000001.wal")
    tails, lengths = LogCache(), [log.length]
    for appended, asked in steps:
        lengths.append(log.append(appended))
        same(tails, log, lengths[-1], *asked)
    # A snapshot that is older than what is kept.
    same(tails, log, lengths[before % len(lengths)], OPS, LOSSES)


def test_a_record_that_is_damaged_ends_a_part_whenever_it_comes(log: Log) -> None:
    tails = LogCache()
    same(tails, log, log.append({OPS: operations(1)}), OPS)
    good = log.length
    log.append({OPS: operations(2), LOSSES: losses(1)})
    data = bytearray(log.path.read_bytes())
    data[good + 60] ^= 1
    log.path.write_bytes(data)
    for _ in range(2):
        same(tails, log, log.length, OPS, LOSSES)
    assert tails.read(str(log.path), log.length, [OPS]).problems == (f"the log part is bad from byte {good} on",)


def test_another_part_under_the_same_name_is_another_part(log: Log, tmp_path: Path) -> None:
    tails = LogCache()
    same(tails, log, log.append({OPS: operations(1, 2, 3)}), OPS)
    other = Log(tmp_path / "other.wal")
    other.append({OPS: operations(7)})
    other.path.replace(log.path)
    other.path = log.path
    same(tails, other, other.length, OPS)


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    parts = [Log(tmp_path / f"{number:012d}.wal") for number in range(1, 6)]
    for part in parts:
        part.append({OPS: operations(*range(100))})
    one = LogCache()
    same(one, parts[0], parts[0].length, OPS)
    tails = LogCache(one.kept_bytes * 2)
    for part in [*parts, parts[0]]:
        same(tails, part, part.length, OPS)
        assert 0 < tails.kept_bytes <= one.kept_bytes * 2
    none = LogCache(0)
    same(none, parts[0], parts[0].length, OPS)
    assert none.kept_bytes == 0


def test_a_part_that_cannot_be_opened_is_an_error(log: Log) -> None:
    length = log.append({OPS: operations(1)})
    tails = LogCache()
    with pytest.raises(FormatError, match="shorter"):
        tails.read(str(log.path), length + 1, [OPS])
    with pytest.raises(FileNotFoundError):
        tails.read(str(log.path) + "x", length, [OPS])
    log.path.write_bytes(b"nonsense" * 100)
    with pytest.raises(FormatError, match="no header"):
        tails.read(str(log.path), 800, [OPS])


def test_rows_that_are_no_arrow_are_named(tmp_path: Path) -> None:
    path = tmp_path / "000000000001.wal"
    clock = ClockPair(1, 1, T0)
    records = [pack_record(number, "boot", clock, {}, [Chunk(OPS, b"no arrow" * 9, 1)]) for number in (1, 2)]
    path.write_bytes(b"".join([pack_header(PartHeader(1, 1, "n0", T0)), *records]))
    tails = LogCache()
    for length in (path.stat().st_size - len(records[1]), path.stat().st_size):
        (problem,) = tails.read(str(path), length, [OPS]).problems
        (expected,) = read_part(path, length, [OPS]).problems
        assert problem.split(",")[0] == expected.split(",")[0]
