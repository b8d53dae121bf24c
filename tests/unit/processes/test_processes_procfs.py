"""Parsers of /proc: right on what kernels write, bounded and typed on anything else."""

from __future__ import annotations

import contextlib
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import CorruptTarget
from probing.daemon.processes.procfs import (
    clean_text,
    parse_cgroup,
    parse_cmdline,
    parse_environ,
    parse_maps,
    parse_memory,
    parse_stat,
    parse_status,
)

TAIL = b" S 7 7 7 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 3 0 130038 1 2 3"


def test_stat_of_a_name_full_of_brackets() -> None:
    stat = parse_stat(b"12 (a) S (b) R 9)" + TAIL)
    assert (stat.pid, stat.comm, stat.state, stat.ppid) == (12, b"a) S (b) R 9", "S", 7)
    assert (stat.threads, stat.start_ns, stat.kernel_thread) == (3, 1_300_380_000_000, False)


def test_own_files_parse() -> None:
    proc = Path("/proc/self")
    assert parse_stat((proc / "stat").read_bytes()).pid == os.getpid()
    assert parse_status((proc / "status").read_bytes())["Uid"][0] == os.getuid()
    mappings = parse_maps((proc / "maps").read_bytes())
    assert any(m.executable and m.path.startswith(b"/") and m.inode for m in mappings)
    assert all(a.end <= b.start for a, b in pairwise(mappings))


@pytest.mark.parametrize(
    ("line", "path", "deleted"),
    [
        (b"7f00-7f10 r-xp 00000000 fe:00 12 /lib/a b.so", b"/lib/a b.so", False),
        (b"7f00-7f10 r-xp 00000000 fe:00 12 /lib/a.so (deleted)", b"/lib/a.so", True),
        (b"7f00-7f10 r-xp 00000000 fe:00 12 /lib/a\\012b\\101.so", b"/lib/a\nb\\101.so", False),
        (b"7f00-7f10 rw-p 00000000 00:00 0 ", b"", False),
        (b"7f00-7f10 rw-p 00000000 00:00 0  [heap]", b"[heap]", False),
    ],
)
def test_maps_paths(line: bytes, path: bytes, deleted: bool) -> None:
    (mapping,) = parse_maps(line + b"\n")
    assert (mapping.path, mapping.deleted, mapping.start, mapping.end) == (path, deleted, 0x7F00, 0x7F10)


def test_maps_cut_in_the_middle_of_a_line() -> None:
    line = b"7f00-7f10 r-xp 00000000 fe:00 12 /lib/a.so\n"
    assert len(parse_maps(line * 3 + line[:9])) == 3
    assert len(parse_maps(line * 100, limit=7)) == 7
    with pytest.raises(CorruptTarget):
        parse_maps(b"nonsense\n" + line)


def test_environ_gives_only_what_is_allowed() -> None:
    data = b"RANK=1\0SECRET=x\0RANK=2\0WORLD_SIZE=" + b"9" * 9000 + b"\0BROKEN\0MASTER_ADDR=a\nb\x1b[31m\xff"
    found = parse_environ(data, {"RANK", "WORLD_SIZE", "MASTER_ADDR", "BROKEN"}, limit=16)
    assert found == {"RANK": "1", "WORLD_SIZE": "9" * 15 + "…", "MASTER_ADDR": "a\\nb\\x1b[31m\\xff"}


def test_cmdline() -> None:
    assert parse_cmdline(b"python3\0-c\0a\0b") == [b"python3", b"-c", b"a", b"b"]
    assert parse_cmdline(b"") == []
    assert parse_cmdline(b"title of mine\0\0\0") == [b"title of mine"]


def test_cgroup_paths_once() -> None:
    assert parse_cgroup(b"2:cpu:/a\n1:name=systemd:/a\n0::/b:c\n\nbad\n") == [b"/a", b"/b:c"]


@given(st.binary(max_size=2000))
def test_no_input_breaks_a_parser(data: bytes) -> None:
    for parse in (parse_stat, parse_status, parse_maps, parse_cgroup, parse_cmdline):
        with contextlib.suppress(CorruptTarget):
            parse(data)
    parse_environ(data, {"RANK"})


@given(st.binary(max_size=64).map(lambda comm: b"1 (" + comm + b")" + TAIL))
def test_any_name_parses(data: bytes) -> None:
    assert parse_stat(data).ppid == 7


@given(st.one_of(st.binary(max_size=500), st.text(max_size=200)), st.integers(2, 80))
def test_clean_text_is_printable_and_bounded(data: bytes | str, limit: int) -> None:
    text = clean_text(data, limit)
    assert len(text) <= limit
    text.encode()
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in text)


def test_memory_of_a_process() -> None:
    found = parse_memory(b"Name:\tVmRSS: 1 kB\nVmRSS:\t    1300 kB\nRssShmem:\t 7 kB\nVmSwap:\t      17 kB\n")
    assert (found["rss_bytes"], found["swap_bytes"], found["shmem_bytes"]) == (1300 * 1024, 17 * 1024, 7 * 1024)
    assert (found["peak_rss_bytes"], found["anon_bytes"]) == (None, None)
    found = parse_memory(Path("/proc/self/status").read_bytes())
    assert all(value is not None for value in found.values())
    assert (found["peak_rss_bytes"] or 0) >= (found["rss_bytes"] or 0) > 1 << 20


@given(st.binary(max_size=200))
def test_memory_of_any_bytes_is_numbers_or_nothing(rest: bytes) -> None:
    assert all(value is None or value >= 0 for value in parse_memory(b"VmRSS:" + rest + b"\nVmSwap: -7 kB\n").values())
