/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prologue of every program: it stops when programs are paused or the collector has been silent for a minute, counts
 * the hit, and keeps to the budget of its probe and process.
 */
#ifndef PROBING_GUARD_BPF_H
#define PROBING_GUARD_BPF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define HEARTBEAT_LIMIT_NS 60000000000ULL
#define SECOND_NS 1000000000ULL
#define PROBE_SLOTS 256
#define BUDGET_PROCESSES 4096
/* A probe is switched off when one CPU accepts this multiple of its budget in a second. */
#define PROBE_BUDGETS 8

/* Written by the loader (session.py). */
struct control {
	__u64 heartbeat_ns; /* CLOCK_MONOTONIC */
	__u32 paused;	    /* 0: the programs run; else what pauses them, for the next loader */
	__u32 generation; /* changes after a time without programs: calls that began before it are void */
	__u64 paused_ns;  /* CLOCK_MONOTONIC: since when */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct control);
} control SEC(".maps");

/* Per CPU: a counter shared between CPUs would cost more than the rest of the guard. */
struct hit {
	__u64 hits;
	__u64 refused; /* hits whose programs did nothing */
	__u64 second;
	__u64 in_second; /* hits of that second that were not refused */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PROBE_SLOTS);
	__type(key, __u32);
	__type(value, struct hit);
} hits SEC(".maps");

/*
 * In each second, all processes share the first half of `budget` on a CPU, which costs no lookup in another map. After
 * that, each process has the other half for itself.
 */
struct budget {
	__u64 off_ns;	  /* when the probe was switched off for all; the loader clears it */
	__u64 budget;	  /* 0: none */
	__u64 refused_ns; /* not later than the last refusal of a hit */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBE_SLOTS);
	__type(key, __u32);
	__type(value, struct budget);
} budgets SEC(".maps");

struct process_budget_key {
	__u32 tgid;
	__u32 slot;
};

struct process_budget {
	__u64 second;
	__u64 in_second; /* hits after the first half, on all CPUs */
	__u64 refused;
	__u64 refused_ns; /* time of the last refusal */
};

/* Processes that hit a probe after the first half of its budget; the loader reads the refused hits of each. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, BUDGET_PROCESSES);
	__type(key, struct process_budget_key);
	__type(value, struct process_budget);
} process_budgets SEC(".maps");

/* Only for the collector: hits that were refused while no collector ran are reported by the next one (losses.py). */
struct refusals_reported {
	__u64 refused;
	__u64 ts; /* UTC ns */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBE_SLOTS);
	__type(key, __u32);
	__type(value, struct refusals_reported);
} refusals_reported SEC(".maps");

/* Features of the kernel, set before loading: code for a missing feature is dead to the verifier. */
const volatile __u32 has_cookie = 0;
/* The cookie of this copy of the program, for kernels without attach cookies. */
const volatile __u64 fixed_cookie = 0;

/*
 * Kernels from 6.13 on assume that no program of this type is preempted, but uprobes are (OBI #3056). The calls below
 * need an object of their own, since 5.13 to 5.15 refuse a call of an unknown kernel function even in dead code
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
	__u64 cookie; /* the low 16 bits are the probe's slot; the source that attaches chooses the rest */
	__u64 now;    /* CLOCK_MONOTONIC, ns */
};

static __always_inline int guard_open(__u64 now)
{
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	return c && !c->paused && now < c->heartbeat_ns + HEARTBEAT_LIMIT_NS;
}

/*
 * Whether the calling process may hit a probe once more after the CPU has used half the budget in this second. Not
 * inlined: it runs rarely, and would lengthen the verification of each program.
 */
static __noinline int guard_process(struct budget *budget, struct hit *hit, __u32 slot, __u64 now)
{
	struct process_budget_key key = {.tgid = bpf_get_current_pid_tgid() >> 32, .slot = slot};
	struct process_budget *own = bpf_map_lookup_elem(&process_budgets, &key);
	__u64 second = now / SECOND_NS;

	if (!own) {
		struct process_budget first = {.second = second};

		bpf_map_update_elem(&process_budgets, &key, &first, BPF_NOEXIST);
		own = bpf_map_lookup_elem(&process_budgets, &key);
		if (!own)
			return 0;
	}
	if (own->second < second) {
		own->second = second;
		own->in_second = 0;
	}
	if (own->in_second >= budget->budget - budget->budget / 2) {
		__sync_fetch_and_add(&own->refused, 1);
		own->refused_ns = now;
		budget->refused_ns = now;
		return 0;
	}
	__sync_fetch_and_add(&own->in_second, 1);
	if (hit->in_second >= PROBE_BUDGETS * budget->budget) {
		budget->off_ns = now;
		return 0;
	}
	return 1;
}

static __always_inline int guard_budget(__u32 slot, __u64 now)
{
	struct budget *budget = bpf_map_lookup_elem(&budgets, &slot);
	struct hit *hit = bpf_map_lookup_elem(&hits, &slot);
	__u64 second = now / SECOND_NS;

	if (!budget || !hit)
		return 0;
	hit->hits++;
	if (hit->second != second) {
		hit->second = second;
		hit->in_second = 0;
	}
	if (budget->off_ns || (budget->budget && hit->in_second >= budget->budget / 2 &&
			       !guard_process(budget, hit, slot, now))) {
		hit->refused++;
		return 0;
	}
	hit->in_second++;
	return 1;
}

/* Whether a hit of the probe by the calling process may have been refused since `t`. */
static __always_inline int guard_refused_since(__u32 slot, __u64 t)
{
	struct process_budget_key key = {.tgid = bpf_get_current_pid_tgid() >> 32, .slot = slot};
	struct budget *budget = bpf_map_lookup_elem(&budgets, &slot);
	struct process_budget *own;

	if (!budget || budget->off_ns)
		return 1;
	if (budget->refused_ns < t)
		return 0;
	own = bpf_map_lookup_elem(&process_budgets, &key);
	return own && own->refused_ns >= t;
}

static __always_inline __u64 guard_cookie(void *ctx)
{
	return has_cookie ? bpf_get_attach_cookie(ctx) : fixed_cookie;
}

/* A program on a tracepoint that is attached on request (session.py), not when the session opens. */
#define ON_DEMAND(name) const volatile __u8 name##_on_demand = 1

/* UPROBE(name) { ... } is a program on user code; its body can use `void *ctx` and `struct probe *probe`. */
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
