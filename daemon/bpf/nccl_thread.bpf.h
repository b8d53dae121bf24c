/* SPDX-License-Identifier: Apache-2.0 */
/* The NCCL state of a thread: its group, its last operations, the communicator that it is making. */
#ifndef PROBING_NCCL_THREAD_BPF_H
#define PROBING_NCCL_THREAD_BPF_H

#include "communicators.bpf.h"
#include "completion.bpf.h"

/* A power of two. */
#define GROUP_STREAMS 8
/* How many operations of one group are followed to its end or error: as many as one stream can have open. */
#define GROUP_OPERATIONS OPEN_A_STREAM
/* A group that is older has ended unseen, for example because the hit at its end exceeded the budget. */
#define GROUP_NS (60 * SECOND_NS)

enum last_call {
	LAST_OTHER = 0,
	LAST_OPERATION = 1,
	LAST_GROUP_END = 2,
};

/* Operations that one thread put on one stream in a row, by their positions. */
struct stream_range {
	__u64 stream;
	__u64 first;
	__u64 last;
};

/* A call that makes communicators, between its entry and its return. */
struct nccl_making {
	__u64 where;   /* ncclComm_t *, one or an array */
	__u64 devices; /* int *, of ncclCommInitAll */
	__u64 parent;  /* address of the communicator that is split */
	__u64 stack_pointer;
	__u32 count; /* 0: the thread makes none */
	__u32 child; /* number of this child of the parent, from 1; 0: not known */
	struct communicator_record record;
	__u32 whole; /* 1: the call has completed all its work */
	/* The layout of the communicators. */
	__u32 layout;
	__u32 scanned;
	__u32 end_magic;
	__u32 comm_hash;
	__u32 reserved;
};

struct nccl_thread {
	__u64 start_ns;
	__u64 started; /* start of the thread since boot, ns: thread ids are reused */
	__u64 stack_pointer;
	__u64 attachment; /* the part of the cookie above the slot */
	__u64 group_id;
	__u64 asked_comm; /* ncclCommGetAsyncError */
	__u64 asked_where;
	__u64 held_comm; /* the last communicator that comm_holds confirmed, and when */
	__u64 held;
	__u32 generation;
	__u32 depth;
	__u8 last;
	__u8 ranges;
	__u8 cursor;
	__u32 found; /* index of a layout */
	__u32 scanned;
	__u64 cursor_position;
	struct stream_range range[GROUP_STREAMS];
	struct nccl_making making;
	/* Drafts: records exceed a program's stack. */
	struct communicator_record said;
	struct collective_record record;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct nccl_thread);
} nccl_threads SEC(".maps");

const volatile struct nccl_thread no_thread = {};

/* The state of the calling thread, or NULL. For global functions, to which pointers cannot be passed. */
static __always_inline struct nccl_thread *same_thread(void)
{
	__u64 id = bpf_get_current_pid_tgid();

	return bpf_map_lookup_elem(&nccl_threads, &id);
}

/* The state of the calling thread, made if missing, reset if the programs were off since its last call. */
static __always_inline struct nccl_thread *this_thread(void)
{
	__u64 id = bpf_get_current_pid_tgid(), started = thread_started();
	struct nccl_thread *thread = bpf_map_lookup_elem(&nccl_threads, &id);
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	if (!thread) {
		if (bpf_map_update_elem(&nccl_threads, &id, (const void *)&no_thread, BPF_ANY))
			return 0;
		thread = bpf_map_lookup_elem(&nccl_threads, &id);
	}
	if (!thread || !c)
		return 0;
	if (thread->started != started || thread->generation != c->generation) {
		thread->start_ns = current_start_ns();
		thread->started = started;
		thread->generation = c->generation;
		thread->depth = 0;
		thread->last = LAST_OTHER;
		thread->ranges = 0;
		thread->attachment = 0;
		thread->making.count = 0;
		thread->asked_where = 0;
		thread->held = 0;
	}
	return thread;
}

static __always_inline int in_group(struct nccl_thread *thread, __u64 now)
{
	if (thread->depth && now > thread->group_id + GROUP_NS)
		thread->depth = 0;
	return thread->depth != 0;
}

/* Notes the open operation at `key`, to be found at the end of the group or at an error. */
static __always_inline void range_add(struct nccl_thread *thread, struct operation_key *key)
{
	struct stream_range *range;

	if (!thread->depth)
		thread->ranges = 0;
	if (thread->ranges) {
		range = &thread->range[(thread->ranges - 1) & (GROUP_STREAMS - 1)];
		if (range->stream == key->object && range->last < key->position) {
			range->last = key->position;
			return;
		}
	}
	if (thread->ranges >= GROUP_STREAMS)
		return;
	range = &thread->range[thread->ranges & (GROUP_STREAMS - 1)];
	range->stream = key->object;
	range->first = key->position;
	range->last = key->position;
	thread->ranges++;
}

/* Only the program that deletes the record from the map pushes it: two that close it at once report it once. */
static __always_inline void operation_take(struct operation_key *key, struct collective_record *draft)
{
	struct cuda_process *process = bpf_map_lookup_elem(&cuda_processes, &draft->tgid);

	if (operation_remove(key))
		return;
	RING_PUSH(collectives, draft);
	if (process && process->start_ns == draft->start_ns)
		__sync_fetch_and_add(&process->open, -1);
}

static __always_inline void operation_failed(struct nccl_thread *thread, struct operation_key *key,
					     struct collective_record *open, __u8 result)
{
	__builtin_memcpy(&thread->record, open, sizeof(thread->record));
	thread->record.state = STATE_FAILED;
	thread->record.result = result;
	operation_take(key, &thread->record);
}

/* The next operation of the thread's ranges; 0 at their end. */
static __always_inline int range_next(struct nccl_thread *thread, struct operation_key *key)
{
	struct stream_range *range = &thread->range[thread->cursor & (GROUP_STREAMS - 1)];

	if (thread->cursor >= thread->ranges || thread->cursor >= GROUP_STREAMS)
		return 0;
	key->object = range->stream;
	key->position = thread->cursor_position ? thread->cursor_position : range->first;
	thread->cursor_position = key->position + 1;
	if (key->position >= range->last) {
		thread->cursor++;
		thread->cursor_position = 0;
	}
	return 1;
}

/*
 * Marks the next operation of the group at the thread's cursor as launched at `now`; returns 0 at the end. Like all
 * functions here that are not static, it is verified once, and not for each iteration of a loop that calls it.
 */
__noinline int launch_next(__u64 now)
{
	struct nccl_thread *thread = same_thread();
	struct operation_key key = {.tgid = current_tgid()};
	struct collective_record *open;

	if (!thread || !range_next(thread, &key))
		return 0;
	key.start_ns = thread->start_ns;
	open = bpf_map_lookup_elem(&operations, &key);
	if (!open || open->group_id != thread->group_id)
		return 1;
	stream_launched(&key, open, now);
	return 1;
}

static __always_inline void group_launched(struct nccl_thread *thread, __u64 now)
{
	int i;

	thread->cursor = 0;
	thread->cursor_position = 0;
	for (i = 0; i < GROUP_OPERATIONS; i++) {
		if (!launch_next(now))
			break;
	}
}

/* Closes the next operation of the group as failed; returns 0 at the end. */
__noinline int fail_next(__u8 result)
{
	struct nccl_thread *thread = same_thread();
	struct operation_key key = {.tgid = current_tgid()};
	struct collective_record *open;

	if (!thread || !range_next(thread, &key))
		return 0;
	key.start_ns = thread->start_ns;
	open = bpf_map_lookup_elem(&operations, &key);
	if (open && open->group_id == thread->group_id)
		operation_failed(thread, &key, open, result);
	return 1;
}

static __always_inline void group_failed(struct nccl_thread *thread, __u8 result)
{
	int i;

	thread->cursor = 0;
	thread->cursor_position = 0;
	for (i = 0; i < GROUP_OPERATIONS; i++) {
		if (!fail_next(result))
			break;
	}
}

/* The last operation of the thread, alone. */
static __always_inline void last_failed(struct nccl_thread *thread, __u8 result)
{
	struct operation_key key = {.start_ns = thread->start_ns, .tgid = current_tgid()};
	struct stream_range *range = &thread->range[(thread->ranges - 1) & (GROUP_STREAMS - 1)];
	struct collective_record *open;

	if (!thread->ranges)
		return;
	key.object = range->stream;
	key.position = range->last;
	open = bpf_map_lookup_elem(&operations, &key);
	if (open && open->tid == current_tid())
		operation_failed(thread, &key, open, result);
}

#endif
