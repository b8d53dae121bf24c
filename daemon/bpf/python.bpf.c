// SPDX-License-Identifier: Apache-2.0
/*
 * Samples of the Python stacks of the threads that run, at each tick of a CPU's clock. The CPU's other tasks cost a look
 * into one map.
 */
#include "python_walk.bpf.h"

/* What the clock is set to. */
struct python_clock {
	__u32 hz;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct python_clock);
} python_clock SEC(".maps");

struct python_running {
	struct python_scratch walk;
	struct python_sample sample;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct python_running);
} python_running SEC(".maps");

static __always_inline int wanted(const struct python_process *process, __u64 now)
{
	__u32 zero = 0;
	struct python_clock *clock = bpf_map_lookup_elem(&python_clock, &zero);

	return clock && guard_open(now) && chosen(process->rate, clock->hz) && current_start_ns() == process->start_ns;
}

/* The context holds the registers of what was interrupted: the thread's own code, or the kernel's. */
static __always_inline __u64 interrupted_ip(void *ctx)
{
	int user = target_arch == ARCH_X86_64 ? (CTX_LOAD(ctx, X86_CS) & 3) != 0 : (CTX_LOAD(ctx, ARM64_PSTATE) & 15) == 0;

	return user ? user_ip(ctx) : task_user_ip();
}

SEC("perf_event")
int python_on_cpu(struct bpf_perf_event_data *ctx)
{
	__u64 current = bpf_get_current_pid_tgid(), now;
	__u32 tgid = current >> 32, tid = current, zero = 0;
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct python_process *process;
	struct python_running *running;
	struct python_thread *thread;
	struct python_sample *sample;

	/* The idle task. */
	if (!tid)
		return 0;
	process = bpf_map_lookup_elem(&python_processes, &tgid);
	if (!process)
		return 0;
	now = bpf_ktime_get_ns();
	if (!wanted(process, now))
		return 0;
	thread = bpf_map_lookup_elem(&python_threads, &tid);
	if (thread && thread->start_ns != process->start_ns)
		thread = 0;
	if (thread && !thread->state)
		return 0;
	running = bpf_map_lookup_elem(&python_running, &zero);
	if (!running)
		return 0;
	sample = &running->sample;
	sample_begin(sample, process->start_ns, now, SAMPLE_ON_CPU);
	sample->user_ip = interrupted_ip(ctx);
	if (thread && plan_make(&running->walk.plan, &process->layout) &&
	    same_thread(task, &running->walk.plan.layout, thread)) {
		python_walk(&running->walk, sample, thread->state);
		sample->flags |= gil_flags(&running->walk.plan.layout, process->gil, thread->state);
	} else {
		sample_unresolved(sample);
	}
	sample_push(sample);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
