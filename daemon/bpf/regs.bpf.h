/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arguments of a user function at its entry, for x86-64 (System V) and arm64 (AAPCS64) kernels from one object.
 */
#ifndef PROBING_REGS_BPF_H
#define PROBING_REGS_BPF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define ARCH_X86_64 1
#define ARCH_ARM64 2

const volatile __u32 target_arch = ARCH_X86_64;

/*
 * A load from the context needs a constant offset. Assembly keeps the compiler from merging the loads of both
 * architectures into one with a computed offset.
 */
#define CTX_LOAD(ctx, offset)                                                                                          \
	({                                                                                                             \
		__u64 __value;                                                                                         \
		asm volatile("%0 = *(u64 *)(%1 + %2)" : "=r"(__value) : "r"(ctx), "i"(offset));                        \
		__value;                                                                                               \
	})

/* Offsets in struct pt_regs of x86-64 (arch/x86/include/asm/ptrace.h) and user_pt_regs of arm64. */
#define X86_R9 64
#define X86_R8 72
#define X86_AX 80
#define X86_CX 88
#define X86_DX 96
#define X86_SI 104
#define X86_DI 112
#define X86_IP 128
#define X86_SP 152
#define ARM64_X(n) ((n) * 8)
#define ARM64_SP 248
#define ARM64_PC 256

static __always_inline __u64 user_stack_pointer(void *ctx)
{
	return target_arch == ARCH_X86_64 ? CTX_LOAD(ctx, X86_SP) : CTX_LOAD(ctx, ARM64_SP);
}

static __always_inline __u64 user_ip(void *ctx)
{
	return target_arch == ARCH_X86_64 ? CTX_LOAD(ctx, X86_IP) : CTX_LOAD(ctx, ARM64_PC);
}

static __always_inline __u64 return_value(void *ctx)
{
	return target_arch == ARCH_X86_64 ? CTX_LOAD(ctx, X86_AX) : CTX_LOAD(ctx, ARM64_X(0));
}

static __always_inline __u64 stack_word(void *ctx, __u32 index)
{
	__u64 value = 0;

	if (bpf_probe_read_user(&value, sizeof(value), (const void *)(user_stack_pointer(ctx) + index * 8)))
		return 0;
	return value;
}

/*
 * Argument `n` (a constant, from 0) among integers and pointers; 0 if its stack word cannot be read. At the probe points
 * the stack pointer is still that of the entry (probe_points.py).
 */
static __always_inline __u64 argument(void *ctx, const int n)
{
	if (target_arch == ARCH_X86_64) {
		switch (n) {
		case 0:
			return CTX_LOAD(ctx, X86_DI);
		case 1:
			return CTX_LOAD(ctx, X86_SI);
		case 2:
			return CTX_LOAD(ctx, X86_DX);
		case 3:
			return CTX_LOAD(ctx, X86_CX);
		case 4:
			return CTX_LOAD(ctx, X86_R8);
		case 5:
			return CTX_LOAD(ctx, X86_R9);
		default:
			return stack_word(ctx, n - 6 + 1);
		}
	}
	switch (n) {
	case 0:
		return CTX_LOAD(ctx, ARM64_X(0));
	case 1:
		return CTX_LOAD(ctx, ARM64_X(1));
	case 2:
		return CTX_LOAD(ctx, ARM64_X(2));
	case 3:
		return CTX_LOAD(ctx, ARM64_X(3));
	case 4:
		return CTX_LOAD(ctx, ARM64_X(4));
	case 5:
		return CTX_LOAD(ctx, ARM64_X(5));
	case 6:
		return CTX_LOAD(ctx, ARM64_X(6));
	case 7:
		return CTX_LOAD(ctx, ARM64_X(7));
	default:
		return stack_word(ctx, n - 8);
	}
}

#endif
