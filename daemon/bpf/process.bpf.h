/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The running task: the kernel's fields that programs need. Offsets are relocated at load time (CO-RE), so no vmlinux.h.
 */
#ifndef PROBING_PROCESS_BPF_H
#define PROBING_PROCESS_BPF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/* /proc/PID/stat counts in ticks of 10 ms (USER_HZ is 100 on x86-64 and arm64). */
#define TICK_NS 10000000ULL

/* A process in the keys of maps. The start belongs to it: a process that gets the pid of an ended one is another. */
struct process_key {
	__u64 start_ns;
	__u64 tgid;
};

struct signal_struct {
	struct {
		int counter;
	} live;
	int group_exit_code;
} __attribute__((preserve_access_index));

struct mm_struct;

struct task_struct {
	struct task_struct *group_leader;
	struct task_struct *real_parent;
	struct signal_struct *signal;
	struct mm_struct *mm; /* NULL for a kernel thread and for a thread that is exiting */
	__u64 start_boottime;
	unsigned long nvcsw; /* voluntary and involuntary context switches */
	unsigned long nivcsw;
	unsigned int flags;
	int pid;
	int tgid;
	int exit_code;
	char comm[16];
} __attribute__((preserve_access_index));

/* The start of a task's process since boot, ns, rounded down as in /proc/PID/stat. */
static __always_inline __u64 start_ns_of(struct task_struct *task)
{
	return BPF_CORE_READ(task, group_leader, start_boottime) / TICK_NS * TICK_NS;
}

#ifdef PROBING_PREEMPT
extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym;

/*
 * The verifier searches all types of the kernel, twice, whenever a program follows a pointer of a trusted task: 1 ms
 * each time, a quarter of the time to load all programs. The cast (Linux 6.2) removes the trust and runs no code.
 */
static __always_inline struct task_struct *current_task(void)
{
	return bpf_rdonly_cast(bpf_get_current_task_btf(), bpf_core_type_id_kernel(struct task_struct));
}
#else
static __always_inline struct task_struct *current_task(void)
{
	return bpf_get_current_task_btf();
}
#endif

/* From 5.11 on a program may follow the calling task's pointers directly, at a fraction of the cost of a read. */
static __always_inline __u64 current_start_ns(void)
{
	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_get_current_task_btf))
		return current_task()->group_leader->start_boottime / TICK_NS * TICK_NS;
	return start_ns_of((struct task_struct *)bpf_get_current_task());
}

/* The start of the calling thread since boot, ns: thread ids are reused. */
static __always_inline __u64 thread_started(void)
{
	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_get_current_task_btf))
		return bpf_get_current_task_btf()->start_boottime;
	return BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), start_boottime);
}

static __always_inline __u32 current_tgid(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

static __always_inline __u32 current_tid(void)
{
	return (__u32)bpf_get_current_pid_tgid();
}

#endif
