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

/* Of a piece: the descriptor, from bit 8 `enum piece_end`, from bit 16 the size, from bit 32 the offset. */
static __always_inline __u64 piece_of(__u32 fd, __u8 end, __u32 size, __u32 offset)
{
	return (__u64)offset << 32 | size << 16 | end << 8 | fd;
}

/*
 * Pushes one piece; returns 0 when it cannot be read or pushed. A function that is verified by itself: a loop that calls
 * it costs the verifier the loop alone.
 */
__noinline int push_piece(__u64 now, __u64 piece, __u64 text)
{
	struct log_record r = {
		.t = now,
		.start_ns = current_start_ns(),
		.tgid = current_tgid(),
		.tid = current_tid(),
		.offset = piece >> 32,
		.size = piece >> 16,
		.fd = piece,
		.end = piece >> 8,
	};
	__u32 size = r.size;

	/* One bound: of two the compiler makes one of another value, and the verifier does not see it on this one. */
	if (size > PIECE_BYTES)
		return 0;
	if (bpf_probe_read_user(r.text, size, (const void *)text)) {
		RING_LOST(log_writes);
		return 0;
	}
	return !RING_PUSH(log_writes, &r);
}

/*
 * Pushes up to MAX_PIECES pieces of `text`, as `piece` says of the first one. A piece that cannot be read or pushed ends
 * it: what follows would look like its continuation. Returns 0 when it ended. Also verified by itself.
 */
__noinline int push_text(__u64 now, __u64 piece, __u64 text, __u64 length)
{
	__u32 fd = (__u8)piece, offset = piece >> 32, size;
	__u64 left = length;
	__u8 end = piece >> 8, ends;
	int i;

	for (i = 0; i < MAX_PIECES; i++) {
		if (!left)
			return 1;
		size = left < PIECE_BYTES ? left : PIECE_BYTES;
		ends = left <= PIECE_BYTES ? end : i == MAX_PIECES - 1 ? PIECE_IS_CUT : PIECE_GOES_ON;
		if (!push_piece(now, piece_of(fd, ends, size, offset), text))
			return 0;
		text += size;
		offset += size;
		left -= size;
	}
	return !left;
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
		push_text(probe->now, piece_of(fd, PIECE_IS_LAST, 0, 0), argument(ctx, 1), argument(ctx, 2));
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
		if (!push_text(probe->now, piece_of(fd, end, 0, offset), vector.text, vector.length))
			return;
		offset += vector.length;
	}
}

char LICENSE[] SEC("license") = "GPL";
