// SPDX-License-Identifier: Apache-2.0
/*
 * Off-CPU time of Python threads: the stack with which a thread left the CPU, and how long it was away.
 *
 * A thread's context switches are counted in blocks. One switch of each block is chosen at random, and its stack is
 * walked. Its time off the CPU is multiplied by the size of the block, so sums are right for blocks of any size. The
 * other switches cost one lookup of the thread. A wait of a second or more counts once, as it is reported while it
 * lasts. For long waits that were not chosen, and for threads that were off the CPU before the sampler began, the
 * collector makes the entry (sampling/off_cpu/kernel_entries.py). Needs Linux 5.13 (atomics that fetch, a walk over a
 * map).
 */
#include "python_walk.bpf.h"

#define TOLD_AFTER_NS SECOND_NS
#define AWAY_ENTRIES 2048
/* The number of entries that one process may have (sampling/off_cpu/kernel_entries.py). */
#define AWAY_SHARE (AWAY_ENTRIES / 4)

/*
 * A thread that is off the CPU. `since`: the begin of the time that is not reported yet, 0 while none may be reported.
 * The program that changes `since` is the one that reports the time before. `sample.ktime`: when the thread left.
 */
struct python_off {
	__u64 since;
	__u64 switches; /* context switches of the thread so far: unchanged until it runs */
	__u32 weight; /* number of switches that the entry stands for */
	__u32 generation;
	struct python_sample sample;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, AWAY_ENTRIES);
	__type(key, __u32);
	__type(value, struct python_off);
} python_off SEC(".maps");

/* The number of flushes: each counts the entries of all processes. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} python_passes SEC(".maps");

struct python_leaving {
	struct python_scratch walk;
	struct python_off entry;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct python_leaving);
} python_leaving SEC(".maps");

/* For the flush, which a context switch may interrupt. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct python_sample);
} python_telling SEC(".maps");

/* Counts a switch. A new second ends the block of the old one, as the thread may leave the CPU less often now. */
static __always_inline void count_switch(struct python_thread *thread, __u64 now)
{
	__u64 second = now / SECOND_NS;

	if (thread->second != second) {
		thread->before = thread->second + 1 == second ? thread->count : 0;
		thread->count = 0;
		thread->left = 0;
		thread->second = second;
	}
	thread->count++;
}

/* Begins a block, whose size is the number of switches for each walk, rounded up or down at random. */
static __always_inline void begin_block(struct python_thread *thread, __u32 rate)
{
	__u64 out_of = larger(thread->count, thread->before);
	__u32 block = (out_of + below(rate)) / rate;

	thread->block = block ? block : 1;
	thread->left = thread->block;
	thread->pick = below(thread->block);
}

static __always_inline __u32 generation(void)
{
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	return c ? c->generation : 0;
}

static __always_inline __u64 switches_of(struct task_struct *task)
{
	return task->nvcsw + task->nivcsw;
}

static __always_inline __u64 passes(void)
{
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&python_passes, &zero);

	return count ? *count : 0;
}

/* The share of a process, with the number of its entries in the map; NULL if the share is used up. */
static __always_inline struct python_share *share_of_away(__u32 tgid)
{
	struct python_share *share = share_of(tgid);
	__u64 pass = passes();

	if (!share)
		return 0;
	/* The last flush found no thread of the process. */
	if (share->pass < pass) {
		share->pass = pass;
		share->away = 0;
	}
	return share->away < AWAY_SHARE ? share : 0;
}

static __always_inline void put_away(struct python_share *share, __u32 tid, struct python_off *entry)
{
	if (!bpf_map_update_elem(&python_off, &tid, entry, BPF_NOEXIST))
		__sync_fetch_and_add(&share->away, 1);
	else if (bpf_map_update_elem(&python_off, &tid, entry, BPF_EXIST))
		RING_LOST(python_samples);
}

/* `prev` is the calling thread, whose memory can still be read. */
static __always_inline void leave(struct task_struct *prev)
{
	__u32 tid = prev->pid, tgid = prev->tgid, zero = 0;
	struct python_process *process;
	struct python_leaving *leaving;
	struct python_thread *thread;
	struct python_scratch *walk;
	struct python_share *share;
	struct python_off *entry;
	__u64 now;

	if (!prev->mm || prev->flags & PF_EXITING)
		return;
	thread = bpf_map_lookup_elem(&python_threads, &tid);
	if (!thread || !thread->state)
		return;
	now = bpf_ktime_get_ns();
	count_switch(thread, now);
	if (thread->left && thread->left - 1 != thread->pick) {
		thread->left--;
		return;
	}
	process = bpf_map_lookup_elem(&python_processes, &tgid);
	if (!process || !process->off_rate || process->start_ns != thread->start_ns)
		return;
	if (!guard_open(now))
		return;
	if (!thread->left)
		begin_block(thread, process->off_rate);
	if (--thread->left != thread->pick)
		return;
	if (process->start_ns != start_ns_of(prev))
		return;
	share = share_of_away(tgid);
	if (!share) {
		left_out(AWAY_SLOT, tgid, now);
		return;
	}
	leaving = bpf_map_lookup_elem(&python_leaving, &zero);
	if (!leaving)
		return;
	walk = &leaving->walk;
	entry = &leaving->entry;
	/* A thread that is not resolved here is reported when it runs. */
	if (!plan_make(&walk->plan, &process->layout) || !same_thread(prev, &walk->plan.layout, thread))
		return;
	sample_begin(&entry->sample, process->start_ns, now, SAMPLE_OFF_CPU);
	entry->sample.user_ip = task_user_ip();
	python_walk(walk, &entry->sample, thread->state);
	entry->sample.flags |= gil_flags(&walk->plan.layout, process->gil, thread->state);
	entry->since = now;
	entry->switches = switches_of(prev);
	entry->weight = thread->block;
	entry->generation = generation();
	put_away(share, tid, entry);
}

static __always_inline void tell(struct python_off *entry, struct python_sample *sample, __u64 since, __u64 now)
{
	__u64 away = now - since;

	if (now - sample->ktime < TOLD_AFTER_NS)
		away *= entry->weight;
	sample->ktime = since;
	sample->duration_ns = away;
	sample_push(sample);
}

static __always_inline void enter(struct task_struct *next)
{
	__u32 tid = next->pid, tgid = next->tgid;
	struct python_share *share;
	struct python_off *entry;
	__u64 now, since;

	if (!next->mm)
		return;
	entry = bpf_map_lookup_elem(&python_off, &tid);
	if (!entry)
		return;
	now = bpf_ktime_get_ns();
	if (!guard_open(now))
		return;
	since = __sync_lock_test_and_set(&entry->since, 0);
	if (since && entry->generation == generation() && entry->switches == switches_of(next) &&
	    entry->sample.start_ns == start_ns_of(next))
		tell(entry, &entry->sample, since, now);
	bpf_map_delete_elem(&python_off, &tid);
	share = bpf_map_lookup_elem(&python_shares, &tgid);
	if (share && share->away)
		__sync_fetch_and_add(&share->away, -1);
}

SEC("tp_btf/sched_switch")
int python_switch(__u64 *ctx)
{
	leave((struct task_struct *)ctx[1]);
	enter((struct task_struct *)ctx[2]);
	return 0;
}
ON_DEMAND(python_switch);

struct flush {
	__u64 now;
	__u64 pass;
	__u32 reported;
};

/* Whether the thread of this entry is still to be reported. */
static __always_inline int sampled(struct python_off *entry)
{
	__u32 tgid = entry->sample.tgid;
	struct python_process *process = bpf_map_lookup_elem(&python_processes, &tgid);

	return process && process->off_rate && process->start_ns == entry->sample.start_ns &&
	       entry->generation == generation();
}

static __always_inline void count_away(__u32 tgid, __u64 pass)
{
	struct python_share *share = share_of(tgid);

	if (!share)
		return;
	if (share->pass != pass) {
		share->pass = pass;
		share->away = 0;
	}
	__sync_fetch_and_add(&share->away, 1);
}

/* The sample is copied before the entry is claimed: once the thread runs, another one may use the entry. */
static long flush_one(void *map, __u32 *tid, struct python_off *entry, struct flush *flush)
{
	__u64 since = entry->since, next = 0;
	struct python_sample *sample;
	__u32 zero = 0;

	count_away(entry->sample.tgid, flush->pass);
	if (!since || since + TOLD_AFTER_NS > flush->now)
		return 0;
	sample = bpf_map_lookup_elem(&python_telling, &zero);
	if (!sample || bpf_probe_read_kernel(sample, sizeof(*sample), &entry->sample))
		return 0;
	if (sampled(entry))
		next = flush->now;
	if (__sync_val_compare_and_swap(&entry->since, since, next) != since)
		return 0;
	if (next) {
		tell(entry, sample, since, flush->now);
		flush->reported++;
	} else {
		bpf_map_delete_elem(map, tid);
	}
	return 0;
}

/* Reports the threads that have been off the CPU for a second since their last report. Returns their number. */
SEC("raw_tp")
int python_off_flush(void *ctx)
{
	struct flush flush = { .now = bpf_ktime_get_ns(), .pass = passes() + 1 };
	__u32 zero = 0;

	if (guard_open(flush.now)) {
		bpf_for_each_map_elem(&python_off, flush_one, &flush, 0);
		bpf_map_update_elem(&python_passes, &zero, &flush.pass, BPF_ANY);
	}
	return flush.reported;
}

char LICENSE[] SEC("license") = "GPL";
