"""Redaction of a bug report: a name is the same token everywhere, and a word that is not ours never stays."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ProbingError
from probing.client.bugreport import gather
from probing.client.bugreport.redaction import Kind, Redactor, separated, vocabulary

CANARY = "kanarien7q3x"


@pytest.fixture
def redactor() -> Redactor:
    return Redactor(vocabulary())


OURS = st.sampled_from(["collector", "12.5s", "/proc/7/maps", "rank", "10.0.0.7:9000", "libtorch_cpu.so", "user", "="])
AROUND = st.text(st.sampled_from("/.:=,-_@ \"'()[]{}<>|;\\\n\t\x1b\0+*…%&~#"), max_size=4)


@given(st.lists(st.tuples(OURS, AROUND)), AROUND, AROUND, st.lists(st.tuples(AROUND, OURS)), st.booleans())
def test_no_text_keeps_a_word_that_is_not_ours(
    first: list[tuple[str, str]], before: str, behind: str, last: list[tuple[str, str]], known: bool
) -> None:
    text = "".join(map("".join, first)) + before + CANARY + behind + "".join(map("".join, last))
    redactor = Redactor(vocabulary())
    if known:
        redactor.token(Kind.JOB, before + CANARY + behind)
    assert CANARY not in redactor.text(text)
    assert all(CANARY not in str(redactor.value(kind, text)) for kind in Kind if kind is not Kind.PLAIN)
    assert CANARY in str(redactor.names)


@given(st.text())
def test_taken_apart_and_joined_a_text_is_the_same(text: str) -> None:
    assert "".join("".join(parts) for parts in separated(text)) == text


def test_a_name_is_the_same_token_in_columns_and_texts(redactor: Redactor) -> None:
    job, host = redactor.token(Kind.JOB, "night run, 2nd"), redactor.token(Kind.HOST, "gx17.example.org")
    assert redactor.text("rank 3 of night run, 2nd waits on gx17: gx17.example.org:9000") == (
        f"rank 3 of {job} waits on {host}: {host}:9000"
    )
    assert redactor.text("xnight run, 2ndx") == "name-1"
    assert redactor.value(Kind.HOSTS, "gx17.example.org,other") == f"{host},host-2"
    assert redactor.token(Kind.JOB, "night run, 2nd") == job
    assert redactor.names[job] == "night run, 2nd"
    assert redactor.counts == {"job": 1, "host": 2, "name": 1}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the ring was full: 12 records lost in 3.5 s", None),
        ("libtorch_cpu.so of process 4312 cannot be read: Permission denied", None),
        ("/proc/12/maps, /sys/kernel/btf/vmlinux", None),
        ("2026-11-24T02:12:07.123Z probingd-service: Main process exited, code=killed, status=9/KILL", None),
        ("probingd-collector.service: Failed with result 'watchdog'.", None),
        ("in /home/zoe17/libtorch_cpu.so", "in path-1/libtorch_cpu.so"),
        ('File "/opt/zoe17/lib/probing/daemon/store/store.py", line 7', 'File "probing/daemon/store/store.py", line 7'),
        ("--password=hunter2 zoe17@mx1:/srv", "--password=name-1 name-2@name-3:path-1"),
        ("host-17 of job-3 in path-5", "name-1 of name-2 in name-3"),
        ("fe80::1:2:3, https://hooks.example.org/T0", "address-1, address-2"),
        ("/proc/12/root/home/zoe17", "path-1"),
    ],
)
def test_words_of_ours_stay(redactor: Redactor, text: str, shown: str | None) -> None:
    assert redactor.text(text) == (text if shown is None else shown)


def test_versions_that_the_daemon_reports_stay_in_texts(redactor: Redactor) -> None:
    assert redactor.text("Linux 6.12.94+deb13-qq64") == "Linux 6.12.94+name-1"
    redactor = Redactor(vocabulary())
    redactor.value(Kind.PLAIN, "6.12.94+deb13-qq64")
    assert redactor.text("Linux 6.12.94+deb13-qq64") == "Linux 6.12.94+deb13-qq64"
    assert redactor.value(Kind.VERSION, "3.13.1rc1") == "3.13.1rc1"
    assert redactor.value(Kind.VERSION, "3.13-qqz") == "name-1"


def test_the_journal_is_read_by_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no journal where tests run: a program in its place writes what it writes.
    entries = [
        {
            "__REALTIME_TIMESTAMP": "1790000000000000",
            "_SYSTEMD_UNIT": "probingd-reader@3-9.service",
            "PRIORITY": "6",
            "MESSAGE": "ready",
            "_CMDLINE": CANARY,
            "_HOSTNAME": CANARY,
        },
        {"__REALTIME_TIMESTAMP": "1790000001000000", "UNIT": "probingd.service", "MESSAGE": [111, 107, 255]},
        {"__REALTIME_TIMESTAMP": "x", "MESSAGE": "no time"},
    ]
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\ncat <<'E'\n" + "\n".join(map(json.dumps, entries)) + "\nno JSON\nE\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gather.journal() == [
        "2026-09-21T14:13:20.000000Z probingd-reader 6 ready",
        "2026-09-21T14:13:21.000000Z probingd  ok\ufffd",
    ]
    program.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(ProbingError, match="no line"):
        gather.journal()
    program.write_text("#!/bin/sh\necho denied >&2; exit 1\n")
    with pytest.raises(ProbingError, match="ended with 1: denied"):
        gather.journal()
