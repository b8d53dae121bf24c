/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every program does before its own work: stop when it is paused or when nobody has listened for a minute, count
 * the hit, and keep to the budget of its probe.
 */
#ifndef PROBING_GUARD_BPF_H
#define PROBING_GUARD_BPF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define HEARTBEAT_LIMIT_NS 60000000000ULL
#define SECOND_NS 1000000000ULL
#define PROBE_SLOTS 256

/* Written by the loader (session.py). */
struct control {
	__u64 heartbeat_ns; /* CLOCK_MONOTONIC */
	__u32 paused;
	__u32 generation; /* another one when programs were off meanwhile: what they had begun is void */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct control);
} control SEC(".maps");

/* On each CPU: sharing one counter between CPUs would cost more than the rest of the guard. */
struct hit {
	__u64 hits;
	__u64 refused; /* came after the budget was spent */
	__u64 second;
	__u64 in_second;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PROBE_SLOTS);
	__type(key, __u32);
	__type(value, struct hit);
} hits SEC(".maps");

/* The switch of a probe. A CPU that sees more than `budget` hits in one second sets `off_ns`; the loader clears it. */
struct budget {
	__u64 off_ns;
	__u64 budget; /* 0: none */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBE_SLOTS);
	__type(key, __u32);
	__type(value, struct budget);
} budgets SEC(".maps");

/* What the kernel has, found by trying, set before loading: what it lacks is dead code to the verifier. */
const volatile __u32 has_cookie = 0;
/* The cookie of this copy of the program, where the kernel has no attach cookies. */
const volatile __u64 fixed_cookie = 0;

/*
 * Kernels from 6.13 assume that no program of this type is preempted, and uprobes are (OBI #3056). A compile-time
 * choice, and an object of its own: 5.13 to 5.15 refuse a call of an unknown kernel function even in dead code
 * (Linux kernel commit a5d827275241 ("bpf: Be conservative while processing invalid kfunc calls") (in v5.16)).
 */
#ifdef PROBING_PREEMPT
extern void bpf_preempt_disable(void) __ksym;
extern void bpf_preempt_enable(void) __ksym;
#define GUARD_ENTER() bpf_preempt_disable()
#define GUARD_LEAVE() bpf_preempt_enable()
#else
#define GUARD_ENTER() ((void)0)
#define GUARD_LEAVE() ((void)0)
#endif

struct probe {
	__u64 cookie; /* the low 16 bits are the probe's slot, the rest is the attacher's */
	__u64 now;    /* CLOCK_MONOTONIC, ns */
};

static __always_inline int guard_open(__u64 now)
{
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	return c && !c->paused && now < c->heartbeat_ns + HEARTBEAT_LIMIT_NS;
}

static __always_inline int guard_budget(__u32 slot, __u64 now)
{
	struct budget *budget = bpf_map_lookup_elem(&budgets, &slot);
	struct hit *hit = bpf_map_lookup_elem(&hits, &slot);
	__u64 second = now / SECOND_NS;

	if (!budget || !hit)
		return 0;
	hit->hits++;
	if (budget->off_ns) {
		hit->refused++;
		return 0;
	}
	if (hit->second != second) {
		hit->second = second;
		hit->in_second = 0;
	}
	hit->in_second++;
	if (budget->budget && hit->in_second > budget->budget) {
		budget->off_ns = now;
		hit->refused++;
		return 0;
	}
	return 1;
}

static __always_inline __u64 guard_cookie(void *ctx)
{
	return has_cookie ? bpf_get_attach_cookie(ctx) : fixed_cookie;
}

/* A program on a tracepoint that is attached when somebody asks for it (session.py), not when the session opens. */
#define ON_DEMAND(name) const volatile __u8 name##_on_demand = 1

/* UPROBE(name) { ... } is a program on user code; its body sees `void *ctx` and `struct probe *probe`. */
#define UPROBE(name)                                                                                                   \
	static __always_inline void name##_body(void *ctx, struct probe *probe);                                       \
	SEC("uprobe") int name(void *ctx)                                                                              \
	{                                                                                                              \
		struct probe probe;                                                                                    \
                                                                                                                       \
		GUARD_ENTER();                                                                                         \
		probe.now = bpf_ktime_get_ns();                                                                        \
		if (guard_open(probe.now)) {                                                                           \
			probe.cookie = guard_cookie(ctx);                                                              \
			if (guard_budget(probe.cookie & 0xffff, probe.now))                                            \
				name##_body(ctx, &probe);                                                              \
		}                                                                                                      \
		GUARD_LEAVE();                                                                                         \
		return 0;                                                                                              \
	}                                                                                                              \
	static __always_inline void name##_body(void *ctx, struct probe *probe)

#endif
