/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The maps of the Python sampler, and the walk of the calling thread's Python frames. The thread does not run meanwhile,
 * so its chain of frames does not change; its pointers may hold anything, so every read is bounded.
 */
#ifndef PROBING_PYTHON_WALK_BPF_H
#define PROBING_PYTHON_WALK_BPF_H

#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "python.bpf.h"
#include "regs.bpf.h"
#include "shares.bpf.h"

/* The fields that are read of a frame lie within this number of bytes, and so do the fields of a code object. */
#define WINDOW 128
#define NO_SHIMS 0xff
#define PF_EXITING 0x4
/* FRAME_OWNED_BY_GENERATOR of CPython 3.11 and later. */
#define OWNER_GENERATOR 1
/* Larger than any byte: no owner is a shim. */
#define ABOVE_BYTES 0x100
#define X86_CS 136
#define ARM64_PSTATE 264

/* Preallocated, as programs on perf events require. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2048);
	__type(key, __u32);
	__type(value, struct python_process);
} python_processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct python_thread);
} python_threads SEC(".maps");

/* Stacks that were reported already: only a new stack wakes the decoder. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u8);
} python_seen SEC(".maps");

RING(python_samples, struct python_sample, 8 << 20);

/* The slots under which left_out counts samples, and times off the CPU, of processes that used up their share. */
#define SAMPLES_SLOT 254
#define AWAY_SLOT 255
/* While the ring is at least half full, one process may fill at most one part of it in RING_SHARES. */
#define RING_SHARES 8

/* A process's share of the ring and of the map `python_off`, by tgid. */
struct python_share {
	__u64 since; /* position in the ring from which `used` counts; moves on once the reader is past it */
	__u64 used;  /* bytes */
	__u64 pass;  /* the flush that counted `away` last */
	__u64 away;  /* approximate number of its threads in python_off */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct python_share);
} python_shares SEC(".maps");

/* The layout, the windows that are read of frames and code objects, and the least owner whose frames do not count. */
struct python_plan {
	struct python_layout layout;
	__u32 frame_size;
	__u32 code_begin;
	__u32 code_size;
	__u32 shim_owner;
};

/* `frame` and `code` are windows of the target's memory. */
struct python_scratch {
	__u8 frame[WINDOW];
	__u8 code[WINDOW];
	struct python_plan plan;
};

struct task_struct___x86 {
	struct {
		unsigned long fsbase;
	} thread;
} __attribute__((preserve_access_index));

/* A random number below `bound`. */
static __always_inline __u32 below(__u32 bound)
{
	return (__u64)bpf_get_prandom_u32() * bound >> 32;
}

static __always_inline __u64 word_at(const __u8 *window, __u32 offset)
{
	return *(const __u64 *)(window + (offset & (WINDOW - 8)));
}

static __always_inline long read_word(__u64 *value, __u64 address)
{
	return bpf_probe_read_user(value, sizeof(*value), (const void *)address);
}

static __always_inline __u32 half_at(const __u8 *window, __u32 offset)
{
	return *(const __u32 *)(window + (offset & (WINDOW - 4)));
}

static __always_inline __u32 larger(__u32 a, __u32 b)
{
	return a > b ? a : b;
}

static __always_inline __u32 smaller(__u32 a, __u32 b)
{
	return a < b ? a : b;
}

static __always_inline __u64 mixed(__u64 hash, __u64 value)
{
	hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 29;
}

/* Whether this thread still has this PyThreadState. On other architectures than x86-64 only the state is checked. */
static __always_inline int same_thread(struct task_struct *task, const struct python_layout *layout,
				       const struct python_thread *thread)
{
	struct task_struct___x86 *x86 = (struct task_struct___x86 *)task;
	__u64 value;

	if (bpf_core_field_exists(x86->thread.fsbase) && BPF_CORE_READ(x86, thread.fsbase) != thread->thread_id)
		return 0;
	return !read_word(&value, thread->state + layout->thread_id) && value == thread->thread_id;
}

static __always_inline __u8 gil_flags(const struct python_layout *layout, __u64 gil, __u64 state)
{
	__u64 holder;
	__s32 locked = 1;

	switch (layout->gil_kind) {
	case GIL_CURRENT:
		if (read_word(&holder, gil))
			return FLAG_GIL_UNKNOWN;
		break;
	case GIL_STRUCT:
		if (read_word(&holder, gil + layout->gil_holder) ||
		    bpf_probe_read_user(&locked, sizeof(locked), (const void *)(gil + layout->gil_locked)))
			return FLAG_GIL_UNKNOWN;
		break;
	default:
		return FLAG_GIL_UNKNOWN;
	}
	return locked > 0 && holder == state ? FLAG_GIL : 0;
}

/* Returns 0 for a layout whose fields lie too far apart. */
static __always_inline int plan_make(struct python_plan *plan, const struct python_layout *layout)
{
	__u32 begin = smaller(smaller(smaller(layout->code_filename, layout->code_name), layout->code_short_name),
			      smaller(layout->code_linetable, layout->code_firstlineno)) & ~7U;
	__u32 end = larger(larger(larger(layout->code_filename, layout->code_name), layout->code_short_name),
			   larger(layout->code_linetable, layout->code_firstlineno)) + 8;
	__u32 frame_size = larger(larger(layout->frame_previous, layout->frame_code), layout->frame_instr) + 8;

	if (layout->frame_owner != ABSENT)
		frame_size = larger(frame_size, layout->frame_owner + 1);
	plan->layout = *layout;
	plan->frame_size = frame_size;
	plan->code_begin = begin;
	plan->code_size = end - begin;
	plan->shim_owner = layout->shim_owner == NO_SHIMS ? ABOVE_BYTES : layout->shim_owner;
	return frame_size <= WINDOW && end - begin <= WINDOW;
}

/*
 * False if the last frame that was read has a caller but no link to it, since the link of this frame, or of a frame
 * above it, is not set yet. The outermost frame is a shim (3.12+) or, in older versions, not a generator's.
 */
static __always_inline int is_outermost(const struct python_scratch *scratch)
{
	const volatile struct python_plan *plan = &scratch->plan;
	__u8 owner = scratch->frame[plan->layout.frame_owner & (WINDOW - 1)];

	if (plan->layout.frame_owner == ABSENT)
		return 1;
	return plan->shim_owner == ABOVE_BYTES ? owner != OWNER_GENERATOR : owner >= plan->shim_owner;
}

/*
 * Fills the sample's frames, depth, hash and flags according to `scratch->plan`. Bytes after the frames do not change.
 *
 * The verifier follows the loop once for each combination of values that it knows. It knows no values in memory, so the
 * plan and the depth are read from memory at each use.
 */
static __always_inline void python_walk(struct python_scratch *scratch, struct python_sample *sample, __u64 state)
{
	const volatile struct python_plan *plan = &scratch->plan;
	const volatile struct python_layout *layout = &plan->layout;
	volatile __u16 *depth = &sample->depth;
	__u64 frame, hash = 0;
	__u8 flags = 0;

	*depth = 0;
	if (read_word(&frame, state + layout->thread_frame) ||
	    (layout->cframe_frame != ABSENT && frame && read_word(&frame, frame + layout->cframe_frame))) {
		flags = FLAG_FAULT;
		frame = 0;
	}
	for (int i = 0; i < PYTHON_FRAMES && frame; i++) {
		struct python_frame *slot = &sample->frames[*depth & (PYTHON_FRAMES - 1)];
		__u32 begin = plan->code_begin, offset, check;
		__u64 code, instr, name_hash;

		if (bpf_probe_read_user(scratch->frame, plan->frame_size & (2 * WINDOW - 1), (const void *)frame)) {
			flags = FLAG_FAULT;
			break;
		}
		frame = word_at(scratch->frame, layout->frame_previous);
		if (scratch->frame[layout->frame_owner & (WINDOW - 1)] >= plan->shim_owner)
			continue;
		code = word_at(scratch->frame, layout->frame_code) & ~(__u64)layout->tag_mask;
		if (bpf_probe_read_user(scratch->code, plan->code_size & (2 * WINDOW - 1), (const void *)(code + begin)) ||
		    read_word(&name_hash, word_at(scratch->code, layout->code_short_name - begin) + STR_HASH)) {
			flags = FLAG_FAULT;
			break;
		}
		check = code_check(word_at(scratch->code, layout->code_filename - begin),
				   word_at(scratch->code, layout->code_name - begin),
				   word_at(scratch->code, layout->code_linetable - begin),
				   half_at(scratch->code, layout->code_firstlineno - begin), name_hash);
		instr = word_at(scratch->frame, layout->frame_instr);
		if (layout->instr == INSTR_ADDRESS)
			offset = instr - code - layout->code_adaptive;
		else
			offset = layout->instr == INSTR_UNITS ? instr * 2 : instr;
		slot->code = code;
		slot->offset = offset;
		slot->check = check;
		hash = mixed(mixed(hash, code), (__u64)offset << 32 | check);
		++*depth;
	}
	if (frame && !flags)
		flags = FLAG_CUT;
	else if (!flags && *depth && !is_outermost(scratch))
		flags = FLAG_FAULT;
	sample->flags = flags;
	sample->hash = hash;
}

/* The address at which the calling thread left user space; 0 before Linux 5.15. */
static __always_inline __u64 task_user_ip(void)
{
	__u64 regs, ip = 0;

	if (!bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_task_pt_regs))
		return 0;
	regs = bpf_task_pt_regs(bpf_get_current_task_btf());
	bpf_probe_read_kernel(&ip, sizeof(ip), (const void *)(regs + (target_arch == ARCH_X86_64 ? X86_IP : ARM64_PC)));
	return ip;
}

/* A sample of the calling thread without its frames. */
static __always_inline void sample_begin(struct python_sample *sample, __u64 start_ns, __u64 now, __u8 kind)
{
	__u64 thread = bpf_get_current_pid_tgid();

	sample->start_ns = start_ns;
	sample->ktime = now;
	sample->duration_ns = 0;
	sample->user_ip = 0;
	sample->tgid = thread >> 32;
	sample->tid = (__u32)thread;
	sample->kind = kind;
	sample->reserved = 0;
}

/* The hash is of the thread, so that each unresolved thread wakes the reader once. */
static __always_inline void sample_unresolved(struct python_sample *sample)
{
	sample->kind = SAMPLE_UNRESOLVED;
	sample->depth = 0;
	sample->flags = FLAG_GIL_UNKNOWN;
	sample->hash = mixed(SAMPLE_UNRESOLVED, sample->tid);
}

static __noinline struct python_share *share_of(__u32 tgid)
{
	struct python_share *share = bpf_map_lookup_elem(&python_shares, &tgid), first = {};

	if (share)
		return share;
	bpf_map_update_elem(&python_shares, &tgid, &first, BPF_NOEXIST);
	return bpf_map_lookup_elem(&python_shares, &tgid);
}

/* Whether the ring may take one more sample of a process: a process with very many must leave room for the others. */
static __always_inline int share_take(struct python_sample *sample)
{
	__u64 size = bpf_ringbuf_query(&python_samples, BPF_RB_RING_SIZE);
	__u64 read = bpf_ringbuf_query(&python_samples, BPF_RB_CONS_POS);
	__u64 written = bpf_ringbuf_query(&python_samples, BPF_RB_PROD_POS);
	struct python_share *share = share_of(sample->tgid);

	if (!share)
		return 1;
	if (read > share->since || share->since > written) {
		share->since = written;
		share->used = 0;
	}
	if (share->used >= size / RING_SHARES && written - read >= size / 2) {
		left_out(SAMPLES_SLOT, sample->tgid, bpf_ktime_get_ns());
		return 0;
	}
	share->used += sizeof(*sample);
	return 1;
}

/* Pushes a sample, and wakes the reader if its stack is new. */
static __always_inline void sample_push(struct python_sample *sample)
{
	__u64 key = mixed(sample->hash, sample->start_ns);
	__u8 one = 1;

	if (!share_take(sample))
		return;
	if (bpf_map_lookup_elem(&python_seen, &key)) {
		RING_PUSH_FLAGS(python_samples, sample, BPF_RB_NO_WAKEUP);
	} else if (!RING_PUSH_FLAGS(python_samples, sample, BPF_RB_FORCE_WAKEUP)) {
		bpf_map_update_elem(&python_seen, &key, &one, BPF_ANY);
	}
}

#endif
