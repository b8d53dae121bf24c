/* SPDX-License-Identifier: Apache-2.0 */
/* The calls that make communicators: their arguments at the entry, their result at the return. */
#ifndef PROBING_NCCL_MAKING_BPF_H
#define PROBING_NCCL_MAKING_BPF_H

#include "nccl_comm.bpf.h"

/* Devices of one process. */
#define MAX_MADE 32
/* ncclConfig_t (nccl.h): `size` and `magic` come first; commName from 2.27 on. */
#define CONFIG_MAGIC 0xcafebeef
#define CONFIG_COMM_NAME 48
#define CONFIG_MAX_BYTES 4096
/* Stands for the color of a shrink, which has none, in a derived name. */
#define COLOR_OF_SHRINK (-2)

/* getHash of NCCL's src/misc/utils.cc, over the bytes of the unique id */
static __noinline __u64 id_hash(const signed char *id)
{
	__u64 hash = 5381;
	int i;

	for (i = 0; i < UNIQUE_ID_BYTES; i++)
		hash = ((hash << 5) + hash) ^ (__u64)(__s64)id[i];
	return hash;
}

/* The 128 bytes of ncclUniqueId begin as ncclBootstrapHandle: a magic number, and the socket address of the root. */
static __noinline int making_id(struct communicator_record *r, __u64 address)
{
	signed char id[UNIQUE_ID_BYTES] = {};

	if (bpf_probe_read_user(id, sizeof(id), (const void *)address))
		return 0;
	r->hash = id_hash(id);
	r->identity = IDENTITY_UNIQUE_ID;
	__builtin_memcpy(r->root_address, id + 8, sizeof(r->root_address));
	return 0;
}

static __always_inline void making_config(struct communicator_record *r, __u64 config)
{
	struct {
		__u64 size;
		__u32 magic;
		__u32 version;
	} head;

	if (config && !bpf_probe_read_user(&head, sizeof(head), (const void *)config) && head.magic == CONFIG_MAGIC &&
	    head.size >= CONFIG_COMM_NAME + 8 && head.size <= CONFIG_MAX_BYTES)
		read_name(r, config + CONFIG_COMM_NAME);
}

static __always_inline struct nccl_making *making_begin(void *ctx, struct probe *probe, __u8 maker, __u64 where)
{
	struct nccl_thread *thread = this_thread();
	struct nccl_making *making;

	if (!thread) {
		RING_LOST(communicators);
		return 0;
	}
	thread->last = LAST_OTHER;
	making = &thread->making;
	making->where = where;
	making->devices = 0;
	making->parent = 0;
	making->child = 0;
	making->stack_pointer = user_stack_pointer(ctx);
	making->count = 1;
	comm_say(&making->record, probe->now, COMM_MADE);
	making->record.maker = maker;
	return making;
}

/* Notes the parent of a child, and the child's number among the parent's children if all children were seen. */
static __always_inline void making_parent(struct nccl_making *making, __u64 parent, __u64 now)
{
	struct nccl_thread *thread = this_thread();
	struct nccl_comm *comm = thread && parent ? comm_at(thread, parent, now) : 0;

	making->parent = parent;
	if (!comm)
		return;
	making->record.parent = comm->hash;
	if (comm->maker != MADE_UNKNOWN && comm->identity != IDENTITY_NONE)
		making->child = comm->children + 1;
}

/* eatHash of NCCL's src/include/bitops.h, of one chunk */
static __always_inline void eat_hash(__u64 *first, __u64 *second, __u64 chunk, __u64 size)
{
	*first ^= size;
	*first += *second;
	*second ^= *first;
	*first ^= *first >> 31;
	*first *= 0x9de62bbc8cef3ce3ULL;
	*second ^= *second >> 32;
	*second *= 0x485cd6311b599e79ULL;
	*first += chunk;
}

/*
 * The hash that NCCL from 2.27 on gives a split (src/init.cc: parent, count of splits, color; digestHash of bitops.h);
 * for other children a hash of our own, the same on all ranks.
 */
static __always_inline __u64 child_hash(__u64 parent, __u32 child, __s32 color)
{
	__u64 first = 1, second = 1, hash;

	eat_hash(&first, &second, parent, sizeof(parent));
	eat_hash(&first, &second, child, sizeof(child));
	eat_hash(&first, &second, (__u32)color, sizeof(color));
	hash = first;
	hash ^= hash >> 31;
	hash *= 0xbac3bd562846de6bULL;
	hash += second;
	hash ^= hash >> 32;
	return hash * 0x995a187a14e7b445ULL;
}

static __always_inline void making_child(struct nccl_thread *thread, struct nccl_making *making)
{
	struct communicator_record *r = &making->record;
	struct comm_key key = comm_key(thread, making->parent);
	struct nccl_comm *parent = bpf_map_lookup_elem(&nccl_comms, &key);
	__s32 color = r->maker == MADE_SPLIT ? r->color : COLOR_OF_SHRINK;

	if (parent)
		parent->children++;
	if (!making->child || r->maker == MADE_GROW)
		return;
	r->hash = child_hash(r->parent, making->child, color);
	r->identity = IDENTITY_DERIVED;
}

/* Adds the communicator at `address` to the map, as the call's arguments and its return describe it. */
static __always_inline void comm_made(struct nccl_thread *thread, __u64 address)
{
	struct nccl_making *making = &thread->making;
	struct communicator_record *made = &making->record;
	struct comm_key key = comm_key(thread, address);
	struct nccl_comm comm = {
		.hash = made->hash,
		.rank = made->rank,
		.size = made->size,
		.device = made->cuda_device,
		.identity = made->identity,
		.maker = made->maker,
		.layout = NO_LAYOUT,
	};

	comm.magic = has_magic(address);
	comm.scanned = making->scanned;
	if (comm.magic && making->layout != NO_LAYOUT && has_magic(address + making->end_magic)) {
		comm.layout = making->layout;
		comm.end_magic = making->end_magic;
		comm.comm_hash = making->comm_hash;
	}
	/* The struct of a communicator in progress is read at its first use. Its hash replaces a derived hash. */
	if (comm.layout != NO_LAYOUT && comm.identity == IDENTITY_DERIVED) {
		comm.identity = IDENTITY_NONE;
		comm.hash = 0;
	}
	if (making->whole)
		comm_adopt(&comm, address);
	__builtin_memcpy(&thread->said, made, sizeof(thread->said));
	comm_tell(thread, &comm, address);
	bpf_map_update_elem(&nccl_comms, &key, &comm, BPF_ANY);
}

/* The `index`-th communicator of the making call of this thread. A global function, for the loop. */
__noinline int made_at(__u32 index)
{
	struct nccl_thread *thread = same_thread();
	struct communicator_record *r;
	__u64 address = 0;

	if (!thread)
		return 0;
	r = &thread->making.record;
	bpf_probe_read_user(&address, sizeof(address), (const void *)(thread->making.where + index * 8));
	if (r->maker == MADE_INIT_ALL) {
		r->rank = index;
		r->cuda_device = index;
		if (thread->making.devices &&
		    bpf_probe_read_user(&r->cuda_device, 4, (const void *)(thread->making.devices + index * 4)))
			r->cuda_device = UNKNOWN_INT;
	}
	/* A rank that passes no color gets no communicator. */
	if (address)
		comm_made(thread, address);
	return 0;
}

/* All communicators of one call belong to one library, so they have one layout. */
static __always_inline void making_lay_out(struct nccl_thread *thread, struct nccl_making *making)
{
	struct nccl_comm like = {};
	__u64 address = 0;

	bpf_probe_read_user(&address, sizeof(address), (const void *)making->where);
	comm_lay_out(thread, &like, address);
	making->layout = like.layout;
	making->scanned = like.scanned;
	making->end_magic = like.end_magic;
	making->comm_hash = like.comm_hash;
}

static __always_inline void making_return(void *ctx, struct probe *probe)
{
	struct nccl_thread *thread = this_thread();
	__u64 result = (__u32)return_value(ctx);
	struct communicator_record *r;
	struct nccl_making *making;
	__u32 count, i;

	if (!thread || !thread->making.count)
		return;
	making = &thread->making;
	r = &making->record;
	count = making->count;
	making->count = 0;
	/* This return belongs to a call whose entry was not seen. */
	if (user_stack_pointer(ctx) < making->stack_pointer || user_stack_pointer(ctx) > making->stack_pointer + 16)
		return;
	making->whole = !result && !thread->depth;
	r->result = result < UNKNOWN_BYTE ? result : UNKNOWN_BYTE;
	r->duration_ns = making->whole ? probe->now - r->t : 0;
	r->t = probe->now;
	if (result && result != NCCL_IN_PROGRESS) {
		RING_PUSH(communicators, r);
		return;
	}
	if (making->parent)
		making_child(thread, making);
	making_lay_out(thread, making);
	for (i = 0; i < MAX_MADE; i++) {
		if (i >= count)
			break;
		made_at(i);
	}
}

#endif
