"""Generates the C text that bcc compiles: a prelude, an entry for each attachment, and the user's code.

The columns determine the struct of an event. Each attachment has its own entry, which checks the budget before it calls
the user's function; this function is ``static``, so that bcc inlines it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from probing.api.errors import ConfigError
from probing.daemon.bpf.syscalls import UPROBE_MULTI
from probing.daemon.user_probes.spec import Attach, Spec

__all__ = ("COUNTS", "MAPS", "TaskOffsets", "entries", "record_dtype", "render")

MAPS = ("probing_events", "probing_counts", "probing_listed")
"""The maps of the prelude: the ring, COUNTS of each CPU, and the processes that may hit tracepoints, by tgid."""
COUNTS = np.dtype([("hits", "<u8"), ("refused", "<u8"), ("emitted", "<u8"), ("lost", "<u8")])
# The maximum size of an event, bytes. A program has 512 bytes of stack, and the prelude and the user's variables need
# some of them.
MAX_EVENT_BYTES = 384
RING_PAGES = 256
MAX_LISTED = 8192
_NUMPY = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "i32": "<i4", "i64": "<i8"}
_C = {"u8": "u8", "u16": "u16", "u32": "u32", "u64": "u64", "i32": "s32", "i64": "s64"}
_PROG_KPROBE, _PROG_TRACEPOINT = 2, 5
_HEAD = [("time_ns", "u64"), ("start_ns", "u64"), ("tgid", "u32"), ("tid", "u32")]
_PRELUDE = """\
#include <uapi/linux/ptrace.h>
struct probing_counts {{ u64 hits; u64 refused; u64 emitted; u64 lost; }};
struct probing_window {{ u64 second; u64 hits; }};
struct {name}_event {{ {members} }};
BPF_RINGBUF_OUTPUT(probing_events, {pages});
BPF_PERCPU_ARRAY(probing_counts, struct probing_counts, 1);
BPF_ARRAY(probing_window, struct probing_window, 1);
BPF_TABLE("hash", u32, u8, probing_listed, {listed});
/* The counters are incremented atomically: a program on user code may be preempted by another program on its CPU. */
static int probing_enter(void)
{{
	int zero = 0;
	u64 second = bpf_ktime_get_ns() / 1000000000ULL;
	struct probing_counts *counts = probing_counts.lookup(&zero);
	struct probing_window *window = probing_window.lookup(&zero);
	if (!counts || !window)
		return 0;
	__sync_fetch_and_add(&counts->hits, 1);
	if (window->second != second) {{
		window->second = second;
		window->hits = 0;
	}}
	if (window->hits >= {budget}ULL) {{
		__sync_fetch_and_add(&counts->refused, 1);
		return 0;
	}}
	__sync_fetch_and_add(&window->hits, 1);
	return 1;
}}
static int probing_is_listed(void)
{{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	return probing_listed.lookup(&tgid) != 0;
}}
/* /proc/PID/stat counts in ticks of 10 ms, so the start of a process is rounded down to a tick everywhere. */
static u64 probing_start_ns(void)
{{
	u64 leader = 0, start = 0;
	bpf_probe_read_kernel(&leader, sizeof(leader), (void *)(bpf_get_current_task() + {leader}ULL));
	bpf_probe_read_kernel(&start, sizeof(start), (void *)(leader + {boottime}ULL));
	return start / 10000000ULL * 10000000ULL;
}}
/* Makes a row of `event`, with the process, the thread and the time. Returns 0, or an error if the row was lost. */
static int probing_emit(struct {name}_event *event)
{{
	int zero = 0;
	int error;
	u64 thread = bpf_get_current_pid_tgid();
	struct probing_counts *counts = probing_counts.lookup(&zero);
	if (!counts)
		return -1;
	event->probing_time_ns = bpf_ktime_get_ns();
	event->probing_start_ns = probing_start_ns();
	event->probing_tgid = thread >> 32;
	event->probing_tid = (u32)thread;
	/* The collector reads the ring at intervals, so it is not woken. */
	error = probing_events.ringbuf_output(event, sizeof(*event), BPF_RB_NO_WAKEUP);
	if (error)
		__sync_fetch_and_add(&counts->lost, 1);
	else
		__sync_fetch_and_add(&counts->emitted, 1);
	return error;
}}
"""
_ENTRY = """\
{structure};
static int {function}({context});
int probing_entry_{index}({context})
{{
	if ({guard}probing_enter())
		{function}(ctx);
	return 0;
}}
"""


class TaskOffsets(NamedTuple):
    """Offsets in struct task_struct of the running kernel, since bcc may compile with headers of another kernel."""

    group_leader: int
    start_boottime: int


def _members(spec: Spec) -> list[tuple[str, str, str, int]]:
    """Returns (name, C type or "char", numpy format, bytes) of each member, with explicit padding."""
    plain = [(f"probing_{n}", t, 0) for n, t in _HEAD] + [(f.name, f.type, f.bytes) for f in spec.fields]
    found: list[tuple[str, str, str, int]] = []
    size = 0

    def pad(to: int) -> None:
        nonlocal size
        if gap := -size % to:
            found.append((f"probing_pad{len(found)}", "char", f"S{gap}", gap))
            size += gap

    for name, kind, room in plain:
        if kind == "text":
            found.append((name, "char", f"S{room}", room))
            size += room
            continue
        width = np.dtype(_NUMPY[kind]).itemsize
        pad(width)
        found.append((name, _C[kind], _NUMPY[kind], width))
        size += width
    pad(8)
    if size > MAX_EVENT_BYTES:
        hint = "shorten the texts"
        raise ConfigError(f"the columns of {spec.name} take {size} bytes, at most {MAX_EVENT_BYTES} fit", hint=hint)
    return found


def record_dtype(spec: Spec) -> np.dtype[Any]:
    """Returns the dtype of an event in the ring. Raises ConfigError when it is too large for a program."""
    return np.dtype([(name, layout) for name, _, layout, _ in _members(spec)])


def entries(spec: Spec, *, multi: bool) -> list[tuple[str, int, int]]:
    """Returns the name of the entry, the type of program and the attach type of each attachment, in the order of
    ``spec.attach``.

    ``multi``: functions get a uprobe_multi link, whose programs are loaded with another attach type.
    """
    uprobe = (_PROG_KPROBE, UPROBE_MULTI if multi else 0)
    return [
        (f"probing_entry_{i}", *((_PROG_TRACEPOINT, 0) if place.tracepoint else uprobe))
        for i, place in enumerate(spec.attach)
    ]


def render(spec: Spec, folder: Path, offsets: TaskOffsets) -> str:
    """Returns the C text. Errors in the user's code name the file and line of the user's file."""
    members = " ".join(
        f"char {name}[{size}];" if kind == "char" else f"{kind} {name};" for name, kind, _, size in _members(spec)
    )
    prelude = _PRELUDE.format(
        name=spec.name,
        members=members,
        pages=RING_PAGES,
        listed=MAX_LISTED,
        budget=spec.budget,
        leader=offsets.group_leader,
        boottime=offsets.start_boottime,
    )
    # The entries come before the user's text, since bcc inserts the struct of a tracepoint before the entry that uses
    # it.
    calls = "".join(_entry(spec, i, place) for i, place in enumerate(spec.attach))
    return f"{prelude}{calls}#line 1 {json.dumps(f'{folder / spec.name}.c')}\n{spec.code}\n"


def _entry(spec: Spec, index: int, place: Attach) -> str:
    structure = "struct pt_regs"
    if place.tracepoint:
        category, _, point = place.tracepoint.partition(":")
        structure = f"struct tracepoint__{category}__{point}"
    # A uprobe is attached only in chosen processes; a tracepoint is hit by all processes.
    guard = "probing_is_listed() && " if place.tracepoint and spec.who != "all" else ""
    context = f"{structure} *ctx"
    return _ENTRY.format(structure=structure, function=place.function, context=context, index=index, guard=guard)
