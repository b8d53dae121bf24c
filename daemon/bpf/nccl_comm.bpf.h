/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Communicators by the address of their struct ncclComm. The struct is read by the layouts of known builds, and only if
 * NCCL's magic words lie at both its ends. Each call compares its identity again, as the address can be freed and used
 * again, unless the thread has compared it within HELD_NS.
 */
#ifndef PROBING_NCCL_COMM_BPF_H
#define PROBING_NCCL_COMM_BPF_H

#include "nccl_thread.bpf.h"

#define NCCL_LAYOUTS 64
#define COMM_MAGIC 0x0280028002800280ULL
#define MAX_RANKS (1 << 24)
#define ABSENT 0xffffffffU
#define NO_LAYOUT 0xffffffffU
/* seqNumber counts broadcast, reduce, all_gather, reduce_scatter and all_reduce. */
#define COUNTED 5
#define NCCL_IN_PROGRESS 7
/* Calls after which an unknown layout is searched again. A power of two. */
#define LOOK_AGAIN 64
/* In this time no communicator can be freed and another one made, since the ranks have to find each other first. */
#define HELD_NS 1000000

/* Offsets in struct ncclComm in bytes, ABSENT for a missing field. `end_magic` 0 ends the list. */
struct nccl_layout {
	__u32 end_magic;
	__u32 comm_hash; /* followed by rank, nRanks, cudaDev, nvmlDev */
	__u32 bus_id;
	__u32 node;
	__u32 nnodes;
	__u32 async_result;
	__u32 abort_flag; /* a pointer to u32 */
	__u32 comm_name;  /* a char pointer */
	__u32 seq_number; /* u64, one for each kind of collective */
	__u32 seq_count;
};

/* Written by operations/source.py; entries are added while programs run. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NCCL_LAYOUTS);
	__type(key, __u32);
	__type(value, struct nccl_layout);
} nccl_layouts SEC(".maps");

struct comm_key {
	__u64 comm;
	__u64 start_ns;
	__u64 tgid;
};

struct nccl_comm {
	__u64 hash;
	__u64 count;	 /* counted collectives that were seen */
	__u64 base;	 /* counted collectives before the first that was seen; UNKNOWN_WORD: not known */
	__u32 layout;	 /* index, or NO_LAYOUT */
	__u32 scanned;	 /* entries of the list that were tried and do not fit */
	__u32 end_magic; /* offsets of the layout */
	__u32 comm_hash;
	__s32 rank;
	__s32 size;
	__s32 device;
	__u32 children; /* number of splits and shrinks, if `maker` is known */
	__u8 identity;
	__u8 maker;
	__u8 magic;	   /* whether the struct begins with the magic word */
	__u8 async_result; /* the last result that was reported */
	__u8 met;	   /* calls since the last search found no layout */
	__u8 reserved[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct comm_key);
	__type(value, struct nccl_comm);
} nccl_comms SEC(".maps");

struct comm_block {
	__u64 hash;
	__s32 rank;
	__s32 size;
	__s32 device;
	__s32 nvml_device;
};

static __always_inline struct comm_key comm_key(struct nccl_thread *thread, __u64 address)
{
	struct comm_key key = {.comm = address, .start_ns = thread->start_ns, .tgid = current_tgid()};

	return key;
}

static __always_inline int has_magic(__u64 address)
{
	__u64 word = 0;

	return !bpf_probe_read_user(&word, sizeof(word), (const void *)address) && word == COMM_MAGIC;
}

static __always_inline int read_block(struct comm_block *block, __u64 address)
{
	return !bpf_probe_read_user(block, sizeof(*block), (const void *)address) && block->hash && block->rank >= 0 &&
	       block->rank < block->size && block->size <= MAX_RANKS;
}

enum layout_fit {
	LAYOUT_NONE = 0, /* end of the list */
	LAYOUT_FITS = 1,
	LAYOUT_OTHER = 2,
};

/* Whether the layout fits the struct that begins with the magic word at `address`. A global function, for the loop. */
__noinline int layout_fits(__u32 index, __u64 address)
{
	struct nccl_layout *layout = bpf_map_lookup_elem(&nccl_layouts, &index);

	if (!layout || !layout->end_magic)
		return LAYOUT_NONE;
	return layout->end_magic != ABSENT && has_magic(address + layout->end_magic) ? LAYOUT_FITS : LAYOUT_OTHER;
}

/*
 * Sets `thread->found` to the index of the layout that fits the struct at `address`, and `thread->scanned` to the
 * number of layouts that do not fit. Both are in a map, where the verifier does not track values: otherwise it would
 * walk the rest of the program for each value.
 */
static __always_inline void find_layout(struct nccl_thread *thread, __u64 address)
{
	int fits = LAYOUT_OTHER;
	__u32 i;

	thread->found = NO_LAYOUT;
	thread->scanned = NCCL_LAYOUTS;
	for (i = 0; i < NCCL_LAYOUTS; i++) {
		fits = layout_fits(i, address);
		if (fits != LAYOUT_OTHER) {
			thread->scanned = i;
			break;
		}
	}
	if (fits == LAYOUT_FITS)
		thread->found = thread->scanned;
}

static __always_inline void comm_say(struct communicator_record *r, __u64 now, __u8 event)
{
	__u64 id = bpf_get_current_pid_tgid();

	__builtin_memset(r, 0, sizeof(*r));
	r->t = now;
	r->start_ns = current_start_ns();
	r->tgid = id >> 32;
	r->tid = (__u32)id;
	r->event = event;
	r->rank = UNKNOWN_INT;
	r->size = UNKNOWN_INT;
	r->cuda_device = UNKNOWN_INT;
	r->node = UNKNOWN_INT;
	r->nodes = UNKNOWN_INT;
	r->color = UNKNOWN_INT;
	r->key = UNKNOWN_INT;
	r->result = UNKNOWN_BYTE;
	r->aborted = UNKNOWN_BYTE;
}

static __always_inline void comm_identify(struct communicator_record *r, struct nccl_comm *comm, __u64 address)
{
	r->comm = address;
	r->hash = comm->hash;
	r->rank = comm->rank;
	r->size = comm->size;
	r->cuda_device = comm->device;
	r->identity = comm->identity;
	r->maker = comm->maker;
}

static __always_inline void read_name(struct communicator_record *r, __u64 pointer)
{
	__u64 text = 0;

	if (!bpf_probe_read_user(&text, sizeof(text), (const void *)pointer) && text &&
	    bpf_probe_read_user_str(r->name, sizeof(r->name), (const void *)text) < 0)
		r->name[0] = 0;
}

/* The other fields of the struct; each may fail to be read by itself. */
static __noinline int comm_details(struct communicator_record *r, struct nccl_layout *layout, __u64 address)
{
	__u64 word = 0;
	__u32 value = 0;

	if (layout->bus_id != ABSENT)
		bpf_probe_read_user(&r->bus_id, sizeof(r->bus_id), (const void *)(address + layout->bus_id));
	if (layout->node != ABSENT && layout->nnodes != ABSENT) {
		if (bpf_probe_read_user(&r->node, 4, (const void *)(address + layout->node)) ||
		    bpf_probe_read_user(&r->nodes, 4, (const void *)(address + layout->nnodes)) || r->node < 0 ||
		    r->node >= r->nodes || r->nodes > MAX_RANKS) {
			r->node = UNKNOWN_INT;
			r->nodes = UNKNOWN_INT;
		}
	}
	if (layout->async_result != ABSENT && r->event == COMM_SEEN &&
	    !bpf_probe_read_user(&value, 4, (const void *)(address + layout->async_result)))
		r->result = value < UNKNOWN_BYTE ? value : UNKNOWN_BYTE;
	if (layout->abort_flag != ABSENT &&
	    !bpf_probe_read_user(&word, 8, (const void *)(address + layout->abort_flag)) && word &&
	    !bpf_probe_read_user(&value, 4, (const void *)word))
		r->aborted = value != 0;
	if (layout->comm_name != ABSENT && !r->name[0])
		read_name(r, address + layout->comm_name);
	return 0;
}

/*
 * Reads the identity from the struct. Returns 1 if that succeeds, 0 if the struct cannot be read, and -1 if the struct
 * has another hash than the unique id of the call that made the communicator.
 */
static __always_inline int comm_adopt(struct nccl_comm *comm, __u64 address)
{
	struct comm_block block = {};

	if (comm->layout == NO_LAYOUT || !read_block(&block, address + comm->comm_hash))
		return 0;
	if (comm->identity == IDENTITY_UNIQUE_ID && block.hash != comm->hash)
		return -1;
	comm->hash = block.hash;
	comm->rank = block.rank;
	comm->size = block.size;
	comm->device = block.device;
	comm->identity = IDENTITY_STRUCT;
	return 1;
}

static __always_inline void comm_lay_out(struct nccl_thread *thread, struct nccl_comm *comm, __u64 address)
{
	struct nccl_layout *layout;
	__u32 index;

	thread->found = NO_LAYOUT;
	thread->scanned = 0;
	if (has_magic(address))
		find_layout(thread, address);
	index = thread->found;
	layout = bpf_map_lookup_elem(&nccl_layouts, &index);

	comm->layout = layout ? index : NO_LAYOUT;
	comm->scanned = thread->scanned;
	comm->end_magic = layout ? layout->end_magic : ABSENT;
	comm->comm_hash = layout ? layout->comm_hash : ABSENT;
}

static __always_inline void comm_tell(struct nccl_thread *thread, struct nccl_comm *comm, __u64 address)
{
	__u32 index = comm->layout;
	struct nccl_layout *layout = bpf_map_lookup_elem(&nccl_layouts, &index);

	comm_identify(&thread->said, comm, address);
	if (layout && comm->identity == IDENTITY_STRUCT)
		comm_details(&thread->said, layout, address);
	if (thread->said.event == COMM_SEEN && thread->said.result != UNKNOWN_BYTE)
		comm->async_result = thread->said.result;
	RING_PUSH(communicators, &thread->said);
}

/*
 * Updates the map for a communicator at `address` that is new, has changed, or has perhaps become readable. Afterwards
 * the map has its current state, or no entry. A global function, as the programs' common path does not call it.
 */
__noinline int comm_meet(__u64 address, __u64 now)
{
	struct nccl_comm comm = {.base = UNKNOWN_WORD, .rank = UNKNOWN_INT, .size = UNKNOWN_INT, .device = UNKNOWN_INT};
	struct nccl_thread *thread = same_thread();
	struct nccl_comm *known;
	struct comm_key key;
	int adopted;

	if (!thread)
		return 0;
	key = comm_key(thread, address);
	known = bpf_map_lookup_elem(&nccl_comms, &key);
	/* If the struct's identity has changed, the address now belongs to another communicator. */
	if (known && known->identity != IDENTITY_STRUCT && known->magic == has_magic(address))
		comm = *known;
	else if (!has_magic(address))
		goto gone;
	else
		comm.magic = 1;
	comm_lay_out(thread, &comm, address);
	adopted = comm_adopt(&comm, address);
	if (adopted < 0) {
		comm.identity = IDENTITY_NONE;
		comm.maker = MADE_UNKNOWN;
		comm.base = UNKNOWN_WORD;
		comm.count = 0;
		comm.children = 0;
		adopted = comm_adopt(&comm, address);
	}
	/* The communicator is not complete yet, and the call that makes it was not seen. */
	if (!adopted && comm.layout != NO_LAYOUT && comm.maker == MADE_UNKNOWN)
		goto gone;
	if (adopted || !known) {
		comm_say(&thread->said, now, COMM_SEEN);
		comm_tell(thread, &comm, address);
	}
	bpf_map_update_elem(&nccl_comms, &key, &comm, BPF_ANY);
	return 0;
gone:
	if (known)
		bpf_map_delete_elem(&nccl_comms, &key);
	return 0;
}

/* Whether the communicator at the address is still the one in the map, as far as can be seen. */
static __always_inline int comm_holds(struct nccl_comm *comm, __u64 address)
{
	struct comm_block block = {};
	struct nccl_layout *next;

	/* Hash and rank prove more than the magic words: a freed communicator has no rank any more (init.cc, commPoison). */
	if (comm->identity == IDENTITY_STRUCT)
		return !bpf_probe_read_user(&block, sizeof(block), (const void *)(address + comm->comm_hash)) &&
		       block.hash == comm->hash && block.rank == comm->rank && block.size == comm->size &&
		       block.device == comm->device;
	if (comm->layout != NO_LAYOUT || has_magic(address) != comm->magic)
		return 0;
	if (!comm->magic)
		return 1;
	/* Searches again after a layout was added, and now and then: the struct's end may not have been in memory. */
	next = bpf_map_lookup_elem(&nccl_layouts, &comm->scanned);
	return !(next && next->end_magic) && ++comm->met % LOOK_AGAIN;
}

/* The communicator at `address`, or NULL if it is unknown. */
static __always_inline struct nccl_comm *comm_at(struct nccl_thread *thread, __u64 address, __u64 now)
{
	struct comm_key key = comm_key(thread, address);
	struct nccl_comm *comm = bpf_map_lookup_elem(&nccl_comms, &key);

	if (comm && comm->identity == IDENTITY_STRUCT && thread->held_comm == address && now - thread->held < HELD_NS)
		return comm;
	if (comm && comm_holds(comm, address)) {
		thread->held_comm = address;
		thread->held = now;
		return comm;
	}
	comm_meet(address, now);
	return bpf_map_lookup_elem(&nccl_comms, &key);
}

/*
 * Sets `base` from the struct, which counts launches: outside of a group, and without a call in progress, its counts
 * include all calls before this call.
 */
static __noinline int comm_count_from(struct nccl_comm *comm, __u64 address)
{
	__u32 index = comm->layout, result = 0;
	struct nccl_layout *layout = bpf_map_lookup_elem(&nccl_layouts, &index);
	__u64 counts[COUNTED] = {}, sum;

	if (!layout || layout->seq_number == ABSENT || layout->seq_count < COUNTED || layout->seq_count == ABSENT)
		return 0;
	if (layout->async_result != ABSENT &&
	    (bpf_probe_read_user(&result, 4, (const void *)(address + layout->async_result)) || result))
		return 0;
	if (bpf_probe_read_user(counts, sizeof(counts), (const void *)(address + layout->seq_number)))
		return 0;
	sum = counts[0] + counts[1] + counts[2] + counts[3] + counts[4];
	if (sum >= comm->count && sum < 1ULL << 62)
		comm->base = sum - comm->count;
	return 0;
}

#endif
