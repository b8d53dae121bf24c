"""A build of NCCL that the table lacks: its communicators are read once its layout was found in its own DWARF."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collectives_support import Watcher
from waiting import until

from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.layouts.from_dwarf import nccl_layout
from probing.daemon.nccl_uprobes.operations.source import OBJECTS
from probing.daemon.source import Identity

# enum communicator_event and communicator_identity
SEEN, IDENTITY_STRUCT = 1, 1
HASH = 0x5EED0FA11C0FFEE5
LIBRARY = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
struct ncclComm {
	uint64_t startMagic;
	char pad[12345];
	uint64_t commHash;
	int rank, nRanks, cudaDev, nvmlDev;
	int64_t busId;
	int node, nNodes;
	uint64_t endMagic;
};
extern int enqueue(void);
struct ncclComm *make(uint64_t hash)
{
	struct ncclComm *comm = calloc(1, sizeof(*comm));
	comm->startMagic = comm->endMagic = 0x0280028002800280;
	comm->commHash = hash;
	comm->rank = 5, comm->nRanks = 8, comm->cudaDev = 3, comm->nvmlDev = 3;
	comm->busId = 0xab000, comm->node = 1, comm->nNodes = 2;
	return comm;
}
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, struct ncclComm *c, void *q)
{
	return enqueue() + 1;
}
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, struct ncclComm *c, void *q)
{
	return enqueue() + 1;
}
int ncclGroupStart(void) { return enqueue() + 1; }
int ncclGroupEnd(void) { return enqueue() + 1; }
"""
CALLER = r"""
#include <stdio.h>
#include <stdint.h>
#include <stddef.h>
void *make(uint64_t hash);
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, void *c, void *q);
int enqueue(void) { return 0; }
int main(void)
{
	void *comm = make(HASH);
	int count;

	while (scanf("%d", &count) == 1) {
		for (int i = 0; i < count; i++)
			ncclAllReduce(0, 0, 10, 7, 0, comm, (void *)0x5150);
		puts("done");
		fflush(stdout);
	}
	return 0;
}
"""


class Anybody:
    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job0", "run", "trainer", 5, 1, 8, 0)


class DirectParser:
    """The parser's part, here."""

    def call(self, op: str, *, fds: list[int], timeout: float, known: list[str]) -> dict[str, Any]:
        assert op == "nccl_layout"
        return {**nccl_layout(fds[0]), "known": False}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "library.c").write_text(LIBRARY)
    path = tmp_path / "libnccl.so.2"
    flags = ["-g", "-O1", "-w", "-shared", "-fPIC", "-Wl,--build-id=sha1"]
    subprocess.run(["cc", *flags, "-o", path, tmp_path / "library.c"], check=True)
    return path


class Caller:
    def __init__(self, folder: Path, library: Path) -> None:
        (folder / "caller.c").write_text(CALLER)
        link = [f"-DHASH={HASH}", "-rdynamic", str(folder / "caller.c"), str(library), f"-Wl,-rpath,{folder}"]
        subprocess.run(["cc", "-O1", "-w", "-o", folder / "caller", *link], check=True)
        self.process = subprocess.Popen([folder / "caller"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, count: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def caller(tmp_path: Path, library: Path) -> Iterator[Caller]:
    made = Caller(tmp_path, library)
    yield made
    made.process.communicate()


def test_a_communicator_is_known_from_when_its_layout_is(
    library: Path, caller: Caller, open_session: Callable[..., Session]
) -> None:
    session = open_session(*OBJECTS)
    watcher = Watcher(session, Anybody())
    watcher.attach(library)
    finder = LayoutFinder(DirectParser(), session.maps["nccl_layouts"])
    finder.start()
    ring = session.rings["communicators"]
    try:
        caller.call(2)
        before = ring.drain()
        assert not [r for r in before.records if r["identity"] == IDENTITY_STRUCT]
        ring.commit(before.position)
        fd = os.open(library, os.O_RDONLY)
        finder.attach(fd)
        os.close(fd)
        until(lambda: finder.added)
    finally:
        finder.stop()
    caller.call(3)
    known = until(lambda: [r for r in ring.drain().records if r["identity"] == IDENTITY_STRUCT])
    (record,) = known
    assert (record["event"], record["hash"]) == (SEEN, HASH)
    assert (record["rank"], record["size"], record["cuda_device"]) == (5, 8, 3)
    assert (record["node"], record["nodes"], record["bus_id"]) == (1, 2, 0xAB000)
    assert record["comm"] != 0
