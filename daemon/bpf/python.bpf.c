// SPDX-License-Identifier: Apache-2.0
/*
 * Samples the Python stacks of running threads at each tick of a CPU's clock. A tick that hits any other task costs one
 * map lookup.
 */
#include "python_walk.bpf.h"

#define X86_REGS_BYTES 168
#define ARM64_REGS_BYTES 272

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

/* Nanoseconds between two ticks, which follow the registers in struct bpf_perf_event_data. */
static __always_inline __u64 tick_period(void *ctx)
{
	return target_arch == ARCH_X86_64 ? CTX_LOAD(ctx, X86_REGS_BYTES) : CTX_LOAD(ctx, ARM64_REGS_BYTES);
}

/* A process with a lower rate than the clock's gets a random part of the ticks. */
static __always_inline int ticked(__u32 rate, __u64 period)
{
	__u64 part = rate * period;

	return part + period > SECOND_NS || (__u64)bpf_get_prandom_u32() * SECOND_NS >> 32 < part;
}

/* The context holds the registers at the interrupt, of the thread's own code or the kernel's. */
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
	/* Its memory is being freed. */
	if (BPF_CORE_READ(task, flags) & PF_EXITING)
		return 0;
	now = bpf_ktime_get_ns();
	if (!guard_open(now) || !ticked(process->rate, tick_period(ctx)) || process->start_ns != current_start_ns())
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
