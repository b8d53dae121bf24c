// SPDX-License-Identifier: Apache-2.0
/*
 * The public calls of NCCL (nccl.h). They enqueue and return: nothing here sees the end of an operation, so its record
 * goes to the ring at once.
 *
 * The communicator is read from struct ncclComm where its build is known, which holds for one made before we came.
 */
#include "collectives.bpf.h"

#define NCCL_LAYOUTS 16
#define COMM_MAGIC 0x0280028002800280ULL
#define MAX_RANKS (1 << 24)

/* ncclFunc_t, and the public calls that older versions have no number for (nccl_common.h) */
enum nccl_function {
	NCCL_BROADCAST = 0,
	NCCL_REDUCE = 1,
	NCCL_ALL_GATHER = 2,
	NCCL_REDUCE_SCATTER = 3,
	NCCL_ALL_REDUCE = 4,
	NCCL_SEND = 6,
	NCCL_RECV = 7,
	NCCL_ALL_TO_ALL = 8,
	NCCL_SCATTER = 9,
	NCCL_GATHER = 10,
};

/* Offsets in struct ncclComm, in bytes; `end_magic` 0 ends the list. Written by layouts.py. */
struct nccl_layout {
	__u32 end_magic;
	__u32 comm_hash; /* followed by rank, nRanks, cudaDev */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NCCL_LAYOUTS);
	__type(key, __u32);
	__type(value, struct nccl_layout);
} nccl_layouts SEC(".maps");

/* The group that a thread is in: how deep, and what names the outermost one. */
struct group {
	__u64 depth;
	__u64 id;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct group);
} nccl_groups SEC(".maps");

struct comm_identity {
	__u64 hash;
	__s32 rank;
	__s32 size;
	__s32 device;
	__s32 unused;
};

static __always_inline int has_magic(__u64 address)
{
	__u64 word = 0;

	return !bpf_probe_read_user(&word, sizeof(word), (const void *)address) && word == COMM_MAGIC;
}

static __always_inline void read_comm(struct collective_record *r, __u64 comm)
{
	struct comm_identity identity;
	__u32 i;

	r->comm = comm;
	if (!has_magic(comm))
		return;
	for (i = 0; i < NCCL_LAYOUTS; i++) {
		__u32 index = i;
		struct nccl_layout *layout = bpf_map_lookup_elem(&nccl_layouts, &index);

		if (!layout || !layout->end_magic)
			return;
		if (!has_magic(comm + layout->end_magic))
			continue;
		if (bpf_probe_read_user(&identity, sizeof(identity), (const void *)(comm + layout->comm_hash)))
			return;
		if (identity.rank < 0 || identity.rank >= identity.size || identity.size > MAX_RANKS)
			return;
		r->comm_rank = identity.rank;
		r->comm_size = identity.size;
		r->cuda_device = identity.device;
		r->name_form = NAME_NUMBER;
		__builtin_memcpy(r->name, &identity.hash, sizeof(identity.hash));
		return;
	}
}

/*
 * One file seen through two overlay mounts has two inodes to be attached to and runs both programs at each call: the
 * second is told by its attachment, at the stack pointer of the first.
 */
static __always_inline int is_echo(void *ctx, struct probe *probe, struct call *call, __u8 op)
{
	return call && call->record.backend == BACKEND_NCCL && call->record.op == op &&
	       call->attachment != probe->cookie >> 16 && call->stack_pointer == user_stack_pointer(ctx);
}

/* The draft of the call that this thread makes. */
static __always_inline struct collective_record *begin(void *ctx, struct probe *probe, __u8 op)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct group *group = bpf_map_lookup_elem(&nccl_groups, &thread);
	struct call *call = bpf_map_lookup_elem(&calls, &thread);

	if (is_echo(ctx, probe, call, op))
		return 0;
	call = call_begin(ctx, probe, BACKEND_NCCL);
	if (!call) {
		RING_LOST(collectives);
		return 0;
	}
	call->record.op = op;
	call->record.timing = TIMING_ENQUEUE_ONLY;
	call->record.state = STATE_UNSEEN;
	call->record.group_id = group && group->depth ? group->id : 0;
	return &call->record;
}

static __always_inline void emit(struct collective_record *r, __u64 count, __u8 dtype, __u64 comm, __u64 stream)
{
	r->count = count;
	r->dtype = dtype;
	r->stream = stream;
	read_comm(r, comm);
	RING_PUSH(collectives, r);
}

/* (send, recv, count, dtype, op, comm, stream) */
static __always_inline void reduction(void *ctx, struct probe *probe, __u8 op)
{
	struct collective_record *r = begin(ctx, probe, op);

	if (!r)
		return;
	r->redop = argument(ctx, 4) < UNKNOWN_BYTE ? argument(ctx, 4) : UNKNOWN_BYTE;
	emit(r, argument(ctx, 2), argument(ctx, 3), argument(ctx, 5), argument(ctx, 6));
}

/* (send, recv, count, dtype, root, comm, stream) */
static __always_inline void rooted(void *ctx, struct probe *probe, __u8 op)
{
	struct collective_record *r = begin(ctx, probe, op);

	if (!r)
		return;
	r->root = (__s32)argument(ctx, 4);
	emit(r, argument(ctx, 2), argument(ctx, 3), argument(ctx, 5), argument(ctx, 6));
}

/* (send, recv, count, dtype, comm, stream) */
static __always_inline void plain(void *ctx, struct probe *probe, __u8 op)
{
	struct collective_record *r = begin(ctx, probe, op);

	if (r)
		emit(r, argument(ctx, 2), argument(ctx, 3), argument(ctx, 4), argument(ctx, 5));
}

/* (buffer, count, dtype, peer, comm, stream) */
static __always_inline void point_to_point(void *ctx, struct probe *probe, __u8 op)
{
	struct collective_record *r = begin(ctx, probe, op);

	if (!r)
		return;
	r->peer = (__s32)argument(ctx, 3);
	emit(r, argument(ctx, 1), argument(ctx, 2), argument(ctx, 4), argument(ctx, 5));
}

UPROBE(nccl_all_reduce)
{
	reduction(ctx, probe, NCCL_ALL_REDUCE);
}

UPROBE(nccl_reduce_scatter)
{
	reduction(ctx, probe, NCCL_REDUCE_SCATTER);
}

UPROBE(nccl_all_gather)
{
	plain(ctx, probe, NCCL_ALL_GATHER);
}

UPROBE(nccl_all_to_all)
{
	plain(ctx, probe, NCCL_ALL_TO_ALL);
}

/* ncclBcast ends in a call of ncclBroadcast, and so needs no probe. */
UPROBE(nccl_broadcast)
{
	rooted(ctx, probe, NCCL_BROADCAST);
}

UPROBE(nccl_gather)
{
	rooted(ctx, probe, NCCL_GATHER);
}

UPROBE(nccl_scatter)
{
	rooted(ctx, probe, NCCL_SCATTER);
}

/* (send, recv, count, dtype, op, root, comm, stream) */
UPROBE(nccl_reduce)
{
	struct collective_record *r = begin(ctx, probe, NCCL_REDUCE);

	if (!r)
		return;
	r->redop = argument(ctx, 4) < UNKNOWN_BYTE ? argument(ctx, 4) : UNKNOWN_BYTE;
	r->root = (__s32)argument(ctx, 5);
	emit(r, argument(ctx, 2), argument(ctx, 3), argument(ctx, 6), argument(ctx, 7));
}

UPROBE(nccl_send)
{
	point_to_point(ctx, probe, NCCL_SEND);
}

UPROBE(nccl_recv)
{
	point_to_point(ctx, probe, NCCL_RECV);
}

UPROBE(nccl_group_start)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct group *group = bpf_map_lookup_elem(&nccl_groups, &thread);
	struct group first = {.depth = 1, .id = probe->now};

	if (group && group->depth)
		group->depth++;
	else
		bpf_map_update_elem(&nccl_groups, &thread, &first, BPF_ANY);
}

UPROBE(nccl_group_end)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct group *group = bpf_map_lookup_elem(&nccl_groups, &thread);

	if (group && group->depth)
		group->depth--;
}

char LICENSE[] SEC("license") = "GPL";
