// SPDX-License-Identifier: Apache-2.0
/*
 * Runs of optimizers: calls of torch operators that hardly any other code calls. Calls that follow each other closely are
 * counted as one burst, so that an optimizer with many groups of parameters makes one record.
 */
#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "regs.bpf.h"

/* A longer gap begins a new burst. Training steps take longer than this. */
#define BURST_GAP_NS 1000000ULL
#define BURSTS_A_SECOND 512
#define MAX_STREAMS 4096
/* A polynomial hash: the signs of two bursts can be combined into the sign of one (steps/optimizer_steps.py). */
#define SIGN_FACTOR 0x9E3779B97F4A7C15ULL

/* The begin of a burst, with data of the burst before; `before_calls` is 0 if these are missing. */
struct optimizer_burst {
	__u64 t; /* of its first call, CLOCK_MONOTONIC ns */
	__u64 start_ns;
	__u64 before_last; /* time of the last call of the burst before */
	__u64 before_sign; /* hash of the numbers of tensors of its calls, in order */
	__u32 before_calls;
	__u32 left_out; /* bursts without a record since the last record: too many in a second, or the ring was full */
	__u32 tgid;
	__u32 tid;
	__u32 which; /* the slot of the probe */
	__u32 reserved;
};

RING(optimizer_steps, struct optimizer_burst, 1 << 18);

struct stream {
	__u32 tgid;
	__u32 which;
};

struct burst {
	__u64 start_ns; /* looked up at the begin of a burst only: a pid is not reused within the gap */
	__u64 last;
	__u64 sign;
	__u64 second;
	__u32 calls;
	__u32 in_second;
	__u32 left_out;
	__u32 generation;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_STREAMS);
	__type(key, struct stream);
	__type(value, struct burst);
} optimizer_bursts SEC(".maps");

static __always_inline __u32 generation_now(void)
{
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	return c ? c->generation : 0;
}

static __always_inline void push(struct stream *stream, struct burst *before, __u64 now)
{
	struct optimizer_burst r = {};

	r.t = now;
	r.start_ns = before->start_ns;
	r.before_last = before->last;
	r.before_sign = before->sign;
	r.before_calls = before->calls;
	r.left_out = before->left_out;
	r.tgid = stream->tgid;
	r.tid = current_tid();
	r.which = stream->which;
	before->left_out = RING_PUSH(optimizer_steps, &r) ? before->left_out + 1 : 0;
}

static __always_inline void begin(struct stream *stream, struct burst *burst, __u64 now)
{
	__u32 generation = generation_now();
	__u64 start_ns = current_start_ns();

	/* The programs were off meanwhile, or the burst before is of another process with this pid. */
	if (burst->generation != generation || burst->start_ns != start_ns)
		burst->calls = 0;
	burst->generation = generation;
	burst->start_ns = start_ns;
	if (burst->second != now / SECOND_NS) {
		burst->second = now / SECOND_NS;
		burst->in_second = 0;
	}
	if (burst->in_second < BURSTS_A_SECOND) {
		burst->in_second++;
		push(stream, burst, now);
	} else {
		burst->left_out++;
	}
	burst->calls = 0;
	burst->sign = 0;
}

/* The first argument is a list of tensors, by value: its address and its length. */
UPROBE(optimizer_list)
{
	struct stream stream = {};
	struct burst *burst, fresh = {};

	stream.tgid = current_tgid();
	stream.which = probe->cookie & 0xffff;
	burst = bpf_map_lookup_elem(&optimizer_bursts, &stream);
	if (!burst) {
		bpf_map_update_elem(&optimizer_bursts, &stream, &fresh, BPF_ANY);
		burst = bpf_map_lookup_elem(&optimizer_bursts, &stream);
		if (!burst) {
			RING_LOST(optimizer_steps);
			return;
		}
	}
	/* Threads may arrive in any order. */
	if (probe->now > burst->last + BURST_GAP_NS)
		begin(&stream, burst, probe->now);
	burst->last = probe->now;
	burst->calls++;
	burst->sign = burst->sign * SIGN_FACTOR + argument(ctx, 1) + 1;
}

char LICENSE[] SEC("license") = "GPL";
