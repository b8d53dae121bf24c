// SPDX-License-Identifier: Apache-2.0
/*
 * Finds the inode behind a mapping of the calling process. For a file of an overlay, /proc shows an inode number that
 * differs by mount; probes belong to the inode of the file below the overlay, which /proc does not show.
 */
#include <linux/bpf.h>
#include <linux/errno.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

struct super_block {
	__u32 s_dev;
} __attribute__((preserve_access_index));

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
} __attribute__((preserve_access_index));

struct file {
	struct inode *f_inode;
} __attribute__((preserve_access_index));

struct vm_area_struct {
	struct file *vm_file;
} __attribute__((preserve_access_index));

struct task_struct;

struct identity {
	__u64 device;
	__u64 inode;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct identity);
} identity SEC(".maps");

static long look(struct task_struct *task, struct vm_area_struct *vma, struct identity *found)
{
	found->device = BPF_CORE_READ(vma, vm_file, f_inode, i_sb, s_dev);
	found->inode = BPF_CORE_READ(vma, vm_file, f_inode, i_ino);
	return 0;
}

/* args[0]: an address in the mapping. Returns 0, 1 if there is no mapping, 2 if another thread holds the memory map. */
SEC("raw_tp")
int real_inode(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct identity found = {};
	__u32 zero = 0;
	long error = bpf_find_vma(task, ctx->args[0], look, &found, 0);

	if (error)
		return error == -EBUSY ? 2 : 1;
	bpf_map_update_elem(&identity, &zero, &found, BPF_ANY);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
