/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A collective operation, from its call to its end, is one record. An open operation lies in the map `operations`; a
 * closed operation moves to the ring `collectives`, so a collector that dies at any time loses nothing.
 */
#ifndef PROBING_COLLECTIVES_BPF_H
#define PROBING_COLLECTIVES_BPF_H

#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "regs.bpf.h"
#include "shares.bpf.h"

#define NAME_BYTES 48
#define DESC_BYTES 40
#define ERROR_BYTES 56
#define UNKNOWN_BYTE 0xff
#define UNKNOWN_WORD 0xffffffffffffffffULL
#define UNKNOWN_INT (-1)

enum backend {
	BACKEND_GLOO = 1,
	BACKEND_NCCL = 2,
};

enum operation_state {
	STATE_CALLED = 1,
	STATE_STARTED = 2,
	STATE_DONE = 3,
	STATE_FAILED = 4,
	STATE_ABANDONED = 5,
	STATE_UNSEEN = 6, /* no probe can see its end */
	STATE_LAUNCHED = 7, /* open, and already put on its stream */
};

enum timing_source {
	TIMING_EXACT = 1,
	TIMING_SYNC = 2,
	TIMING_ENQUEUE_ONLY = 3,
	TIMING_WATCHDOG = 4,	  /* another thread queried the event behind the operation */
	TIMING_GRAPH = 5,	  /* captured into a CUDA graph: the times are the capture's, not a run's */
	TIMING_BLOCKING_WAIT = 6, /* the calling thread polled the event behind the operation */
};

enum name_form {
	NAME_NONE = 0,
	NAME_TEXT = 1,
	NAME_HASHED = 2, /* the first NAME_BYTES - 8 bytes, then a hash of the whole name */
	NAME_NUMBER = 3, /* 8 bytes, shown as 16 hex digits */
};

/*
 * Times are CLOCK_MONOTONIC ns, 0 where not seen. `op`, `dtype` and `redop` are the library's own numbers. UNKNOWN_*
 * stands for values that are not known.
 */
struct collective_record {
	__u64 object; /* identifies the open operation. gloo: address of its work; NCCL: the stream */
	__u64 position; /* NCCL: its position on that stream, from 1; gloo: 0 */
	__u64 start_ns;
	__u64 comm; /* address of the communicator or process group */
	__u32 tgid;
	__u32 tid;
	__u64 seq;
	__u64 count; /* elements that this rank contributes, as passed */
	__u64 stream;
	__u64 group_id;
	__u64 t_call;
	__u64 t_launch;
	__u64 t_start;
	__u64 t_done_lo;
	__u64 t_done_hi;
	__s32 comm_rank;
	__s32 comm_size;
	__s32 root;
	__s32 peer;
	__s32 cuda_device;
	__u16 backend;
	__u16 name_form;
	__u8 op;
	__u8 dtype;
	__u8 redop;
	__u8 state;
	__u8 timing;
	__u8 async_op;
	__u8 result; /* ncclResult_t */
	__u8 reserved;
	char name[NAME_BYTES];
	char desc[DESC_BYTES];
	char error[ERROR_BYTES];
};

struct operation_key {
	__u64 object;
	__u64 position;
	__u64 start_ns;
	__u64 tgid;
};

#define OPERATIONS 32768
/* The number of open operations that one process may have. */
#define OPEN_SHARE (OPERATIONS / 8)
/* The slot under which left_out counts operations of processes that used up their share. */
#define OPEN_SLOT 253

struct {
	/* 15 MB, preallocated: allocating an element for each operation costs its call 0.35 us more. */
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, OPERATIONS);
	__type(key, struct operation_key);
	__type(value, struct collective_record);
} operations SEC(".maps");

struct operation_share {
	__s64 open; /* number of open operations; signed, as a process is not limited while the map has no room for it */
};

/* The share of each process that opened an operation; the collector removes it when the process has ended. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct process_key);
	__type(value, struct operation_share);
} operation_shares SEC(".maps");

static __noinline struct operation_share *share_make(const void *process)
{
	struct operation_share none = {};

	bpf_map_update_elem(&operation_shares, process, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&operation_shares, process);
}

/*
 * `process`: a process_key, as are the last two fields of an operation_key and of a stream_key. Returns NULL if the map
 * has no room.
 */
static __always_inline struct operation_share *share_of(const void *process)
{
	struct operation_share *share = bpf_map_lookup_elem(&operation_shares, process);

	return share ? share : share_make(process);
}

static __always_inline int share_used_up(struct operation_share *share)
{
	return share && share->open >= OPEN_SHARE;
}

/* Called before an operation is put into the map, since another thread may remove it at once. */
static __always_inline void share_add(struct operation_share *share, __s64 more)
{
	if (share)
		__sync_fetch_and_add(&share->open, more);
}

/* Puts a new operation into the map. Returns 0, or an error if there is no room or the key is in use. */
static __always_inline long operation_put(struct operation_share *share, struct operation_key *key,
					  struct collective_record *record)
{
	long error;

	share_add(share, 1);
	error = bpf_map_update_elem(&operations, key, record, BPF_NOEXIST);
	if (error)
		share_add(share, -1);
	return error;
}

/* Returns 0, or an error if another program has removed the operation. */
static __always_inline long operation_remove(struct operation_key *key)
{
	long error = bpf_map_delete_elem(&operations, key);

	if (!error)
		share_add(bpf_map_lookup_elem(&operation_shares, &key->start_ns), -1);
	return error;
}

/* Bytes read at once of a group, and of a tensor. WINDOW is a power of two (layouts/gloo.py checks that it suffices). */
#define WINDOW 128
#define GROUP_BYTES 96
#define TENSOR_BYTES 112

/*
 * The draft of an operation: filled at the entry of a public function, used when the library creates the operation.
 * The names in `record` are kept from call to call while `group` and its head are unchanged.
 */
struct call {
	__u64 stack_pointer;
	__u64 attachment; /* the part of the cookie above the slot */
	__u64 outer;	  /* address of a public function that may be making this call for its caller */
	__u64 returns_to;
	__u64 group; /* 0: `record` has no names */
	__u8 head[GROUP_BYTES];
	__u8 window[WINDOW];
	struct collective_record record;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct call);
} calls SEC(".maps");

RING(collectives, struct collective_record, 1 << 24);

const volatile struct call no_call = {};

/* Valid only at the first instruction of a function. */
static __always_inline __u64 return_address(void *ctx)
{
	return target_arch == ARCH_X86_64 ? stack_word(ctx, 0) : CTX_LOAD(ctx, ARM64_X(30));
}

/* The cleared draft of the calling thread. It lies in a map because a record exceeds a program's stack. */
static __always_inline struct call *call_begin(void *ctx, struct probe *probe, __u8 backend)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *call = bpf_map_lookup_elem(&calls, &thread);
	struct collective_record *r;

	if (call) {
		/* Written in place: a new map element costs more than all writes here. */
		__builtin_memset(&call->record, 0, offsetof(struct collective_record, name));
		__builtin_memset(call->record.error, 0, sizeof(call->record.error));
	} else {
		if (bpf_map_update_elem(&calls, &thread, (const void *)&no_call, BPF_ANY))
			return 0;
		call = bpf_map_lookup_elem(&calls, &thread);
		if (!call)
			return 0;
	}
	call->stack_pointer = user_stack_pointer(ctx);
	call->attachment = probe->cookie >> 16;
	call->returns_to = call->outer ? return_address(ctx) : 0;
	r = &call->record;
	r->start_ns = current_start_ns();
	r->tgid = thread >> 32;
	r->tid = (__u32)thread;
	r->t_call = probe->now;
	r->backend = backend;
	r->seq = UNKNOWN_WORD;
	r->count = UNKNOWN_WORD;
	r->comm_rank = UNKNOWN_INT;
	r->comm_size = UNKNOWN_INT;
	r->root = UNKNOWN_INT;
	r->peer = UNKNOWN_INT;
	r->cuda_device = UNKNOWN_INT;
	r->dtype = UNKNOWN_BYTE;
	r->redop = UNKNOWN_BYTE;
	r->async_op = UNKNOWN_BYTE;
	r->state = STATE_CALLED;
	return call;
}

static __always_inline struct operation_key operation_key(__u64 object)
{
	struct operation_key key = {
		.object = object,
		.start_ns = current_start_ns(),
		.tgid = current_tgid(),
	};

	return key;
}

/*
 * A copy of an operation that is about to be closed. Its element of the map is not written: once another program has
 * removed it, the element belongs to another operation.
 */
struct leaving {
	__u64 thread;
	struct collective_record record;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct leaving);
} operations_leaving SEC(".maps");

/* Returns the copy of an open operation, NULL if there is none. */
static __always_inline struct leaving *operation_leave(struct operation_key *key)
{
	struct collective_record *open = bpf_map_lookup_elem(&operations, key);
	struct leaving *leaving;
	__u32 zero = 0;

	leaving = open ? bpf_map_lookup_elem(&operations_leaving, &zero) : 0;
	if (!leaving)
		return 0;
	leaving->thread = bpf_get_current_pid_tgid();
	bpf_probe_read_kernel(&leaving->record, sizeof(leaving->record), open);
	return leaving;
}

/*
 * Removes the operation. Returns 0 if another program has removed it: only the one that removes it reports it, as several
 * threads may wait for one operation. Also 0 if this program was preempted and the copy overwritten, which is a loss.
 */
static __always_inline int operation_left(struct operation_key *key, struct leaving *leaving)
{
	if (operation_remove(key))
		return 0;
	if (leaving->thread == bpf_get_current_pid_tgid())
		return 1;
	RING_LOST(collectives);
	return 0;
}

static __always_inline void operation_close(struct operation_key *key, struct leaving *leaving, __u8 state)
{
	if (!operation_left(key, leaving))
		return;
	leaving->record.state = state;
	RING_PUSH(collectives, &leaving->record);
}

/*
 * Opens an operation of the calling process. If an operation with this key is open, its object was freed and its end was
 * not seen: that operation is abandoned, and the new one takes its place.
 */
static __always_inline void operation_open(struct operation_key *key, struct collective_record *record)
{
	struct operation_share *share = share_of(&key->start_ns);
	int used_up = share_used_up(share);
	struct leaving *older;

	if (!used_up && !operation_put(share, key, record))
		return;
	older = operation_leave(key);
	if (older) {
		operation_close(key, older, STATE_ABANDONED);
		if (!operation_put(share, key, record))
			return;
	}
	if (used_up)
		left_out(OPEN_SLOT, key->tgid, record->t_call);
	else
		RING_LOST(collectives);
}

/* Closes an operation that ended exactly at `now`. */
static __always_inline void operation_done(struct operation_key *key, __u64 now)
{
	struct leaving *leaving = operation_leave(key);

	if (!leaving)
		return;
	leaving->record.t_done_lo = now;
	leaving->record.t_done_hi = now;
	operation_close(key, leaving, STATE_DONE);
}

#endif
