/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When work on a CUDA stream was done, as far as its process asks for it. A stream ends its work in order, so whoever
 * learns that an event behind an operation has come knows it of all operations before it as well.
 */
#ifndef PROBING_COMPLETION_BPF_H
#define PROBING_COMPLETION_BPF_H

#include "collectives.bpf.h"

/*
 * `r` was put on the stream `r->stream` by the calling thread. Takes a place on the stream and lies in `operations`
 * until its end is seen; where nothing of this process would show that, it goes to the ring at once.
 * Returns the key of the open operation, or one of position 0.
 */
static __always_inline struct operation_key stream_enqueue(struct collective_record *r)
{
	struct operation_key key = operation_key(r->stream);

	r->timing = TIMING_ENQUEUE_ONLY;
	r->state = STATE_UNSEEN;
	RING_PUSH(collectives, r);
	return key;
}

#endif
