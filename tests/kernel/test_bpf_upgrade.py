"""A collector finds pinned programs whose records are of another layout: what they hold comes into its log once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probing.daemon.arrow import batch_of
from probing.daemon.bpf.build import compile_object
from probing.daemon.bpf.session import Foreign, Session
from probing.daemon.clock import FakeClock
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.collector.upgrade import take_over
from probing.daemon.nccl_uprobes.operations.open_operations import abandoned
from probing.daemon.source import RingConsumer
from probing.daemon.store import Store, StoreLimits

# Calls below FINISHED are records in the ring, the others lie in the hash of open operations.
FINISHED, CALLS = 23, 30
# Both know the number, at different places and in different widths; each has a field that the other lacks.
FIELDS = {
    "before": "__u32 gone; __u32 number; __u8 state;",
    "after": "__u8 state; __u64 number; __u32 tid;",
}
SOURCE = """
#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "regs.bpf.h"

struct call_record { FIELDS };

RING(calls, struct call_record, 1 << 16);

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u64);
	__type(value, struct call_record);
} open_calls SEC(".maps");

UPROBE(on_call)
{
	struct call_record record = {};
	__u64 number = argument(ctx, 0);

	record.number = number;
	record.state = 3;
	if (number < FINISHED)
		RING_PUSH(calls, &record);
	else
		bpf_map_update_elem(&open_calls, &number, &record, BPF_ANY);
}

char LICENSE[] SEC("license") = "GPL";
"""
Open = Callable[..., Session]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, fields in FIELDS.items():
        source = tmp_path_factory.mktemp(name) / "calls.bpf.c"
        source.write_text(SOURCE.replace("FIELDS", fields).replace("FINISHED", str(FINISHED)))
        made[name] = compile_object(source)
    return made


class Killed(BaseException):
    """The collector dies here."""


def die(_: Foreign) -> None:
    raise Killed


def assemble(records: Any, pair: Any) -> dict[str, Any]:
    rows = [{"node": "n1", "ts": pair.real_ns, "pid": int(number)} for number in records["number"]]
    return {"process.events": batch_of("process.events", rows)}


def open_store(path: Path) -> Store:
    limits = StoreLimits(keep_free_bytes=0, max_age_s=1e9)
    return Store.open(path, node="n1", clock=FakeClock(1, 1_790_000_000_000_000_000), limits=limits, background=False)


@pytest.mark.parametrize("killed", [False, True])
def test_records_of_another_layout_come_into_the_log_once(
    open_session: Open,
    objects: dict[str, Path],
    target: Any,
    tmp_path: Path,
    pin_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: bool,
) -> None:
    # GIVEN calls that programs of the version before saw, while no collector ran
    before = open_session(objects["before"])
    fd = os.open(target.path, os.O_RDONLY)
    before.attach_uprobe("on_call", fd, [target.offsets[0]], 0)
    os.close(fd)
    record = before.rings["calls"].record
    before.close(keep=True)
    target.call(CALLS)
    # WHEN the next version starts, and perhaps once more after it was killed before it removed them
    session = open_session(objects["after"])
    ring = session.rings["calls"]
    assert ring.record != record
    (foreign,) = session.foreign
    clock = FakeClock(1, 1_790_000_000_000_000_000)
    outbox = RowBuffer("n1", clock)
    consumer = RingConsumer(assemble, "comm.ops", open_map="open_calls", abandoned=abandoned)

    def start() -> None:
        with open_store(tmp_path / "state") as store:
            take_over(foreign, {"calls": consumer}, {"calls": ring.record}, store, outbox, clock)

    if killed:
        with monkeypatch.context() as patched:
            patched.setattr(Foreign, "remove", die)
            with pytest.raises(Killed):
                start()
    start()
    # THEN each call has one row, whatever the record looked like, and what it lacked is reported
    with open_store(tmp_path / "state") as store:
        found = sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())
        assert found == list(range(CALLS))
        assert store.recovery_losses == ()
    reasons = [reason for batch in outbox.take()["probing.losses"] for reason in batch["reason"].to_pylist()]
    assert reasons == ["the previous version did not record tid"]
    assert [path for path in (pin_root / "test").iterdir() if path.is_dir()] == [session.path]
    # The new programs are at work, and have no record of the calls before.
    assert len(ring.drain().records) == 0
    assert len(session.maps["open_calls"].items()[1]) == 0
