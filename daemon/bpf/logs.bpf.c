// SPDX-License-Identifier: Apache-2.0
/*
 * The output of trainers on stdout and stderr, from libc's write functions. Each probe is attached for one process, so
 * that other processes do not pay for it. The descriptor may refer to a file, a pipe or a terminal.
 */
#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "regs.bpf.h"

#define PIECE_BYTES 256
#define MAX_PIECES 16
#define MAX_VECTORS 4

enum piece_end {
	PIECE_GOES_ON = 0,
	PIECE_IS_LAST = 1,
	PIECE_IS_CUT = 2, /* the last piece that is kept; the call wrote more */
};

/* A call that writes more than one piece makes several records with the same `t`. */
struct log_record {
	__u64 t; /* CLOCK_MONOTONIC ns */
	__u64 start_ns;
	__u32 tgid;
	__u32 tid;
	__u32 offset; /* of this piece in the bytes that the call wrote */
	__u16 size;
	__u8 fd; /* 1 or 2 */
	__u8 end;
	char text[PIECE_BYTES];
};

RING(log_writes, struct log_record, 1 << 20);

/* A packed write: the descriptor, from bit 8 `enum piece_end` of its last piece, from bit 32 the offset of its text. */
static __always_inline __u64 write_of(__u32 fd, __u8 end, __u64 offset)
{
	return offset << 32 | end << 8 | fd;
}

/*
 * Pushes piece `number` of `text`, which has `length` bytes; returns 0 if the piece cannot be read or pushed. A global
 * function without a loop: verified once, and not for each iteration of the caller's loop.
 */
__noinline int push_piece(__u64 now, __u64 write, __u64 text, __u64 length, __u32 number)
{
	__u64 start = (__u64)number * PIECE_BYTES, left = length - start;
	__u32 size = left < PIECE_BYTES ? left : PIECE_BYTES;
	struct log_record r = {
		.t = now,
		.start_ns = current_start_ns(),
		.tgid = current_tgid(),
		.tid = current_tid(),
		.offset = (write >> 32) + start,
		.fd = write,
		.end = PIECE_GOES_ON,
	};

	if (left <= PIECE_BYTES)
		r.end = write >> 8;
	else if (number == MAX_PIECES - 1)
		r.end = PIECE_IS_CUT;
	/* The compiler knows this bound and would drop the check, which the verifier needs. */
	asm volatile("" : "+r"(size));
	if (size > PIECE_BYTES)
		return 0;
	r.size = size;
	if (bpf_probe_read_user(r.text, size, (const void *)(text + start))) {
		RING_LOST(log_writes);
		return 0;
	}
	return !RING_PUSH(log_writes, &r);
}

/*
 * Pushes up to MAX_PIECES pieces of `text`. Stops and returns 0 at a piece that cannot be read or pushed, as later
 * pieces would look like its continuation. Also a global function.
 */
__noinline int push_text(__u64 now, __u64 write, __u64 text, __u64 length)
{
	__u32 i;

	for (i = 0; i < MAX_PIECES; i++) {
		if ((__u64)i * PIECE_BYTES >= length)
			return 1;
		if (!push_piece(now, write, text, length, i))
			return 0;
	}
	return length <= MAX_PIECES * PIECE_BYTES;
}

static __always_inline int is_output(__u32 fd)
{
	return fd == 1 || fd == 2;
}

/* write(fd, buffer, count) */
UPROBE(log_write)
{
	__u32 fd = argument(ctx, 0);

	if (is_output(fd))
		push_text(probe->now, write_of(fd, PIECE_IS_LAST, 0), argument(ctx, 1), argument(ctx, 2));
}

/* writev(fd, vectors, count), which libstdc++ uses */
UPROBE(log_writev)
{
	__u64 vectors = argument(ctx, 1), count = argument(ctx, 2), offset = 0;
	__u32 fd = argument(ctx, 0);
	struct {
		__u64 text;
		__u64 length;
	} vector;
	__u8 end;
	int i;

	if (!is_output(fd))
		return;
	for (i = 0; i < MAX_VECTORS; i++) {
		if (i >= count)
			return;
		if (bpf_probe_read_user(&vector, sizeof(vector), (const void *)(vectors + i * sizeof(vector)))) {
			RING_LOST(log_writes);
			return;
		}
		end = i + 1 == count ? PIECE_IS_LAST : i == MAX_VECTORS - 1 ? PIECE_IS_CUT : PIECE_GOES_ON;
		if (!push_text(probe->now, write_of(fd, end, offset), vector.text, vector.length))
			return;
		offset += vector.length;
	}
}

char LICENSE[] SEC("license") = "GPL";
