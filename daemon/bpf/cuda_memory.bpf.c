// SPDX-License-Identifier: Apache-2.0
/*
 * Allocations of the CUDA runtime (cuda_runtime_api.h), summed by stack and size in the kernel: allocating and freeing in
 * a loop makes no more rows than doing so once.
 */
#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "regs.bpf.h"

#define FRAMES 32
#define CLASS_BITS 6

/* The most elements of one process, an eighth of each map: it cannot take the room of the others. */
#define MAX_SUMS 32768
#define MAX_LIVE 262144
#define MAX_STACKS 16384
#define OF_PROCESS(most) ((most) / 8)
#define MAX_PROCESSES 16384

/* The part of the attach cookie above the slot. */
enum memory_kind {
	MEMORY_DEVICE = 1,
	MEMORY_ASYNC = 2,
	MEMORY_MANAGED = 3,
	MEMORY_HOST = 4,
};
#define COOKIE_KIND(probe) ((probe)->cookie >> 16 & 0xff)

/* The call that a thread is in. */
struct memory_call {
	__u64 pointer; /* the variable that gets the address */
	__u64 size;
	__u64 stack_pointer;
	__u64 returns_to;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct memory_call);
} cuda_memory_calls SEC(".maps");

/* Allocations of one process, stack, kind and size class (up to 2^class bytes). */
struct memory_key {
	__u64 start_ns;
	__u64 stack; /* hash of the frames */
	__u32 tgid;
	__u16 kind;
	__u16 size_class;
};

struct memory_sum {
	__u64 allocations;
	__u64 frees;
	__u64 bytes;
	__u64 live;
	__u64 live_bytes;
	__u64 errors;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_SUMS);
	__type(key, struct memory_key);
	__type(value, struct memory_sum);
} cuda_memory_sums SEC(".maps");

struct pointer_key {
	__u64 pointer;
	__u64 start_ns;
	__u64 tgid;
};

struct live_memory {
	__u64 size;
	struct memory_key of;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_LIVE);
	__type(key, struct pointer_key);
	__type(value, struct live_memory);
} cuda_memory_live SEC(".maps");

struct stack_key {
	__u64 stack;
	__u64 start_ns;
	__u64 tgid;
};

struct stack_frames {
	__u64 frames[FRAMES]; /* return addresses, innermost first; 0 ends them */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_STACKS);
	__type(key, struct stack_key);
	__type(value, struct stack_frames);
} cuda_memory_stacks SEC(".maps");

/* Elements of a process in the maps; about, since two threads may count at once, or the collector drops them. */
struct memory_process {
	__s64 sums;
	__s64 live;
	__s64 stacks;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_PROCESSES);
	__type(key, struct process_key);
	__type(value, struct memory_process);
} cuda_memory_processes SEC(".maps");

/* Allocations without room in a map are counted here: this object pushes no records. */
struct memory_lost {
	__u64 sums;
	__u64 live;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct memory_lost);
} cuda_memory_lost SEC(".maps");

static __always_inline void count_lost(int live)
{
	__u32 zero = 0;
	struct memory_lost *lost = bpf_map_lookup_elem(&cuda_memory_lost, &zero);

	if (!lost)
		return;
	if (live)
		lost->live++;
	else
		lost->sums++;
}

static __always_inline struct memory_process *process_of(struct process_key *key)
{
	struct memory_process *process = bpf_map_lookup_elem(&cuda_memory_processes, key), none = {};

	if (process)
		return process;
	bpf_map_update_elem(&cuda_memory_processes, key, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&cuda_memory_processes, key);
}

/*
 * The hash of the calling thread's stack, under which its frames are kept. At the return of a function its own frame is
 * gone and the frame pointer is its caller's. Kernels differ in the innermost frame that they give, so the return
 * address of the function replaces it. The frames take half of the stack that a program has: its callers have little.
 */
static __noinline __u64 note_stack(void *ctx, __u64 returns_to, struct memory_process *process)
{
	struct stack_key key = {.start_ns = current_start_ns(), .tgid = current_tgid()};
	__u64 frames[FRAMES] = {}, hash = 0xcbf29ce484222325ULL;
	int i;

	bpf_get_stack(ctx, frames, sizeof(frames), BPF_F_USER_STACK);
	frames[0] = returns_to;
	for (i = 0; i < FRAMES; i++) {
		hash = (hash ^ frames[i]) * 0x100000001b3ULL;
		hash ^= hash >> 29;
	}
	key.stack = hash;
	if (bpf_map_lookup_elem(&cuda_memory_stacks, &key))
		return hash;
	if (process && process->stacks < OF_PROCESS(MAX_STACKS) &&
	    !bpf_map_update_elem(&cuda_memory_stacks, &key, frames, BPF_NOEXIST))
		__sync_fetch_and_add(&process->stacks, 1);
	return hash;
}

/* The smallest n with size <= 2^n. */
static __always_inline __u16 size_class(__u64 size)
{
	__u64 above = size ? size - 1 : 0;
	__u16 bits = 0;
	int i;

	for (i = CLASS_BITS - 1; i >= 0; i--) {
		__u32 step = 1 << i;

		if (above >> step) {
			above >>= step;
			bits += step;
		}
	}
	return bits + (above ? 1 : 0);
}

static __always_inline struct memory_sum *sum_of(struct memory_key *key, struct memory_process *process)
{
	struct memory_sum *sum = bpf_map_lookup_elem(&cuda_memory_sums, key), none = {};

	if (sum)
		return sum;
	if (process->sums >= OF_PROCESS(MAX_SUMS))
		return 0;
	if (!bpf_map_update_elem(&cuda_memory_sums, key, &none, BPF_NOEXIST))
		__sync_fetch_and_add(&process->sums, 1);
	return bpf_map_lookup_elem(&cuda_memory_sums, key);
}

static __always_inline void freed(struct pointer_key *key, struct memory_process *process)
{
	struct live_memory *found = bpf_map_lookup_elem(&cuda_memory_live, key), live;
	struct memory_sum *sum;

	if (!found)
		return;
	live = *found;
	/* If two threads free it, one succeeds. */
	if (bpf_map_delete_elem(&cuda_memory_live, key))
		return;
	if (process)
		__sync_fetch_and_add(&process->live, -1);
	sum = bpf_map_lookup_elem(&cuda_memory_sums, &live.of);
	if (!sum)
		return;
	__sync_fetch_and_add(&sum->frees, 1);
	__sync_fetch_and_add(&sum->live, -1);
	__sync_fetch_and_add(&sum->live_bytes, -live.size);
}

static __noinline int allocated(struct memory_key *of, struct memory_sum *sum, struct memory_process *process,
				__u64 pointer, __u64 size)
{
	struct pointer_key key = {.pointer = pointer, .start_ns = of->start_ns, .tgid = of->tgid};
	struct live_memory live = {.size = size, .of = *of};

	__sync_fetch_and_add(&sum->allocations, 1);
	__sync_fetch_and_add(&sum->bytes, size);
	/* An older allocation at the same address was freed by a call that is not probed. */
	freed(&key, process);
	if (process->live >= OF_PROCESS(MAX_LIVE) ||
	    bpf_map_update_elem(&cuda_memory_live, &key, &live, BPF_ANY)) {
		count_lost(1);
		return 0;
	}
	__sync_fetch_and_add(&process->live, 1);
	__sync_fetch_and_add(&sum->live, 1);
	__sync_fetch_and_add(&sum->live_bytes, size);
	return 0;
}

/* cudaMalloc(pointer, size) and related calls, with the same first arguments */
UPROBE(cuda_allocate)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct memory_call call = {
		.pointer = argument(ctx, 0),
		.size = argument(ctx, 1),
		.stack_pointer = user_stack_pointer(ctx),
		.returns_to = target_arch == ARCH_X86_64 ? stack_word(ctx, 0) : CTX_LOAD(ctx, ARM64_X(30)),
	};

	bpf_map_update_elem(&cuda_memory_calls, &thread, &call, BPF_ANY);
}

UPROBE(cuda_allocated)
{
	__u64 thread = bpf_get_current_pid_tgid(), pointer = 0, popped = target_arch == ARCH_X86_64 ? 8 : 0;
	struct memory_call *found = bpf_map_lookup_elem(&cuda_memory_calls, &thread), call;
	__u32 result = return_value(ctx);
	struct process_key own = {};
	struct memory_process *process;
	struct memory_key of = {};
	struct memory_sum *sum;

	if (!found || found->stack_pointer + popped != user_stack_pointer(ctx))
		return;
	call = *found;
	found->stack_pointer = 0;
	if (!result && bpf_probe_read_user(&pointer, sizeof(pointer), (const void *)call.pointer))
		return;
	if (!result && !pointer)
		return;
	of.start_ns = current_start_ns();
	of.tgid = current_tgid();
	of.kind = COOKIE_KIND(probe);
	of.size_class = size_class(call.size);
	own.start_ns = of.start_ns;
	own.tgid = of.tgid;
	process = process_of(&own);
	of.stack = note_stack(ctx, call.returns_to, process);
	sum = process ? sum_of(&of, process) : 0;
	if (!sum || !process)
		count_lost(0);
	else if (result)
		__sync_fetch_and_add(&sum->errors, 1);
	else
		allocated(&of, sum, process, pointer, call.size);
}

/*
 * cudaFree(pointer) and related calls. Counted at the entry: when the call returns, another thread may already have the
 * address. A call that fails leaves memory that cannot be used any more.
 */
UPROBE(cuda_free)
{
	struct pointer_key key = {.pointer = argument(ctx, 0)};
	struct process_key own = {};

	if (!key.pointer)
		return;
	own.start_ns = key.start_ns = current_start_ns();
	own.tgid = key.tgid = current_tgid();
	freed(&key, bpf_map_lookup_elem(&cuda_memory_processes, &own));
}

char LICENSE[] SEC("license") = "GPL";
