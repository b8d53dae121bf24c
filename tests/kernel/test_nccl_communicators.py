"""Communicators from their making to their end, on the double of libnccl: each call that makes one is recorded."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collectives_support import Watcher, plain
from doubles.doubles import Doubles, build, compile_program, version_code
from waiting import DEADLINE_S

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.nccl_uprobes.operations.source import OBJECTS
from probing.daemon.source import Identity

PROGRAM = r"""
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "nccl_public.h"
#include "nccl_layout.h"
#include "nccl_double.h"
static ncclComm_t one, two, three[3], child, other;
static ncclUniqueId id;
static ncclConfig_t config;
static void reduce(ncclComm_t comm, int count)
{
	ncclAllReduce(&id, &id, count, ncclFloat32, ncclSum, comm, NULL);
}
static int run(const char *word)
{
	int devices[] = {2, 0, 1};
	ncclResult_t result = ncclSuccess;

	if (!strcmp(word, "init_rank"))
		return ncclCommInitRank(&one, 4, id, 2);
	if (!strcmp(word, "init_rank_config"))
		return ncclCommInitRankConfig(&two, 2, id, 1, &config);
	if (!strcmp(word, "init_wrong"))
		return ncclCommInitRank(&other, 4, id, 9);
	if (!strcmp(word, "init_all"))
		return ncclCommInitAll(three, 3, devices);
	if (!strcmp(word, "split"))
		return ncclCommSplit(one, 1, 5, &child, NULL);
	if (!strcmp(word, "split_none"))
		return ncclCommSplit(one, -1, 0, &other, NULL);
#if DOUBLE_VERSION >= 22300
	if (!strcmp(word, "init_rank_scalable"))
		return ncclCommInitRankScalable(&other, 6, 3, 1, &id, &config);
#endif
#if DOUBLE_VERSION >= 22700
	int excluded[] = {0};

	if (!strcmp(word, "shrink"))
		return ncclCommShrink(one, excluded, 1, &other, NULL, 0);
#endif
#if DOUBLE_VERSION >= 22902
	if (!strcmp(word, "grow"))
		return ncclCommGrow(one, 8, &id, -1, &other, NULL);
#endif
	if (!strcmp(word, "async_error")) {
		ncclDoubleAsyncError(one, 6);
		ncclCommGetAsyncError(one, &result);
		ncclCommGetAsyncError(one, &result);
		return result;
	}
	if (!strcmp(word, "async_ask"))
		return ncclCommGetAsyncError(one, &result);
	if (!strcmp(word, "finalize"))
		return ncclCommFinalize(one);
	if (!strcmp(word, "destroy"))
		return ncclCommDestroy(one);
	if (!strcmp(word, "abort"))
		return ncclCommAbort(two);
	if (!strcmp(word, "reduce")) {
		reduce(one, 3);
		return 0;
	}
	if (!strcmp(word, "empty")) {
		reduce(one, 0);
		return 0;
	}
	if (!strcmp(word, "group")) {
		ncclGroupStart();
		reduce(one, 4);
		reduce(one, 5);
		return ncclGroupEnd();
	}
	return -1;
}
int main(void)
{
	char line[64];

	ncclGetUniqueId(&id);
	config.size = sizeof(config);
	config.magic = 0xcafebeef;
	config.blocking = INT_MIN;
#if DOUBLE_VERSION >= 22700
	config.commName = "dp\033group";
#endif
	ncclDoubleDuration(0);
	while (scanf("%63s", line) == 1) {
		printf("%d\n", run(line));
		fflush(stdout);
	}
	return 0;
}
"""
KINDS = ("init_rank", "init_rank_config", "init_rank_scalable", "init_all", "split", "shrink", "grow")
SINCE = {"init_rank_scalable": 22300, "shrink": 22700, "grow": 22902}


class Program:
    """One process that is a rank, or all ranks, of communicators, and does one call a word."""

    def __init__(self, folder: Path) -> None:
        self.truth = folder / "truth.jsonl"
        environ = {"NCCL_DOUBLE_TRUTH": str(self.truth), "LD_LIBRARY_PATH": str(folder)}
        self.process = subprocess.Popen(
            [folder / "program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def do(self, *words: str) -> list[int]:
        """What each call gave."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n".join(words) + "\n")
        self.process.stdin.flush()
        return [int(self.process.stdout.readline()) for _ in words]

    def made(self) -> list[dict[str, Any]]:
        events = [json.loads(line, strict=False) for line in self.truth.read_text().splitlines()]
        return [event for event in events if event["event"] == "made"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


class OneRank:
    """``Processes`` that knows all."""

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job0", "run", "trainer", 5, 1, 8, 0)


class Both(Watcher):
    """The ring of communicators too; their roles, which follow from operations, are not looked at here."""

    def reported(self) -> list[dict[str, Any]]:
        ring = self.session.rings["communicators"]
        drained = ring.drain()
        batches = self.source.assemble_communicators(drained.records, SystemClock().pair())
        ring.commit(drained.position)
        return plain(batches["comm.communicators"]) if batches else []


Start = Callable[[str, str], tuple[Program, Doubles]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Program] = []

    def make(version: str, variant: str) -> tuple[Program, Doubles]:
        doubles = build(tmp_path, version, variant)
        source = tmp_path / "program.c"
        source.write_text(PROGRAM)
        compile_program(doubles, source, tmp_path / "program")
        started.append(Program(tmp_path))
        return started[-1], doubles

    yield make
    for program in started:
        program.close()


def watch(open_session: Callable[..., Session]) -> Both:
    return Both(open_session(*OBJECTS), OneRank())


@pytest.mark.parametrize(
    ("version", "variant"),
    [("2.18.3", "stripped"), ("2.24.3", "dwarf"), ("2.27.5", "stripped"), ("2.30.7", "no_dwarf")],
)
def test_each_call_that_makes_one_tells_of_it(
    version: str, variant: str, start: Start, open_session: Callable[..., Session]
) -> None:
    program, doubles = start(version, variant)
    watcher = watch(open_session)
    watcher.attach(doubles.nccl)
    kinds = [kind for kind in KINDS if version_code(version) >= SINCE.get(kind, 0)]
    assert program.do(*kinds) == [0] * len(kinds)
    rows = watcher.reported()
    truth = program.made()
    assert [row["made_by"] for row in rows] == [made["made_by"] for made in truth]
    readable = version != "2.18.3"
    for row, made in zip(rows, truth, strict=True):
        assert (row["state"], row["identity"]) == ("active", expected_identity(made["made_by"], readable)), made
        if row["identity"] in ("struct", "unique_id"):
            assert (row["comm"], row["rank"], row["size"]) == (made["comm"], made["rank"], made["size"])
        assert row["name"] == (made["name"].replace("\x1b", r"\x1b") or None)
        assert row["init_ns"] > 0
        if made["made_by"] in ("split", "shrink", "grow"):
            assert row["parent"] == made["parent"]
        if made["made_by"].startswith("init_rank"):
            assert row["root_address"] == "127.0.0.1:29999"
    (split,) = (row for row in rows if row["made_by"] == "split")
    assert split["color"] == 1
    devices = [row["cuda_device"] for row in rows if row["made_by"] == "init_all"]
    assert devices == [2, 0, 1]
    if readable:
        assert {row["bus_id"] for row in rows if row["made_by"] == "init_rank"} == {"0000:17:00.0"}
        assert {(row["node_index"], row["nodes"], row["aborted"]) for row in rows} == {(0, 1, False)}


def expected_identity(made_by: str, readable: bool) -> str:
    if readable:
        return "struct"
    if made_by.startswith("init_rank"):
        return "unique_id"
    return "derived" if made_by == "split" else "none"


@pytest.mark.parametrize("version", ["2.18.3", "2.27.5"])
def test_what_is_not_made_is_no_communicator(version: str, start: Start, open_session: Callable[..., Session]) -> None:
    program, doubles = start(version, "stripped")
    watcher = watch(open_session)
    watcher.attach(doubles.nccl)
    assert program.do("init_wrong", "init_rank", "split_none", "split") == [4, 0, 0, 0]
    rows = watcher.reported()
    assert [(row["state"], row["made_by"]) for row in rows] == [
        ("failed", "init_rank"),
        ("active", "init_rank"),
        ("active", "split"),
    ]
    assert rows[0]["comm"] == rows[1]["comm"]


@pytest.mark.parametrize("version", ["2.18.3", "2.30.7"])
def test_its_end_and_its_errors(version: str, start: Start, open_session: Callable[..., Session]) -> None:
    program, doubles = start(version, "no_dwarf")
    watcher = watch(open_session)
    watcher.attach(doubles.nccl)
    program.do("init_rank", "init_rank_config", "async_ask")
    assert [row["made_by"] for row in watcher.reported()] == ["init_rank", "init_rank_config"]
    program.do("async_error", "finalize", "destroy", "abort")
    rows = watcher.reported()
    assert [(row["state"], row["made_by"], row["async_error"]) for row in rows] == [
        ("active", "init_rank", "ncclRemoteError"),
        ("finalized", "init_rank", "ncclRemoteError"),
        ("destroyed", "init_rank", "ncclRemoteError"),
        ("aborted", "init_rank_config", None),
    ]
    # The address of the first is free, and whoever is there next is another one.
    program.do("init_rank", "reduce", "empty", "reduce")
    (row,) = watcher.reported()
    assert (row["state"], row["async_error"]) == ("active", None)
    assert [row["seq"] for row in watcher.rows()] == [0, None, 1]


@pytest.mark.parametrize(("version", "base"), [("2.24.3", None), ("2.30.7", 2)])
def test_one_that_was_there_before_us(
    version: str, base: int | None, start: Start, open_session: Callable[..., Session]
) -> None:
    program, doubles = start(version, "no_dwarf")
    assert program.do("init_rank", "reduce", "reduce") == [0, 0, 0]
    watcher = watch(open_session)
    watcher.attach(doubles.nccl)
    assert watcher.reported() == []
    program.do("async_ask")
    (row,) = watcher.reported()
    assert (row["state"], row["made_by"], row["identity"]) == ("active", None, "struct")
    assert (row["comm"], row["rank"], row["size"]) == (program.made()[0]["comm"], 2, 4)
    program.do("group", "reduce", "empty", "group")
    found = [(row["count"], row["seq"]) for row in watcher.rows()]
    # In a group, the library's own count is behind; afterwards it has all.
    known = [None] * 3 if base is None else [base + 2, base + 3, base + 4]
    assert found == [(4, None), (5, None), (3, known[0]), (0, None), (4, known[1]), (5, known[2])]
    assert watcher.reported() == []


def test_one_of_an_unknown_build_is_named_when_its_layout_comes(
    start: Start, open_session: Callable[..., Session]
) -> None:
    program, doubles = start("2.27.5", "stripped")
    program.do("init_rank")
    watcher = watch(open_session)
    layouts = watcher.session.maps["nccl_layouts"]
    _, written = layouts.items()
    table = [bytes(entry) for entry in written]
    for index in range(len(table)):
        layouts.update(index, bytes(len(table[0])))
    watcher.attach(doubles.nccl)
    program.do("reduce")
    (row,) = watcher.reported()
    assert (row["comm"], row["identity"]) == (None, "none")
    for index, entry in enumerate(table):
        layouts.update(index, entry)
    program.do("reduce")
    (row,) = watcher.reported()
    assert (row["comm"], row["identity"]) == (program.made()[0]["comm"], "struct")
    comm = program.made()[0]["comm"]
    assert [row["comm"] for row in watcher.rows()] == [None, comm]
