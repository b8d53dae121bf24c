"""NCCL's public calls, counted on a library with its ABI that is built here and needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from collectives_support import Watcher, both_ways

from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.layouts.nccl import ABSENT, NCCL_LAYOUTS, NcclLayout
from probing.daemon.nccl_uprobes.operations.source import OBJECTS
from probing.daemon.source import Identity

# Signatures: nccl.h of NCCL 2.28, struct ncclInfo: src/include/info.h. The call out gives each function a prologue as
# the real ones have.
LIBRARY = r"""
#include <stddef.h>
typedef void *comm_t;
typedef void *stream_t;
struct info {
	int coll;
	const char *name;
	const void *send;
	void *receive;
	size_t count;
	int dtype, op, root;
	comm_t comm;
	stream_t stream;
	char rest[64];
};
extern int enqueue(void);
extern int check(struct info *) __asm__("_Z16ncclEnqueueCheckP8ncclInfo") __attribute__((visibility("hidden")));
__attribute__((noipa)) int check(struct info *info) { return enqueue() + (info->comm ? 1 : 4); }
#define ENQUEUE(...) ({ struct info info = {__VA_ARGS__}; check(&info) + 1; })
#define ALIAS(name) extern __typeof__(name) p##name __attribute__((alias(#name)));
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, comm_t c, stream_t q) { return ENQUEUE(4, "AllReduce", s, r, n, t, op, 0, c, q); }
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, comm_t c, stream_t q) { return ENQUEUE(3, "ReduceScatter", s, r, n, t, op, 0, c, q); }
int ncclAllGather(const void *s, void *r, size_t n, int t, comm_t c, stream_t q) { return ENQUEUE(2, "AllGather", s, r, n, t, 0, 0, c, q); }
int ncclAlltoAll(const void *s, void *r, size_t n, int t, comm_t c, stream_t q) { return ENQUEUE(8, "AlltoAll", s, r, n, t, 0, 0, c, q); }
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, comm_t c, stream_t q) { return ENQUEUE(0, "Broadcast", s, r, n, t, 0, root, c, q); }
int ncclBcast(void *b, size_t n, int t, int root, comm_t c, stream_t q)
{
	return ncclBroadcast(b, b, n, t, root, c, q);
}
int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, comm_t c, stream_t q) { return ENQUEUE(1, "Reduce", s, r, n, t, op, root, c, q); }
int ncclGather(const void *s, void *r, size_t n, int t, int root, comm_t c, stream_t q) { return ENQUEUE(10, "Gather", s, r, n, t, 0, root, c, q); }
int ncclScatter(const void *s, void *r, size_t n, int t, int root, comm_t c, stream_t q) { return ENQUEUE(9, "Scatter", s, r, n, t, 0, root, c, q); }
int ncclSend(const void *b, size_t n, int t, int peer, comm_t c, stream_t q) { return ENQUEUE(6, "Send", b, 0, n, t, 0, peer, c, q); }
int ncclRecv(void *b, size_t n, int t, int peer, comm_t c, stream_t q) { return ENQUEUE(7, "Recv", 0, b, n, t, 0, peer, c, q); }
int ncclAllReduceConfig(const void *s, void *r, size_t n, int t, int op, comm_t c, stream_t q, const void *config) { return ENQUEUE(4, "AllReduce", s, r, n, t, op, 0, c, q); }
int ncclReduceScatterConfig(const void *s, void *r, size_t n, int t, int op, comm_t c, stream_t q, const void *config) { return ENQUEUE(3, "ReduceScatter", s, r, n, t, op, 0, c, q); }
int ncclAllGatherConfig(const void *s, void *r, size_t n, int t, comm_t c, stream_t q, const void *config) { return ENQUEUE(2, "AllGather", s, r, n, t, 0, 0, c, q); }
int ncclAlltoAllConfig(const void *s, void *r, size_t n, int t, comm_t c, stream_t q, const void *config) { return ENQUEUE(8, "AlltoAll", s, r, n, t, 0, 0, c, q); }
int ncclBroadcastConfig(const void *s, void *r, size_t n, int t, int root, comm_t c, stream_t q, const void *config) { return ENQUEUE(0, "Broadcast", s, r, n, t, 0, root, c, q); }
int ncclReduceConfig(const void *s, void *r, size_t n, int t, int op, int root, comm_t c, stream_t q, const void *config) { return ENQUEUE(1, "Reduce", s, r, n, t, op, root, c, q); }
int ncclGatherConfig(const void *s, void *r, size_t n, int t, int root, comm_t c, stream_t q, const void *config) { return ENQUEUE(10, "Gather", s, r, n, t, 0, root, c, q); }
int ncclScatterConfig(const void *s, void *r, size_t n, int t, int root, comm_t c, stream_t q, const void *config) { return ENQUEUE(9, "Scatter", s, r, n, t, 0, root, c, q); }
int ncclGroupStart(void) { return enqueue() + 1; }
int ncclGroupEnd(void) { return enqueue() + 1; }
int later(int coll, comm_t c, stream_t q) { return ENQUEUE(coll, "Later", 0, 0, 12, 7, 3, 2, c, q); }
ALIAS(ncclAllReduce)
ALIAS(ncclGroupEnd)
"""  # noqa: E501
ENQUEUE_CHECK = "_Z16ncclEnqueueCheckP8ncclInfo"
CALLER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "nccl_double.h"
int enqueue(void) { return 0; }
static char *make_comm(uint64_t hash, int rank, int size, int device)
{
	uint64_t magic = 0x0280028002800280;
	char *comm = memset(malloc(END_MAGIC + 8), 0, END_MAGIC + 8);
	int numbers[3] = {rank, size, device};
	memcpy(comm, &magic, 8);
	memcpy(comm + END_MAGIC, &magic, 8);
	memcpy(comm + COMM_HASH, &hash, 8);
	memcpy(comm + COMM_HASH + 8, numbers, sizeof(numbers));
	if (SEQ_NUMBER != -1u)
		((uint64_t *)(comm + SEQ_NUMBER))[1] = 100;
	return comm;
}
int main(void)
{
	char *comm = make_comm(0x00ab54a98ceb1f0a, 1, 4, 3), *strange = calloc(1, 4096);
	void *stream = (void *)0x5150;
	getchar();
	for (int i = 0; i < 23; i++)
		ncclAllReduce(comm, comm, 1000 + i, 7, 4, comm, stream);
	pncclAllReduce(comm, comm, 9, 9, 0, comm, stream);
	for (int i = 0; i < 7; i++)
		ncclBroadcast(comm, comm, 100, 6, 2, comm, stream);
	ncclBcast(comm, 101, 1, 3, comm, stream);
	ncclGroupStart();
	ncclGroupStart();
	for (int i = 0; i < 5; i++) {
		ncclSend(comm, 10, 8, 2, comm, stream);
		ncclRecv(comm, 11, 8, 3, comm, stream);
	}
	ncclGroupEnd();
	ncclReduceScatter(comm, comm, 13, 9, 2, comm, stream);
	ncclGroupEnd();
	ncclGroupStart();
	ncclAllGather(comm, comm, 17, 5, comm, stream);
	ncclGroupEnd();
	ncclReduce(comm, comm, 19, 4, 3, 1, comm, stream);
	ncclAlltoAll(comm, comm, 29, 7, comm, stream);
	ncclGather(comm, comm, 31, 7, 1, comm, stream);
	ncclScatter(comm, comm, 37, 7, 1, comm, stream);
	ncclScatter(comm, comm, 37, 7, 2, comm, stream);
	ncclAllReduce(strange, strange, 41, 7, 0, strange, 0);
	ncclAllReduce(strange, strange, 43, 7, 0, (comm_t)8, 0);
	puts("done");
	fflush(stdout);
	getchar();
	return 0;
}
"""
COMM = "00ab54a98ceb1f0a"


class Anybody:
    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job0", "run", "trainer", 5, 1, 8, 0)


def build(folder: Path, layout: NcclLayout, internal: bool = False, program: str = CALLER) -> tuple[Path, Path]:
    """(the library, a program that uses it); ``internal``: with the symbol of ncclEnqueueCheck."""
    declarations = "\n".join(
        line.split("{")[0].strip() + ";" for line in LIBRARY.splitlines() if re.match(r"int (nccl|later)", line)
    ).replace(";;", ";")
    header = f"#include <stddef.h>\ntypedef void *comm_t;\ntypedef void *stream_t;\n{declarations}\n"
    header += "extern __typeof__(ncclAllReduce) pncclAllReduce;\n"
    offsets = dict(zip(layout.offset_names(), layout.offsets, strict=True))
    header += "".join(f"#define {name.upper()} {offset}u\n" for name, offset in offsets.items())
    (folder / "nccl_double.h").write_text(header)
    (folder / "library.c").write_text(LIBRARY)
    (folder / "caller.c").write_text(program)
    library, caller = folder / "libnccl.so.2", folder / "caller"
    subprocess.run(["cc", "-O1", "-w", "-shared", "-fPIC", "-o", library, folder / "library.c"], check=True)
    if not internal:
        subprocess.run(["strip", f"--strip-symbol={ENQUEUE_CHECK}", library], check=True)
    link = ["-rdynamic", str(folder / "caller.c"), str(library), f"-Wl,-rpath,{folder}"]
    subprocess.run(["cc", "-O1", "-w", "-o", caller, *link], check=True)
    return library, caller


@pytest.mark.parametrize("internal", [True, False], ids=["enqueue_check", "public"])
@pytest.mark.parametrize("layout", NCCL_LAYOUTS[:: len(NCCL_LAYOUTS) // 3], ids=lambda layout: layout.version)
def test_calls_are_counted_with_their_arguments(
    layout: NcclLayout, internal: bool, tmp_path: Path, open_session: Callable[..., Session]
) -> None:
    library, caller = build(tmp_path, layout, internal)
    watcher = Watcher(open_session(*OBJECTS), Anybody())
    watcher.attach(library)
    subprocess.run([caller], input="\n\n", text=True, check=True, stdout=subprocess.DEVNULL)
    rows = watcher.rows()
    check_arguments(rows)
    check_what_cannot_be_seen(rows)
    check_groups(rows)
    check_sequence(rows, layout)


def check_sequence(rows: list[dict[str, Any]], layout: NcclLayout) -> None:
    """From the library's own count where it has one, and only of what it counts."""
    counted = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
    found = [row["seq"] for row in rows if row["comm"] and row["op"] in counted]
    assert found == (list(range(100, 100 + len(found))) if layout.seq_number != ABSENT else [None] * len(found))
    assert {row["seq"] for row in rows if row["comm"] is None or row["op"] not in counted} == {None}


def check_arguments(rows: list[dict[str, Any]]) -> None:
    known = [row for row in rows if row["comm"]]
    assert len(rows) == len(known) + 2
    assert {(row["comm"], row["comm_rank"], row["comm_size"], row["rank"]) for row in known} == {(COMM, 1, 4, 5)}
    fields = ("op", "dtype", "count", "bytes", "redop", "root", "peer")
    found = Counter(tuple(row[field] for field in fields) for row in known)
    assert found == Counter(
        {
            **{("all_reduce", "float32", 1000 + i, 4000 + 4 * i, "avg", None, None): 1 for i in range(23)},
            ("all_reduce", "bfloat16", 9, 18, "sum", None, None): 1,
            ("broadcast", "float16", 100, 200, None, 2, None): 7,
            ("broadcast", "uint8", 101, 101, None, 3, None): 1,
            ("send", "float64", 10, 80, None, None, 2): 5,
            ("recv", "float64", 11, 88, None, None, 3): 5,
            ("reduce_scatter", "bfloat16", 4 * 13, 4 * 26, "max", None, None): 1,
            ("all_gather", "uint64", 17, 136, None, None, None): 1,
            ("reduce", "int64", 19, 152, "min", 1, None): 1,
            ("all_to_all", "float32", 4 * 29, 4 * 116, None, None, None): 1,
            ("gather", "float32", 31, 124, None, 1, None): 1,
            ("scatter", "float32", 4 * 37, 4 * 148, None, 1, None): 1,
            ("scatter", "float32", 0, 0, None, 2, None): 1,
        }
    )


def check_what_cannot_be_seen(rows: list[dict[str, Any]]) -> None:
    assert {row["timing_source"] for row in rows} == {"enqueue_only"}
    unseen = ("state", "start_ns_after", "done_lo_ns", "done_hi_ns", "done_hi", "async_op", "error")
    assert {row[field] for row in rows for field in unseen} == {None}
    strange = [row for row in rows if row["comm"] is None]
    assert [(row["comm_size"], row["comm_rank"], row["bytes"]) for row in strange] == [
        (None, None, 164),
        (None, None, 172),
    ]
    assert {row["stream"] for row in rows} == {0x5150, 0}


def check_groups(rows: list[dict[str, Any]]) -> None:
    groups: dict[Any, list[str]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["op"])
    del groups[None]
    assert sorted(sorted(ops) for ops in groups.values()) == [
        ["all_gather"],
        ["recv"] * 5 + ["reduce_scatter"] + ["send"] * 5,
    ]


LATER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "nccl_double.h"
int enqueue(void) { return 0; }
int main(void)
{
	for (int coll = 0; coll < 18; coll++)
		later(coll, 0, 0);
	later(-1, 0, 0);
	return 0;
}
"""


def test_operations_of_later_versions_have_names_or_none(tmp_path: Path, open_session: Callable[..., Session]) -> None:
    library, caller = build(tmp_path, NCCL_LAYOUTS[0], internal=True, program=LATER)
    watcher = Watcher(open_session(*OBJECTS), Anybody())
    watcher.attach(library)
    subprocess.run([caller], check=True)
    rows = watcher.rows()
    names = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", None, "send", "recv", "all_to_all")
    assert [row["op"] for row in rows] == [
        *names,
        "scatter",
        "gather",
        "all_gather_v",
        "put_signal",
        "signal",
        "wait_signal",
        *[None] * 4,
    ]
    assert [row["op"] for row in rows if row["peer"] == 2] == ["send", "recv", "put_signal", "signal"]
    assert [row["op"] for row in rows if row["root"] == 2] == ["broadcast", "reduce", "scatter", "gather"]
    assert [row["op"] for row in rows if row["redop"] == "min"] == ["reduce", "reduce_scatter", "all_reduce"]


CONFIGURED = r"""
#include "nccl_double.h"
int enqueue(void) { return 0; }
#define BOTH(name, ...) (ncclCALL(name)(__VA_ARGS__), ncclCALL(name##Config)(__VA_ARGS__, (void *)8))
#define ncclCALL(name) nccl##name
int main(void)
{
	void *stream = (void *)0x5150, *comm = (void *)16;

	BOTH(AllReduce, 0, 0, 1, 7, 2, comm, stream);
	BOTH(ReduceScatter, 0, 0, 2, 7, 2, comm, stream);
	BOTH(AllGather, 0, 0, 3, 7, comm, stream);
	BOTH(AlltoAll, 0, 0, 4, 7, comm, stream);
	BOTH(Broadcast, 0, 0, 5, 7, 3, comm, stream);
	BOTH(Reduce, 0, 0, 6, 7, 2, 3, comm, stream);
	BOTH(Gather, 0, 0, 7, 7, 3, comm, stream);
	BOTH(Scatter, 0, 0, 8, 7, 3, comm, stream);
	return 0;
}
"""


@pytest.mark.parametrize("internal", [True, False])
def test_calls_with_a_configuration_are_seen_like_those_without(
    internal: bool, tmp_path: Path, open_session: Callable[..., Session]
) -> None:
    library, caller = build(tmp_path, NCCL_LAYOUTS[-1], internal=internal, program=CONFIGURED)
    watcher = Watcher(open_session(*OBJECTS), Anybody())
    watcher.attach(library)
    subprocess.run([caller], check=True)
    fields = ("op", "dtype", "redop", "root", "stream", "count")
    rows = [tuple(row[field] for field in fields) for row in watcher.rows()]
    ops = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
    reducing, rooted = ("all_reduce", "reduce_scatter", "reduce"), ("broadcast", "reduce", "gather", "scatter")
    assert rows[::2] == rows[1::2]
    assert [row[:-1] for row in rows[::2]] == [
        (op, "float32", "max" if op in reducing else None, 3 if op in rooted else None, 0x5150) for op in ops
    ]


REUSED = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "nccl_double.h"
int enqueue(void) { return 0; }
static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static void fill(char *comm, uint64_t hash, int rank, int size)
{
	uint64_t magic = 0x0280028002800280;
	int numbers[3] = {rank, size, 0};
	memset(comm, 0, END_MAGIC + 8);
	memcpy(comm, &magic, 8);
	memcpy(comm + END_MAGIC, &magic, 8);
	memcpy(comm + COMM_HASH, &hash, 8);
	memcpy(comm + COMM_HASH + 8, numbers, sizeof(numbers));
}
static void call(char *comm, int count)
{
	int64_t held = now_ns() + 1000000; /* HELD_NS of nccl_comm.bpf.h */

	while (now_ns() <= held)
		;
	ncclAllReduce(comm, comm, count, 7, 0, comm, (void *)0x5150);
}
int main(void)
{
	size_t room = END_MAGIC + 8 + 4095 & ~4095ull;
	char *comm = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	fill(comm, 0x11, 0, 2);
	call(comm, 1);
	call(comm, 2);
	fill(comm, 0x22, 1, 4);
	call(comm, 3);
	memset(comm, 0, 8); /* as commPoison does when one is freed */
	memset(comm + END_MAGIC, 0, 8);
	memset(comm + COMM_HASH + 8, 0xff, 12);
	call(comm, 4);
	fill(comm, 0x22, 7, 4); /* a rank that cannot be */
	call(comm, 5);
	fill(comm, 0x33, 2, 3);
	mprotect(comm + (END_MAGIC & ~4095ull), 4096, PROT_NONE);
	call(comm, 6);
	mprotect(comm + (END_MAGIC & ~4095ull), 4096, PROT_READ | PROT_WRITE);
	for (int i = 0; i < 64; i++)
		call(comm, 7);
	munmap(comm, room);
	call(comm, 8);
	call((char *)-8ull, 9);
	call((char *)0x1000, 10);
	return 0;
}
"""


@pytest.mark.parametrize("layout", [NCCL_LAYOUTS[0], NCCL_LAYOUTS[-1]], ids=lambda layout: layout.version)
@both_ways
def test_an_address_that_is_used_again_is_another_communicator(
    layout: NcclLayout, tmp_path: Path, open_session: Callable[..., Session]
) -> None:
    library, caller = build(tmp_path, layout, internal=True, program=REUSED)
    watcher = Watcher(open_session(*OBJECTS), Anybody())
    watcher.attach(library)
    subprocess.run([caller], check=True)
    one, two, three = ("0000000000000011", 0, 2), ("0000000000000022", 1, 4), ("0000000000000033", 2, 3)
    none = (None, None, None)
    found = [(row["comm"], row["comm_rank"], row["comm_size"]) for row in watcher.rows()]
    # One whose end is not in memory is looked at again, now and then.
    assert found == [one, one, two, none, none, none, *[none] * 63, three, none, none, none]


@pytest.mark.parametrize(("known_below", "hits"), [(True, 8), (False, 16)])
def test_one_file_behind_two_inodes_counts_once(
    tmp_path: Path,
    open_session: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    known_below: bool,
    hits: int,
) -> None:
    """Two overlay mounts over one library: a probe through either is a probe on the same file below.

    It is placed once where the kernel says which file that is, and counts once where it does not (before 5.17).
    """
    lower = tmp_path / "lower"
    lower.mkdir()
    library, caller = build(lower, NCCL_LAYOUTS[0])
    mounts = []
    session = open_session(*OBJECTS)
    if not known_below:
        monkeypatch.setattr(session, "identity", lambda fd: (os.fstat(fd).st_dev, os.fstat(fd).st_ino))
    watcher = Watcher(session, Anybody())
    try:
        for number in range(2):
            folder = tmp_path / f"overlay{number}"
            for name in ("upper", "work", "merged"):
                (folder / name).mkdir(parents=True)
            options = f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder / "merged"], check=True)
            mounts.append(folder / "merged")
            watcher.attach(mounts[-1] / library.name)
        subprocess.run([caller], input="\n\n", text=True, check=True, stdout=subprocess.DEVNULL)
        assert Counter(row["op"] for row in watcher.rows())["broadcast"] == 8
        slot = next(slot for slot, name in watcher.source.slots.items() if name == "nccl_call ncclBroadcast")
        assert session.counters()[f"probe:{slot}"]["hits"] == hits
    finally:
        # A probe holds the file, and so the mount.
        for link in list(session.links.values()):
            session.detach(link)
        for mount in mounts:
            subprocess.run(["umount", "--lazy", mount], check=True)
