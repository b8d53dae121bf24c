"""Texts of the kit: safe on a terminal, with units, one spelling of each thing."""

from __future__ import annotations

import json
import unicodedata

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.text import (
    age,
    bandwidth,
    bits,
    count,
    encoded,
    escape,
    escape_json,
    listed,
    numbers_text,
    percent,
    plural,
    ranks_of,
    share_text,
    size,
    sql_name,
    sql_table,
    sql_text,
    time_text,
    utc,
    utc_second,
)

GIB = 1 << 30
SECOND = 1_000_000_000
# Controls, what is invisible or reorders a line, surrogates, private and unassigned characters, separators of lines.
UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("训练 é", "训练 é"),
        ("a\xa0b\u3000c", "a\xa0b\u3000c"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x7f\x9b2J", "\\x7f\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
        ("\ud800", "\\ud800"),
        ("\u2028", "\\u2028"),
        ("\U000e0041", "\\U000e0041"),
        (b"\xff\x00ok \xc3\xa9", "\\xff\\x00ok é"),
    ],
)
def test_nothing_that_a_terminal_acts_on_is_left(text: bytes | str, shown: str) -> None:
    assert escape(text) == shown


@given(st.text(st.characters(), max_size=30) | st.binary(max_size=60), st.integers(1, 20))
def test_a_line_is_safe_and_of_bounded_length(text: bytes | str, limit: int) -> None:
    line = escape(text, limit)
    assert len(line) <= limit
    assert not any(unicodedata.category(char) in UNSAFE for char in line)
    assert line.encode().decode() == line
    whole = escape(text)
    assert line == (whole if len(whole) <= limit else whole[: limit - 1] + "…")
    assert encoded(whole) == whole.encode()


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_json_stays_json_and_is_safe(text: str) -> None:
    dumped = escape_json(json.dumps({"x": text}, ensure_ascii=False, indent=2))
    assert json.loads(dumped) == {"x": text}
    assert not any(unicodedata.category(char) in UNSAFE for char in dumped.replace("\n", ""))


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (4_190_000, "4.00 MiB"),
        (1_048_000, "1023 KiB"),
        (1_048_500, "1.00 MiB"),
        (4 * GIB, "4 GiB"),
        (80 * GIB, "80 GiB"),
        (79.64 * GIB, "79.6 GiB"),
        (-3 * GIB, "-3 GiB"),
        (2**62, "4 EiB"),
        (2**72, "4096 EiB"),
    ],
)
def test_sizes_are_in_powers_of_1024(number: float | None, shown: str) -> None:
    assert size(number) == shown


def test_a_part_has_the_unit_of_its_total() -> None:
    assert size(46.1 * GIB, 80 * GIB) == "46.1/80 GiB"
    assert size(64 << 20, 64 << 20) == "64/64 MiB"
    assert size(300 << 20, 80 * GIB) == "0.29/80 GiB"
    assert size(None, GIB) == "-"


def test_rates_are_in_powers_of_1000() -> None:
    assert [bandwidth(n) for n in (None, 0, 12.34, 60, 0.00135)] == ["-", "0 B/s", "12.3 GB/s", "60 GB/s", "1.35 MB/s"]
    assert [bits(n) for n in (None, 100, 17e-9, 400_000)] == ["-", "100 Gb/s", "17 b/s", "400 Tb/s"]


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, "-"),
        (0, "0 ns"),
        (812_000, "812 us"),
        (999_400, "999 us"),
        (999_900, "1.00 ms"),
        (30_000_000, "30 ms"),
        (4_310_000_000, "4.31 s"),
        (59_940_000_000, "59.9 s"),
        (59_999_000_000, "1m00s"),
        (307_000_000_000, "5m07s"),
        (11_520_000_000_000, "3h12m"),
        (187_200_000_000_000, "2d04h"),
        (-56_200, "-56.2 us"),
    ],
)
def test_ages_are_short_and_have_units(ns: int | None, shown: str) -> None:
    assert age(ns) == shown


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, "an unknown time"),
        (0, "0 ms"),
        (1_270_000, "1.3 ms"),
        (41_300_000, "41 ms"),
        (999_600_000, "1 s"),
        (3_210_000_000, "3.2 s"),
        (39 * SECOND, "39 s"),
        (119 * SECOND, "119 s"),
        (150 * SECOND, "2.5 min"),
        (300 * SECOND, "5 min"),
        (9000 * SECOND, "2.5 h"),
        (26 * 3600 * SECOND, "26 h"),
    ],
)
def test_times_in_sentences_have_two_digits(ns: int | None, shown: str) -> None:
    assert time_text(ns) == shown


def test_times_are_utc() -> None:
    assert utc(1_700_000_000_000_000_007) == "2023-11-14T22:13:20.000000007Z"
    assert utc(-1) == "1969-12-31T23:59:59.999999999Z"
    assert utc_second(1_700_000_000_999_999_999) == "2023-11-14 22:13:20Z"
    # What is beyond the calendar stays a number.
    assert [utc(number) for number in (1 << 68, 1 << 90)] == [str(1 << 68), str(1 << 90)]


def test_numbers_and_shares() -> None:
    assert [percent(n) for n in (None, float("nan"), 97.4, 210)] == ["-", "-", "97%", "210%"]
    assert [share_text(n) for n in (None, 0.974, 0)] == ["-", "97%", "0%"]
    assert share_text(0.9, 2) == "90.00%"
    assert [count(n) for n in (None, 1234567, 0.5, 2.0)] == ["-", "1,234,567", "0.50", "2"]
    assert [plural(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [plural(n, "sample") for n in (0, 1, 1234)] == ["0 samples", "1 sample", "1,234 samples"]


def test_sets_of_ranks_are_spans() -> None:
    assert [numbers_text(n) for n in ([3, 0, 1, 2, 7], [5], [1, 1, 0], [None, 1, 2], [])] == [
        "0-3,7",
        "5",
        "0-1",
        "1-2,?",
        "",
    ]
    assert numbers_text(range(0, 40, 2), most=3) == "0,2,4,…"
    assert [ranks_of(n) for n in ([2, 2], [0, 1], [None], range(0, 100, 2))] == [
        "rank 2",
        "ranks 0-1",
        "rank ?",
        "ranks 0,2,4,6,8,10,12,14,16,18,20,22,…",
    ]


@given(st.sets(st.integers(0, 60)))
def test_spans_name_each_number_once(numbers: set[int]) -> None:
    spans = [span.split("-") for span in numbers_text(numbers).split(",") if span]
    named = [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]
    assert named == sorted(numbers)


def test_lists_end_with_and() -> None:
    assert [listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert listed("abcdefghij") == "a, b, c, d, e, f, g and 3 more"


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_sql_takes_any_text_and_name(text: str) -> None:
    plain = text.replace("\0", "")
    assert duckdb.sql(f"SELECT {sql_text(text)}").fetchall() == [(plain,)]
    if plain == text and text:
        assert duckdb.sql(f"SELECT 1 AS {sql_name(text)}").columns == [text]


def test_a_table_is_named_with_its_schema() -> None:
    assert sql_table("comm.ops") == '"comm"."ops"'
    assert sql_table('a"b') == '"a""b"'
