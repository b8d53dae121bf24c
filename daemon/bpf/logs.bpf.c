// SPDX-License-Identifier: Apache-2.0
/*
 * What trainers write to stdout and stderr, from the functions of libc that write: attached to one process each, so that
 * no other pays for it. Where the descriptor leads to does not matter.
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
	PIECE_IS_CUT = 2, /* the last that is shown; more was written by the same call */
};

/* A call that writes more than a piece takes is several records of one `t`. */
struct log_record {
	__u64 t; /* CLOCK_MONOTONIC ns */
	__u64 start_ns;
	__u32 tgid;
	__u32 tid;
	__u32 offset; /* of this piece in what the call wrote */
	__u16 size;
	__u8 fd; /* 1 or 2 */
	__u8 end;
	char text[PIECE_BYTES];
};

RING(log_writes, struct log_record, 1 << 20);

static __always_inline void begin(struct log_record *r, struct probe *probe, __u32 fd)
{
	__builtin_memset(r, 0, sizeof(*r));
	r->t = probe->now;
	r->start_ns = current_start_ns();
	r->tgid = current_tgid();
	r->tid = current_tid();
	r->fd = fd;
}

/*
 * Pushes up to MAX_PIECES pieces of `text`. A piece that cannot be read or pushed ends it: what follows would look like
 * its continuation.
 */
static __noinline int push_text(struct log_record *r, __u64 text, __u64 length, __u8 end)
{
	int i;

	for (i = 0; i < MAX_PIECES; i++) {
		__u64 left = length - (__u64)i * PIECE_BYTES;
		__u32 size = left < PIECE_BYTES ? left : PIECE_BYTES;

		if ((__u64)i * PIECE_BYTES >= length)
			return 1;
		if (size == 0 || size > PIECE_BYTES)
			return 0;
		if (bpf_probe_read_user(r->text, size, (const void *)(text + i * PIECE_BYTES))) {
			RING_LOST(log_writes);
			return 0;
		}
		r->size = size;
		r->end = left <= PIECE_BYTES ? end : i == MAX_PIECES - 1 ? PIECE_IS_CUT : PIECE_GOES_ON;
		if (RING_PUSH(log_writes, r))
			return 0;
		r->offset += size;
	}
	return length <= PIECE_BYTES * MAX_PIECES;
}

static __always_inline int is_output(__u32 fd)
{
	return fd == 1 || fd == 2;
}

/* write(fd, buffer, count) */
UPROBE(log_write)
{
	struct log_record r;

	if (!is_output(argument(ctx, 0)))
		return;
	begin(&r, probe, argument(ctx, 0));
	push_text(&r, argument(ctx, 1), argument(ctx, 2), PIECE_IS_LAST);
}

/* writev(fd, vectors, count), which libstdc++ uses */
UPROBE(log_writev)
{
	__u64 vectors = argument(ctx, 1), count = argument(ctx, 2);
	struct log_record r;
	struct {
		__u64 text;
		__u64 length;
	} vector;
	int i;

	if (!is_output(argument(ctx, 0)))
		return;
	begin(&r, probe, argument(ctx, 0));
	for (i = 0; i < MAX_VECTORS; i++) {
		if (i >= count)
			return;
		if (bpf_probe_read_user(&vector, sizeof(vector), (const void *)(vectors + i * sizeof(vector)))) {
			RING_LOST(log_writes);
			return;
		}
		if (!push_text(&r, vector.text, vector.length,
			       i + 1 == count		? PIECE_IS_LAST
			       : i == MAX_VECTORS - 1	? PIECE_IS_CUT
							: PIECE_GOES_ON))
			return;
	}
}

char LICENSE[] SEC("license") = "GPL";
