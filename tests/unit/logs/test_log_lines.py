"""Lines out of pieces, which of them are stored, and what is shown of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import Processes, Sink
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.clock import ClockPair, FakeClock
from probing.daemon.config import LogsConfig
from probing.daemon.logs import lines, source
from probing.daemon.logs.attachments import is_libc
from probing.daemon.logs.lines import (
    MAX_TRACEBACKS,
    SECOND_NS,
    Line,
    Lines,
    Patterns,
    Piece,
    RateLimit,
    Tracebacks,
    Writer,
)
from probing.daemon.logs.source import LogSource, shown
from probing.daemon.source import Identity

ONE, OTHER = Writer(1, 10, 1, 1), Writer(1, 10, 2, 1)
WHO = Identity(1, 10, "job", "run", "trainer", 0, 0, 1, 0)


def texts(found: Sequence[Line]) -> list[bytes]:
    return [line.text for line in found]


def test_a_line_may_come_in_several_calls() -> None:
    unfinished = Lines()
    assert unfinished.feed(Piece(ONE, 5, 0, b"NCCL ")) == []
    assert unfinished.feed(Piece(OTHER, 6, 0, b"other\n")) == [Line(OTHER, 6, b"other")]
    ended = unfinished.feed(Piece(ONE, 7, 0, b"WARN\nnext\r\n\nrest"))
    assert ended == [Line(ONE, 5, b"NCCL WARN"), Line(ONE, 7, b"next")]
    assert unfinished.end(1, 11) == []
    # Lines of one call have an order.
    assert unfinished.end(1, 10) == [Line(ONE, 8, b"rest")]
    assert unfinished.end(1, 10) == []


def test_pieces_of_one_call_that_was_cut() -> None:
    unfinished = Lines()
    assert unfinished.feed(Piece(ONE, 5, 0, b"a" * 256)) == []
    assert texts(unfinished.feed(Piece(ONE, 5, 256, b"b\nc", cut=True))) == [b"a" * 256 + b"b", b"c"]
    # What the next call writes is no continuation of what was not seen.
    assert texts(unfinished.feed(Piece(ONE, 6, 0, b"d\n"))) == [b"d"]


def test_what_was_lost_in_between_is_not_glued_over() -> None:
    unfinished = Lines()
    unfinished.feed(Piece(ONE, 5, 0, b"begin "))
    assert texts(unfinished.feed(Piece(ONE, 5, 512, b"end\n"))) == [b"begin ", b"end"]
    unfinished.feed(Piece(ONE, 6, 0, b"begin "))
    assert texts(unfinished.feed(Piece(ONE, 7, 256, b"end\n"))) == [b"begin ", b"end"]


def test_unfinished_lines_are_bounded() -> None:
    unfinished = Lines()
    for tid in range(2 * lines.MAX_WRITERS):
        unfinished.feed(Piece(Writer(1, 10, tid, 1), 5, 0, b"x" * 10))
    assert len(unfinished.end(1, 10)) == lines.MAX_WRITERS
    for _ in range(100):
        unfinished.feed(Piece(ONE, 5, 0, b"y" * 256))
    assert max(map(len, texts(unfinished.feed(Piece(ONE, 6, 0, b"\n"))))) <= lines.MAX_LINE


def test_very_many_writers_of_a_process_end_no_line_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_WRITERS", 7)
    unfinished = Lines()
    # GIVEN an unfinished line of a process
    unfinished.feed(Piece(ONE, 5, 0, b"RuntimeError: "))
    # WHEN many threads of another one leave theirs unfinished
    ended = [line for tid in range(23) for line in unfinished.feed(Piece(Writer(2, 20, tid, 1), 6, 0, b"%d" % tid))]
    # THEN the oldest of those end, and none is lost
    assert texts(ended) == [b"%d" % tid for tid in range(17)]
    assert texts(unfinished.end(2, 20)) == [b"%d" % tid for tid in range(17, 23)]
    # AND the line of the first process goes on
    assert texts(unfinished.feed(Piece(ONE, 7, 0, b"out of memory\n"))) == [b"RuntimeError: out of memory"]
    assert unfinished._writers == 1


@given(st.binary(max_size=2000), st.lists(st.integers(1, 300), max_size=20))
def test_however_it_is_cut_the_lines_are_the_same(text: bytes, cuts: list[int]) -> None:
    unfinished = Lines()
    found, at = [], 0
    for number, size in enumerate([*cuts, 2000]):
        found += unfinished.feed(Piece(ONE, number, 0, text[at : at + size]))
        at += size
    found += unfinished.end(1, 10)
    assert texts(found) == [line for line in text.replace(b"\r", b"\n").split(b"\n") if line]


def test_the_first_pattern_is_the_kind() -> None:
    patterns = Patterns(("NCCL WARN", "", "RuntimeError:", "é"))
    assert patterns.kind(b"RuntimeError: NCCL WARN") == "NCCL WARN"
    assert patterns.kind("né".encode()) == "é"
    assert patterns.kind(b"nccl warn") is None
    assert patterns.kind(b"") is None


def test_each_process_has_so_many_lines_a_second() -> None:
    limit = RateLimit(2)
    taken = [limit.take(1, 10, "a", 5 * SECOND_NS + i) for i in range(5)]
    assert taken == [0, 0, None, None, None]
    assert limit.take(1, 10, "b", 5 * SECOND_NS + 6) is None
    assert limit.take(2, 10, "a", 5 * SECOND_NS + 7) == 0
    assert [limit.take(1, 10, kind, 6 * SECOND_NS) for kind in ("a", "a")] == [3, 0]
    assert limit.forget(1, 10) == 1
    assert limit.forget(1, 10) == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("ab"), st.integers(0, 3)), max_size=60))
def test_every_line_is_stored_or_counted(taken: list[tuple[int, str, int]]) -> None:
    limit = RateLimit(2)
    answers = [limit.take(pid, 10, kind, second * SECOND_NS) for pid, kind, second in taken]
    told = sum(answer for answer in answers if answer is not None)
    left = sum(limit.forget(pid, 10) for pid in (1, 2, 3))
    assert answers.count(None) == told + left


@pytest.mark.parametrize(
    ("line", "limit", "text"),
    [
        (b"plain", 64, "plain"),
        (b"\x1b[1;31mred\x1b[0m\tend\x07\x00", 64, "red end\\x07\\x00"),
        (b"login --password hunter2 -v", 64, "login --password *** -v"),
        (b"HF_TOKEN=hf_abcdefghijklmnop12", 64, "HF_TOKEN=***"),
        (b"from https://user:secret@host/x", 64, "from https://***@host/x"),
        (b"sent Bearer abc.def", 64, "sent ***"),
        (b"12345678", 8, "12345678"),
        (b"123456789", 8, "12345…"),
        ("ééééé".encode(), 8, "éé…"),
        (b"\xff\xfe", 64, "\ufffd\ufffd"),
    ],
)
def test_what_is_shown_of_a_line(line: bytes, limit: int, text: str) -> None:
    assert shown(line, limit) == text


@given(st.binary(max_size=300), st.integers(64, 200))
def test_whatever_was_written_can_be_shown(line: bytes, limit: int) -> None:
    text = shown(line, limit)
    assert text.isprintable()
    assert len(text.encode()) <= limit


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/usr/lib/x86_64-linux-gnu/libc.so.6", True),
        (b"/lib64/libc-2.31.so", True),
        (b"/lib/ld-musl-x86_64.so.1", True),
        (b"/lib/libc.musl-x86_64.so.1 (deleted)", True),
        (b"/usr/lib/libcap.so.2", False),
        (b"/usr/lib/libc.so.6/other", False),
        (b"", False),
    ],
)
def test_which_files_are_a_libc(path: bytes, expected: bool) -> None:
    assert is_libc(path) is expected


RECORD = np.dtype(
    [
        ("t", "<u8"),
        ("start_ns", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("offset", "<u4"),
        ("size", "<u2"),
        ("fd", "u1"),
        ("end", "u1"),
        ("text", "S256"),
    ]
)


def made(sink: Sink, **options: object) -> LogSource:
    config = LogsConfig(enabled=True, **options)  # type: ignore[arg-type]
    processes = Processes(identify=lambda pid, _: WHO if pid == WHO.pid else None)
    nobody: Any = None
    return LogSource(nobody, processes, nobody, nobody, sink, FakeClock(), "n", config, lambda who: True)


def records(*written: tuple[int, int, bytes]) -> np.ndarray:
    rows = [(t, 10, pid, pid, 0, len(text), 2, 1, text) for t, pid, text in written]
    return np.array(rows, RECORD)


PAIR = ClockPair(0, 0, 1000)


def stored(found: dict[str, pa.RecordBatch]) -> list[tuple[object, ...]]:
    rows = [row for batch in found.values() for row in batch.drop_columns(["ts"]).to_pylist()]
    return [(row["pid"], row["line"], row["suppressed"]) for row in rows]


def test_suppressed_lines_are_reported_when_a_process_ends() -> None:
    sink = Sink()
    reading = made(sink, lines_per_s=2)
    reading.process_identified(WHO)
    reading.assemble(records(*((i, 1, b"NCCL WARN\n") for i in range(9)), (SECOND_NS, 1, b"RuntimeError: x")), PAIR)
    reading.process_exited(WHO)
    assert [row["line"] for row in sink.rows] == ["RuntimeError: x"]
    assert [(loss.table, loss.count, loss.pid) for loss in sink.losses] == [("process.logs", 7, 1)]
    # The ring may hold more of it.
    last = reading.assemble(records((2 * SECOND_NS, 1, b"NCCL WARN last")), PAIR)
    assert stored(last) == [(1, "NCCL WARN last", 0)]
    assert source.RING == "log_writes"


def test_a_line_and_a_second_go_over_several_drains() -> None:
    reading = made(Sink(), lines_per_s=1)
    assert stored(reading.assemble(records((1, 1, b"NCCL ")), PAIR)) == []
    more = records(
        (2, 1, b"WARN\n"), (3, 1, b"NCCL WARN 2\n"), (4, 7, b"NCCL WARN of none\n"), (SECOND_NS, 1, b"NCCL WA")
    )
    assert stored(reading.assemble(more, PAIR)) == [(1, "NCCL WARN", 0)]
    later = records((2 * SECOND_NS, 1, b"RN 3\n"))
    assert stored(reading.assemble(later, PAIR)) == [(1, "NCCL WARN 3", 1)]


_FRAMES = """Traceback (most recent call last):
  File "/home/u/train.py", line 88, in <module>
    main()
  File "/home/u/data.py", line 12, in fetch_shard
    raise ShardCorrupt(f"shard {number} is corrupt: {path}")
"""


def written(text: str, size: int = 255) -> np.ndarray:
    """The records of one call that writes ``text``, and then the exit."""
    data = text.encode()
    pieces = range(0, len(data), size)
    rows = [
        (5, 10, 1, 1, at, len(data[at : at + size]), 2, int(at + size >= len(data)), data[at : at + size])
        for at in pieces
    ]
    return np.array(rows, RECORD)


def prefixed(text: str, prefix: str) -> str:
    """As torch's excepthook writes it."""
    return "\n".join(f"{prefix}{line}" if line else "" for line in text.split("\n"))


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "(worker pid=77) "])
@pytest.mark.parametrize(
    "reason",
    [
        "ValueError: shard 17 is corrupt: /data/shard-17.tar",
        "data.ShardCorrupt: shard 17: /data/shard-17.tar",
        "AssertionError",
        "StopIteration",
        "é: no name that a pattern has",
    ],
)
def test_the_exception_below_a_traceback_is_stored(prefix: str, reason: str) -> None:
    reading = made(Sink())
    found = reading.assemble(written(prefixed(f"before\n{_FRAMES}{reason}\nafter\n", prefix)), PAIR)
    assert [line for _, line, _ in stored(found)] == [
        f"{prefix}Traceback (most recent call last):",
        f"{prefix}{reason}",
    ]
    (batch,) = found.values()
    times = batch["ts"].cast(pa.int64()).to_pylist()
    assert times == sorted(set(times))


def test_each_of_two_chained_exceptions_is_stored_in_order() -> None:
    between = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text = f"{_FRAMES}a.First: 1{between}{_FRAMES}b.Second\n"
    found = stored(made(Sink()).assemble(written(text), PAIR))
    assert [line for _, line, _ in found if "Traceback" not in line] == ["a.First: 1", "b.Second"]


def test_the_exception_of_a_data_loader_worker_is_the_last_one() -> None:
    text = prefixed(
        f"{_FRAMES}a.First: Caught a.First in DataLoader worker process 0.\nOriginal {_FRAMES}a.First: 17\n",
        "[rank1]: ",
    )
    lines = [line for _, line, _ in stored(made(Sink()).assemble(written(text), PAIR))]
    assert lines == [
        "[rank1]: Traceback (most recent call last):",
        "[rank1]: a.First: Caught a.First in DataLoader worker process 0.",
        "[rank1]: Original Traceback (most recent call last):",
        "[rank1]: a.First: 17",
    ]


def test_a_traceback_whose_lines_have_a_time_each_is_followed() -> None:
    text = "".join(f"12:00:0{i}.5 {line}\n" for i, line in enumerate(_FRAMES.splitlines()))
    found = stored(made(Sink()).assemble(written(f"{text}12:00:09.5 a.First: 1\n"), PAIR))
    assert [line for _, line, _ in found][1:] == ["12:00:09.5 a.First: 1"]


def test_a_traceback_goes_over_drains_and_threads_do_not_mix() -> None:
    reading = made(Sink())
    reading.assemble(records((1, 1, _FRAMES.encode())), PAIR)
    other = np.array([(2, 10, 1, 9, 0, 6, 2, 1, b"other\n")], RECORD)
    assert stored(reading.assemble(other, PAIR)) == []
    assert stored(reading.assemble(records((3, 1, b"a.First: 1\nnext\n")), PAIR)) == [(1, "a.First: 1", 0)]


def test_tracebacks_are_bounded_and_end_with_their_process() -> None:
    following = Tracebacks()
    first = b"Traceback (most recent call last):"
    for tid in range(MAX_TRACEBACKS + 5):
        assert following.kind(Writer(1, 10, tid, 2), first, "T") == "T"
    assert following.kind(Writer(1, 10, 0, 2), b"a.First", None) is None
    assert following.kind(Writer(1, 10, 99, 2), b"a.First", None) == "T"
    following.forget(1, 10)
    assert following.kind(Writer(1, 10, 100, 2), b"a.First", None) is None
    # Without the pattern nothing is followed.
    assert following.kind(ONE, first, None) is None
    assert following.kind(ONE, b"a.First", None) is None
    for _ in range(5000):
        following.kind(OTHER, first, "T")
        assert following.kind(OTHER, b'  File "x"', None) is None
    following.kind(OTHER, first, "T")
    for _ in range(2100):
        following.kind(OTHER, b'  File "x"', None)
    assert following.kind(OTHER, b"much later", None) is None


def test_a_traceback_whose_end_was_not_seen_takes_no_later_line() -> None:
    reading = made(Sink())
    begun = np.array([(1, 10, 1, 1, 0, len(_FRAMES), 2, source.PIECE_IS_CUT, _FRAMES.encode())], RECORD)
    assert [line for _, line, _ in stored(reading.assemble(begun, PAIR))] == ["Traceback (most recent call last):"]
    assert stored(reading.assemble(records((2, 1, b"step 12\n")), PAIR)) == []
