"""A reader's answer about CPU counters, from trees of files as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from probing.daemon.host.cpu import reading
from probing.daemon.host.cpu.reading import GLANCE, PROCESS, THREAD, UsageReader
from probing.daemon.host.cpu.task_files import ABSENT, parse_run_times, parse_stat_line, parse_status_lines
from probing.daemon.host.cpu.usage import rows_of
from tests.host_support import FakeProc, group_tree

START = 100 * 10_000_000
# Linux 2.6.32 to 3.2 of a distribution, 4.18 and 6.18; the last fields were added one after the other.
OLD = b"4711 (python) R 1 4711 4711 0 -1 4202496 907 0 3 0 17 5 0 0 20 0 1 0 19 104857600 211 18446744073709551615" + (
    b" 1 1 0 0 0 0 0 16781312 2 0 0 0 17 3 0 0 0 0 0\n"
)
NEW = OLD.rstrip() + b" 94 95 96 97 98 99 100 0\n"


@pytest.mark.parametrize("line", [OLD, NEW])
def test_the_stat_of_old_and_new_kernels(line: bytes) -> None:
    stat = parse_stat_line(line)
    assert stat is not None
    assert (stat.comm, stat.state, stat.user_ns, stat.sys_ns) == (b"python", ord("R"), 170_000_000, 50_000_000)
    assert (stat.major_faults, stat.threads, stat.start_ns, stat.processor) == (3, 1, 190_000_000, 3)
    assert stat.rss_bytes == 211 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", [b"a) R 1 2 3", b"((((", b"))))", b"\n) S 9\n", b"\xff\xfe\x1b[31m", b""])
def test_a_hostile_name_changes_no_number(name: bytes) -> None:
    stat = parse_stat_line(OLD.replace(b"(python)", b"(" + name + b")"))
    assert stat is not None
    assert (stat.comm, stat.user_ns, stat.processor) == (name, 170_000_000, 3)


@pytest.mark.parametrize(
    "line", [b"", b"1", b"1 (x", b"1 (x) R 1 2", OLD[:120], OLD.replace(b" 17 5 ", b" 17 y "), b"9" * 5000]
)
def test_a_stat_that_is_cut_or_no_stat_is_none(line: bytes) -> None:
    assert parse_stat_line(line) is None


def test_numbers_that_are_too_large_are_bounded() -> None:
    stat = parse_stat_line(OLD.replace(b" 17 5 ", b" " + b"9" * 19 + b" 5 "))
    assert stat is not None
    assert stat.user_ns == (1 << 63) - 1


def test_a_status_without_lines_has_no_values() -> None:
    assert parse_status_lines(b"Name:\tx\n") == (ABSENT, ABSENT, b"")
    text = b"Name:\tx\\nvoluntary_ctxt_switches:\t9\nCpus_allowed_list:\t0-3,8\nvoluntary_ctxt_switches:\t12\n"
    assert parse_status_lines(text) == (12, ABSENT, b"0-3,8")


def test_schedstat_of_a_kernel_without_it_is_absent() -> None:
    assert parse_run_times(b"") == (ABSENT, ABSENT)
    assert parse_run_times(b"x y z") == (ABSENT, ABSENT)
    assert parse_run_times(b"17 19 23\n") == (17, 19)


def ask(reader: UsageReader, **request: Any) -> tuple[list[dict[str, int]], dict[str, Any]]:
    answer = reader.answer(request)
    rows = rows_of(answer.payload)
    names = rows.dtype.names
    assert names is not None
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()], answer.header


def test_processes_threads_and_glances_in_one_answer(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.process(11, user=17, sys=5, threads=2, rss=3, voluntary=7, involuntary=2, state="D", wchan="io_schedule")
    proc.thread(11, 11, user=17, exec_ns=170_000_003, delay_ns=11, state="D", wchan="io_schedule")
    proc.thread(11, 12, name=b"loader", exec_ns=5, delay_ns=13)
    proc.process(13, user=19)
    rows, header = ask(
        UsageReader(str(proc)), targets=[[11, START, True, True, [11], [12]]], glances=[13, 14], pids=True
    )
    process, main, loader, glance = rows
    names = header["texts"]
    assert [row["scope"] for row in rows] == [PROCESS, THREAD, THREAD, GLANCE]
    assert (process["user_ns"], process["sys_ns"], process["threads"]) == (170_000_000, 50_000_000, 2)
    assert (process["voluntary"], process["involuntary"], names[process["cpus"]]) == (7, 2, "0-3")
    assert (chr(process["state"]), names[process["wchan"]]) == ("D", "io_schedule")
    assert (main["tid"], main["exec_ns"], main["run_delay_ns"], names[main["wchan"]]) == (
        11,
        170_000_003,
        11,
        "io_schedule",
    )
    assert (loader["tid"], loader["run_delay_ns"], loader["state"], loader["comm"]) == (12, 13, ABSENT, ABSENT)
    assert (glance["pid"], glance["user_ns"], glance["comm"]) == (13, 190_000_000, ABSENT)
    assert (header["threads"], header["pids"]) == ({"11": [11, 12]}, [11, 13])


def test_no_more_threads_are_listed_than_an_answer_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LISTED", 3)
    proc = FakeProc(tmp_path / "proc")
    for pid in (11, 13, 17):
        proc.process(pid)
        for tid in (pid, pid + 1):
            proc.thread(pid, tid)
    targets = [[pid, START, False, True, [], []] for pid in (11, 13, 17)]
    assert ask(UsageReader(str(proc)), targets=targets)[1]["threads"] == {"11": [11, 12], "13": [13, 14]}


def test_another_life_of_a_pid_is_not_read(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.process(11, start=101)
    assert ask(UsageReader(str(proc)), targets=[[11, START, True, True, [11], []]])[0] == []


def test_no_more_files_stay_open_than_allowed(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    for pid in range(1, 30):
        proc.process(pid)
    reader = UsageReader(str(proc), most_files=8)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        rows, _ = ask(reader, targets=[[pid, START, True, False, [], []] for pid in range(1, 30)])
        assert len(rows) == 29
    assert len(os.listdir("/proc/self/fd")) - before <= 8  # noqa: PTH208


def test_4096_processes_are_read_in_four_answers(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.process(1)
    for pid in range(2, 4_097):
        (proc.root / str(pid)).symlink_to("1")
    reader = UsageReader(str(proc))
    seen = 0
    for first in range(1, 4_097, 1_024):
        seen += len(ask(reader, glances=list(range(first, first + 1_024)), timeout_ms=30_000)[0])
    assert seen == 4_096
    assert len(ask(reader, pids=True)[1]["pids"]) == 4_096


V2 = {"cpu.max": "150000 100000\n", "cpu.stat": "usage_usec 9\nnr_periods 5\nnr_throttled 3\nthrottled_usec 17\n"}
V1 = {
    "cpu.cfs_quota_us": "150000\n",
    "cpu.cfs_period_us": "100000\n",
    "cpu.stat": "nr_throttled 3\nthrottled_time 17000\n",
}


@pytest.mark.parametrize(("version", "files"), [(2, V2), (1, V1)])
def test_throttling_of_both_versions_of_groups(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    mountinfo, member = group_tree(tmp_path / "cgroup", version, files)
    proc = FakeProc(tmp_path / "proc")
    (proc.root / "self" / "mountinfo").write_text(mountinfo)
    proc.process(11, cgroup=member)
    reader = UsageReader(str(proc))
    row = ask(reader, targets=[[11, START, True, False, [], []]])[0][0]
    assert (row["throttled"], row["throttled_ns"], row["quota_millis"]) == (3, 17_000, 1_500)
    for name in files:
        (tmp_path / "cgroup" / "job" / "rank" / name).unlink()
    row = ask(reader, targets=[[11, START, True, False, [], []]])[0][0]
    assert (row["throttled"], row["throttled_ns"], row["quota_millis"]) == (ABSENT, ABSENT, ABSENT)
