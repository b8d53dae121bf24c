"""--since, --until and lengths: what people type, and every form in which a screen prints a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ConfigError, UsageError
from probing.api.text import age, time_text, utc
from probing.client import zone
from probing.client.times import Bound, Interval, bound, interval, seconds
from probing.client.zone import clock, clock_ms, moment, now_text, when, zone_of

SECOND = 1_000_000_000
NOW = round(datetime(2026, 11, 28, 0, 5, 0, tzinfo=timezone.utc).timestamp()) * SECOND
ZONES = ("UTC", "Asia/Shanghai", "America/St_Johns", "+08:00", "-03:30")


@pytest.fixture(autouse=True)
def utc_again() -> Iterator[None]:
    zone.use("UTC")
    yield
    zone.use("UTC")


def at(text: str, now: int = NOW) -> str:
    """Returns the instant that ``text`` names, in UTC."""
    found = bound(text, now).at_ns
    assert found is not None
    return utc(found)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("5", 5.0),
        ("500ms", 0.5),
        ("30s", 30.0),
        ("1.5h", 5400.0),
        ("5m07s", 307.0),
        ("3h12m", 11520.0),
        ("2d04h", 187200.0),
        ("39 s", 39.0),
        ("5 min", 300.0),
        ("812 us", 812e-6),
        (" 2h ", 7200.0),
    ],
)
def test_lengths(text: str, length: float) -> None:
    assert seconds(text) == pytest.approx(length)
    assert bound(text).ago_s == pytest.approx(length)


@given(st.integers(1000, 300 * 86400 * SECOND))
def test_every_length_that_a_screen_prints_is_read(ns: int) -> None:
    # As exact as each is printed.
    for text, exact in ((age(ns), 1e3), (time_text(ns), 1e5)):
        if text != "0 ms":
            assert seconds(text) * 1e9 == pytest.approx(ns, rel=0.07, abs=exact)


@given(st.integers(0, 4_000_000_000 * SECOND), st.sampled_from(ZONES))
def test_every_instant_that_a_screen_prints_is_read(ns: int, name: str) -> None:
    zone.use(name)
    assert bound(utc(ns)).at_ns == ns
    assert abs((bound(moment(utc(ns))).at_ns or 0) - ns) < 1_000_000
    assert bound(when(utc(ns))).at_ns == ns // SECOND * SECOND
    # A time of day is that of today, or of the day before.
    now = ns + 5 * SECOND
    assert bound(clock_ms(utc(ns)), now).at_ns == ns // 10**6 * 10**6


@pytest.mark.parametrize("name", ZONES)
def test_the_clock_on_the_screen_is_read(name: str) -> None:
    zone.use(name)
    before = time.time_ns() // SECOND
    printed = now_text()
    read = bound(printed).at_ns
    assert read is not None
    assert before <= read // SECOND <= time.time_ns() // SECOND
    assert clock(utc(read)) == printed


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-11-27", "2026-11-27T00:00:00.000000000Z"),
        ("2026-11-27 13:05", "2026-11-27T13:05:00.000000000Z"),
        ("2026-11-27T13:05:12.123456789Z", "2026-11-27T13:05:12.123456789Z"),
        ("2026-11-27T13:05:12,5+08:00", "2026-11-27T05:05:12.500000000Z"),
        ("2026-11-27 13:05:12+0800", "2026-11-27T05:05:12.000000000Z"),
        ("13:05:12Z", "2026-11-27T13:05:12.000000000Z"),
        ("00:04", "2026-11-28T00:04:00.000000000Z"),
        ("00:05:30", "2026-11-28T00:05:30.000000000Z"),
        ("13:05:12.123", "2026-11-27T13:05:12.123000000Z"),
        ("08:04:00+08:00", "2026-11-28T00:04:00.000000000Z"),
        ("09:04:00+08:00", "2026-11-27T01:04:00.000000000Z"),
    ],
)
def test_instants(text: str, instant: str) -> None:
    assert at(text) == instant


def test_an_instant_without_zone_is_one_of_the_zone_in_use() -> None:
    zone.use("Asia/Shanghai")
    assert at("08:04") == "2026-11-28T00:04:00.000000000Z"
    assert at("08:30") == "2026-11-27T00:30:00.000000000Z"
    assert at("2026-11-28 02:10") == "2026-11-27T18:10:00.000000000Z"
    assert when("2026-11-27T18:10:00.000000000Z") == "2026-11-28 02:10:00+08:00"
    assert clock_ms("2026-11-27T18:10:00.123456789Z") == "02:10:00.123+08:00"
    assert moment("2026-11-27T18:10:00.123456789Z") == "2026-11-28 02:10:00.123+08:00"
    # What is beyond the calendar stays as it is.
    assert when("99999999999999999999") == "99999999999999999999"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "soon",
            "",
            " ",
            "-5m",
            "5x",
            "1m 2026",
            "25:00",
            "12:61",
            "2026-13-01",
            "2026-02-30",
            "2026-11-27T",
            "T12:00",
        ),
        *("13:05:12+99:00", "400d", "0", "0s", "9999-99-99", "2026-11-27 13:05:12.1234567890Z", "١٢:٠٠", "٥m", "Z"),
    ],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        bound(text)


@given(st.text(max_size=40))
def test_any_text_is_a_time_or_an_error(text: str) -> None:
    try:
        found = bound(text)
    except UsageError:
        return
    assert found.sql()


def test_an_interval_is_a_condition() -> None:
    assert interval("5m").sql() == "ts > now() - INTERVAL 300000 MILLISECOND"
    both = interval("2026-11-27T02:00Z", "2026-11-27T02:20Z")
    assert both.sql("opened") == (
        "opened >= make_timestamp_ns(1795744800000000000) AND opened <= make_timestamp_ns(1795746000000000000)"
    )
    assert both.text() == "from 2026-11-27 02:00:00Z until 2026-11-27 02:20:00Z"
    assert interval("2h", "1h").text() == "from 2h00m ago until 1h00m ago"
    assert (interval("90").text(), interval("90").open) == ("in the last 1m30s", True)
    assert not interval("2h", "now").open
    dates = ("2026-11-27", "2026-11-26")
    for since, until in (("5m", "10m"), ("5m", "5m"), dates, ("5m", "2020-01-01"), ("now", "1h")):
        with pytest.raises(UsageError, match="is not after"):
            interval(since, until)
    assert Interval(Bound(60.0).earlier(30.0)).sql() == "ts > now() - INTERVAL 90000 MILLISECOND"


@pytest.mark.parametrize("name", ["Mars/Base", "../../etc/passwd", "/etc/localtime", "Asia", "+25:00", "\0", "x" * 999])
def test_a_zone_that_does_not_exist_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match="is not a time zone"):
        zone.use(name)


def test_the_zone_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Mars/Base")
    with pytest.raises(UsageError, match="TZ=Mars/Base is not a time zone"):
        zone.use("local")
    for name in ("Asia/Shanghai", ":Asia/Shanghai", "CST-8", "<+08>-8"):
        monkeypatch.setenv("TZ", name)
        time.tzset()
        zone.use("local")
        assert at("08:04") == "2026-11-28T00:04:00.000000000Z", name
        assert when("2026-11-27T18:10:00Z") == "2026-11-28 02:10:00+08:00", name
    monkeypatch.undo()
    time.tzset()


def test_the_configuration_names_the_zone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert zone_of(None) == "UTC"
    file = tmp_path / "probing" / "client.toml"
    file.parent.mkdir()
    file.write_text('tz = "Asia/Shanghai"\n')
    assert (zone_of(None), zone_of("local")) == ("Asia/Shanghai", "local")
    for text, problem in (
        ('tzz = "UTC"', "there is no setting tzz"),
        ("tz = 8", "tz is not a string"),
        ("tz =", "is not TOML"),
        ("\xff", "is not TOML"),
    ):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=problem):
            zone_of(None)
    # AND neither a folder in its place nor a home that is missing is a crash, nor is another user's home an error
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        zone_of(None)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME")
    assert zone_of(None) == "UTC"
