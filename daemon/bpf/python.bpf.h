/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sampler's input for each process that it samples, and the record of one sample.
 *
 * The collector provides the layout of a CPython (struct python_layout) and the PyThreadState of each thread; programs
 * only check that these still hold. Code objects are recorded by address; names and lines are read later from outside,
 * and `check` proves that the code object is still the one that was there when the sample was taken.
 */
#ifndef PROBING_PYTHON_BPF_H
#define PROBING_PYTHON_BPF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define PYTHON_FRAMES 128
#define ABSENT 0xffff

/* The meaning of the word at `frame_instr`. */
enum python_instr {
	INSTR_BYTES = 1,   /* int, bytes into the code (3.8, 3.9) */
	INSTR_UNITS = 2,   /* int, units of 2 bytes (3.10) */
	INSTR_ADDRESS = 3, /* an address in the code, which begins at code + code_adaptive (3.11+) */
};

/* How to find the holder of the GIL. */
enum python_gil {
	GIL_UNKNOWN = 0,
	GIL_CURRENT = 1, /* `gil` is the address of the pointer to the PyThreadState that holds it (up to 3.11) */
	GIL_STRUCT = 2,	 /* `gil` is the address of a struct with gil_holder and gil_locked (3.12+) */
};

/* Offsets in bytes; ABSENT for a field that this version of CPython lacks. */
struct python_layout {
	__u16 thread_id; /* in PyThreadState: pthread_self() */
	__u16 thread_frame;
	__u16 cframe_frame; /* 3.11, 3.12: thread_frame points at a C frame, which points at the frame here */
	__u16 frame_previous;
	__u16 frame_code;
	__u16 frame_instr;
	__u16 frame_owner; /* one byte */
	__u16 code_firstlineno;
	__u16 code_filename;
	__u16 code_name;       /* the qualified name, if the version has one */
	__u16 code_short_name; /* the plain name */
	__u16 code_linetable;
	__u16 code_adaptive;
	__u16 gil_holder;
	__u16 gil_locked;
	__u8 instr;
	__u8 gil_kind;
	__u8 shim_owner; /* frames with at least this owner are no Python code; 0xff: there are none */
	__u8 tag_mask;	 /* low bits of frame_code that do not belong to the address */
};

/* By tgid. */
struct python_process {
	__u64 start_ns;
	__u64 gil;
	__u32 rate;	/* samples per second and CPU; at most the rate of the clock */
	__u32 off_rate; /* walks per second of a thread that leaves the CPU; 0: off-CPU time is not sampled */
	struct python_layout layout;
};

/* By tid, as the host sees it. */
struct python_thread {
	__u64 state;	 /* address of its PyThreadState */
	__u64 thread_id; /* the word at offset thread_id of the PyThreadState */
	__u64 start_ns;	 /* of its process */
	/* Written when the thread leaves the CPU (python_off.bpf.c). */
	__u64 second; /* the current second of CLOCK_MONOTONIC */
	__u32 count;  /* switches in this second */
	__u32 before; /* switches in the second before */
	__u32 block;  /* number of switches in a block, of which one is walked */
	__u32 left;   /* number of switches of the block still to come */
	__u32 pick;   /* value of `left` at the switch that is walked */
	__u32 reserved;
};

enum python_sample_kind {
	SAMPLE_ON_CPU = 1,
	SAMPLE_OFF_CPU = 2,
	SAMPLE_UNRESOLVED = 3, /* a thread without a known PyThreadState: no frames */
};

enum python_sample_flags {
	FLAG_CUT = 1,	      /* more frames than a record holds */
	FLAG_FAULT = 2,	      /* a page was not in memory: outer frames are missing */
	FLAG_GIL = 4,	      /* the thread held the GIL */
	FLAG_GIL_UNKNOWN = 8,
};

/* `offset` is from the begin of the code, in bytes. */
struct python_frame {
	__u64 code;
	__s32 offset;
	__u32 check;
};

/* Frames are innermost first; `hash` is equal for equal frames of a process. */
struct python_sample {
	__u64 start_ns;
	__u64 ktime; /* time of the sample; off CPU: when the thread left the CPU, or was last reported */
	__u64 hash;
	__u64 duration_ns; /* off CPU: the time that the sample stands for; 0 on CPU */
	__u64 user_ip;	   /* address of the thread's last instruction in user space; 0: not known */
	__u32 tgid;
	__u32 tid;
	__u16 depth;
	__u8 kind;
	__u8 flags;
	__u32 reserved;
	struct python_frame frames[PYTHON_FRAMES];
};

/* Offset in a str, in every version. */
#define STR_HASH 24

/*
 * A checksum that identifies a code object: a new code object at the same address has another name, file, line table or
 * first line. The addresses of these strings can be reused, too, so the hash of the plain name is included, which the
 * interpreter has computed for every code object. sampling/codes.py has the same arithmetic.
 */
static __always_inline __u32 code_check(__u64 filename, __u64 name, __u64 linetable, __u32 firstlineno, __u64 name_hash)
{
	__u64 mixed = filename * 0x9e3779b97f4a7c15ULL ^ name * 0xc2b2ae3d27d4eb4fULL ^ linetable * 0x165667b19e3779f9ULL;

	mixed ^= (__u64)firstlineno * 0x27d4eb2f165667c5ULL;
	mixed ^= name_hash * 0xff51afd7ed558ccdULL;
	return (__u32)(mixed >> 32) ^ (__u32)mixed;
}

#endif
