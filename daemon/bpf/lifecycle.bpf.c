// SPDX-License-Identifier: Apache-2.0
/*
 * One record for each process start, program change (execve), choice by the kernel's out-of-memory killer, and exit.
 * Threads make no records.
 */
#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"

enum lifecycle_type {
	LIFECYCLE_FORK = 1,
	LIFECYCLE_EXEC = 2,
	LIFECYCLE_EXIT = 3,
	LIFECYCLE_OOM = 4, /* before its EXIT; start_ns is 0 if the kernel gives only a pid */
};

/* PID_MAX_LIMIT of include/linux/threads.h. */
#define MOST_PIDS (4 << 20)

struct lifecycle_record {
	__u64 start_ns;
	__u64 ktime;
	__u32 type;
	__u32 tgid;
	__u32 ppid;
	__u32 exit_code; /* of EXIT, as from waitpid: bits 0-6 the signal, bit 7 core dumped, bits 8-15 the status */
	char comm[16];
};

struct exit_key {
	__u64 start_ns;
	__u64 tgid;
};

RING(lifecycle, struct lifecycle_record, 1 << 20);

/* Reported exits: the last two threads of a process may both see that no other thread is left. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct exit_key);
	__type(value, __u8);
} exited SEC(".maps");

static __always_inline void push(struct task_struct *task, __u32 type, __u32 exit_code, __u64 now)
{
	struct lifecycle_record record = {};

	record.start_ns = start_ns_of(task);
	record.ktime = now;
	record.type = type;
	record.tgid = BPF_CORE_READ(task, tgid);
	record.ppid = BPF_CORE_READ(task, group_leader, real_parent, tgid);
	record.exit_code = exit_code;
	BPF_CORE_READ_STR_INTO(&record.comm, task, group_leader, comm);
	RING_PUSH(lifecycle, &record);
}

SEC("raw_tp/sched_process_fork")
int lifecycle_fork(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *child = (struct task_struct *)ctx->args[1];
	__u64 now = bpf_ktime_get_ns();

	if (guard_open(now) && BPF_CORE_READ(child, pid) == BPF_CORE_READ(child, tgid))
		push(child, LIFECYCLE_FORK, 0, now);
	return 0;
}

SEC("raw_tp/sched_process_exec")
int lifecycle_exec(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 now = bpf_ktime_get_ns();

	if (guard_open(now))
		push((struct task_struct *)ctx->args[0], LIFECYCLE_EXEC, 0, now);
	return 0;
}

SEC("raw_tp/sched_process_exit")
int lifecycle_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx->args[0];
	__u64 now = bpf_ktime_get_ns();
	struct exit_key key = {};
	__u32 code;
	__u8 one = 1;

	if (!guard_open(now) || BPF_CORE_READ(task, signal, live.counter) != 0)
		return 0;
	key.start_ns = start_ns_of(task);
	key.tgid = BPF_CORE_READ(task, tgid);
	if (bpf_map_update_elem(&exited, &key, &one, BPF_NOEXIST))
		return 0;
	code = BPF_CORE_READ(task, signal, group_exit_code);
	push(task, LIFECYCLE_EXIT, code ? code : BPF_CORE_READ(task, exit_code), now);
	return 0;
}

/* The argument is a task from Linux 6.10 on, and a pid before (mm/oom_kill.c). */
SEC("raw_tp/mark_victim")
int lifecycle_oom(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 victim = ctx->args[0];
	__u64 now = bpf_ktime_get_ns();
	struct lifecycle_record record = {};

	if (!guard_open(now))
		return 0;
	if (victim > MOST_PIDS) {
		push((struct task_struct *)victim, LIFECYCLE_OOM, 0, now);
		return 0;
	}
	record.ktime = now;
	record.type = LIFECYCLE_OOM;
	record.tgid = victim;
	RING_PUSH(lifecycle, &record);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
