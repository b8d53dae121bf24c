/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learns when work on a CUDA stream was done, from the calls by which the process itself queries or waits for its work.
 * A stream completes its work in order, so a completed event proves that all operations before it are done as well.
 *
 * The operations of a stream have positions from 1 on; those from `oldest` to `next` are open in `operations`. Nothing
 * here takes a lock: if two threads change a count at once, the error must lead to fewer claims, never to wrong ones.
 */
#ifndef PROBING_COMPLETION_BPF_H
#define PROBING_COMPLETION_BPF_H

#include "collectives.bpf.h"

#define OPEN_A_STREAM 1024
/* At least the operations of one all_to_all of 128 ranks, since each may end with a single hit. */
#define CLOSED_A_HIT 256
#define PROCESS_STREAMS 32
#define MAX_PROCESS_STREAMS 1024
#define GIVEN_UP_NS (600 * SECOND_NS)
#define PLACE_TRIES 8
#define SKIPPED_A_HIT 8

/* Handles of the implicit streams, one per device or per thread (cudaStreamLegacy, cudaStreamPerThread). */
#define STREAM_LEGACY 1
#define STREAM_PER_THREAD 2
#define LEAST_HANDLE 0x10000

enum evidence_kind {
	EVIDENCE_SYNC = 1, /* a thread waited */
	EVIDENCE_POLL = 2, /* a thread queried */
	EVIDENCE_NONE = 3, /* the operations are closed without evidence */
};

/* Evidence that all operations up to `position` were done at `t`. */
struct evidence {
	__u64 position;
	__u64 since; /* CLOCK_MONOTONIC ns: operations called later are not covered */
	__u64 t;
	__u32 tid; /* the thread that waited or queried */
	__u16 error; /* cudaError that ended the operations, or 0 */
	__u8 kind;
	__u8 reserved;
};

struct stream_key {
	__u64 object; /* the handle, or a number for one stream of an implicit handle */
	__u64 start_ns;
	__u64 tgid;
};

struct stream_state {
	__u64 next;
	__u64 oldest;
	__u64 launched;	 /* all operations up to this position are on the stream for sure */
	__u64 marked;	 /* the last position after which an event was recorded */
	__u64 destroyed; /* operations up to this position are on an older stream of the same handle */
	__u64 run_first; /* from this position on one thread calls, in one group */
	__u64 run_group;
	__u32 run_tid;
	__s32 device;
	__u64 rest;	 /* 1: `cuda_rests` has evidence that is not used up */
	__u64 asked;	 /* 1: an event was recorded on the stream, or the stream was queried or waited for */
	__u64 given_up;	 /* when `asked` had been 0 for too long, as in a library with its own CUDA runtime */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct stream_key);
	__type(value, struct stream_state);
} cuda_streams SEC(".maps");

/* Evidence that one hit could not use up. Elements are only replaced as a whole. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct stream_key);
	__type(value, struct evidence);
} cuda_rests SEC(".maps");

/*
 * Processes that use events or wait for streams: only the ends of their operations can be seen. A process is added at
 * its first hit of such a probe and removed by the collector.
 */
struct cuda_process {
	__u64 start_ns;
	__u64 open; /* at least the number of open operations on its streams */
	__u32 captures;
	__u32 generation;
	__u64 made; /* number of its streams, limited so that one process cannot fill the map */
	__u64 streams[PROCESS_STREAMS]; /* objects of its first streams; 0: none */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct cuda_process);
} cuda_processes SEC(".maps");

/* The current device of a thread, once cudaSetDevice was seen. */
struct cuda_device {
	__u64 started; /* start of the thread since boot, ns: thread ids are reused */
	__s32 number;
	__u32 generation;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct cuda_device);
} cuda_devices SEC(".maps");

/* The closing in progress on this CPU. */
struct closing {
	__u64 thread;
	struct stream_key stream;
	struct evidence evidence;
	struct evidence rest; /* evidence that an earlier hit left, for positions up to its own */
	__u64 destroyed;      /* a copy of the field of stream_state */
	__u64 lo; /* a time at which the previous operation, and so this one, was not done */
	struct collective_record record;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct closing);
} closing SEC(".maps");

static __always_inline struct cuda_process *cuda_process_of(__u32 tgid, __u64 start_ns)
{
	struct cuda_process *process = bpf_map_lookup_elem(&cuda_processes, &tgid);

	if (!process || process->start_ns == start_ns)
		return process;
	/* 0: the element is being created. Any other time is the start of an older process with this pid. */
	if (process->start_ns)
		bpf_map_delete_elem(&cuda_processes, &tgid);
	return 0;
}

static __always_inline __u32 current_generation(void)
{
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	return c ? c->generation : 0;
}

/* Whether a stream of the process is capturing: its operations may become part of a CUDA graph. */
static __always_inline int cuda_captures(struct cuda_process *process)
{
	return process->captures && process->generation == current_generation();
}

/* Whether a stream of the calling process is capturing. */
static __always_inline int stream_captures(void)
{
	struct cuda_process *process = cuda_process_of(current_tgid(), current_start_ns());

	return process && cuda_captures(process);
}

/* The current device of the calling thread; -1: not known. */
static __always_inline __s32 current_device(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct cuda_device *device = bpf_map_lookup_elem(&cuda_devices, &thread);

	if (!device || device->generation != current_generation() || device->started != thread_started())
		return -1;
	return device->number;
}

/*
 * A number for the stream of a handle: the handle itself if it is an address; for an implicit handle, a number of the
 * device or of the thread. 0: the device is not known, or the handle is invalid.
 */
static __always_inline __u64 stream_object(__u64 handle)
{
	__s32 device;

	if (handle >= LEAST_HANDLE)
		return handle;
	device = current_device();
	if (device < 0 || device > 0x7f || handle > STREAM_PER_THREAD)
		return 0;
	if (handle == STREAM_PER_THREAD)
		return (__u64)current_tid() << 32 | (device + 1) << 8 | STREAM_PER_THREAD;
	return (device + 1) << 8;
}

static __always_inline struct operation_key placed_at(struct stream_key *stream, __u64 position)
{
	struct operation_key key = {
		.object = stream->object,
		.position = position,
		.start_ns = stream->start_ns,
		.tgid = stream->tgid,
	};

	return key;
}

/* Writes the text of an error, such as "cudaError 700". */
static __always_inline void error_text(char *text, __u16 error)
{
	char words[] = "cudaError 000";

	words[10] += error / 100 % 10;
	words[11] += error / 10 % 10;
	words[12] += error % 10;
	__builtin_memcpy(text, words, sizeof(words));
}

static __always_inline void record_end(struct collective_record *r, struct evidence *e)
{
	if (e->kind == EVIDENCE_NONE) {
		r->timing = TIMING_ENQUEUE_ONLY;
		r->state = STATE_UNSEEN;
		r->t_done_lo = 0;
		return;
	}
	r->t_done_hi = e->t;
	r->timing = e->kind == EVIDENCE_SYNC  ? TIMING_SYNC
		    : e->tid == r->tid ? TIMING_BLOCKING_WAIT
				       : TIMING_WATCHDOG;
	r->state = e->error ? STATE_FAILED : STATE_DONE;
	if (e->error)
		error_text(r->error, e->error);
}

enum finish {
	FINISH_REFUSED = 0, /* the evidence does not cover the operation */
	FINISH_ABSENT = 1,
	FINISH_CLOSED = 2,
};

static __always_inline struct closing *closing_begin(struct stream_key *stream)
{
	__u32 zero = 0;
	struct closing *closing_now = bpf_map_lookup_elem(&closing, &zero);

	if (!closing_now)
		return 0;
	closing_now->thread = bpf_get_current_pid_tgid();
	closing_now->stream = *stream;
	closing_now->rest.position = 0;
	closing_now->destroyed = 0;
	closing_now->lo = 0;
	return closing_now;
}

/*
 * Closes the operation at `position` with the data in `closing`; if several programs try, one succeeds. A global
 * function, which is verified once and not again in each iteration of the loops that call it.
 */
__noinline int operation_finish(__u64 position)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct collective_record *open, *copy;
	struct operation_key key;
	struct closing *work;
	struct evidence e;
	__u32 zero = 0;

	work = bpf_map_lookup_elem(&closing, &zero);
	if (!work)
		return FINISH_REFUSED;
	copy = &work->record;
	key = placed_at(&work->stream, position);
	e = position <= work->rest.position ? work->rest : work->evidence;
	if (position > e.position)
		return FINISH_REFUSED;
	/* Evidence from a newer stream of the same handle does not count for this operation. */
	if (position <= work->destroyed && e.position > work->destroyed)
		e.kind = EVIDENCE_NONE;
	open = bpf_map_lookup_elem(&operations, &key);
	if (!open)
		return FINISH_ABSENT;
	/* If this program was preempted, another program on this CPU may have overwritten `closing`. */
	if (work->thread != thread || open->t_call > e.since)
		return FINISH_REFUSED;
	bpf_probe_read_kernel(copy, sizeof(*copy), open);
	if (operation_remove(&key))
		return FINISH_ABSENT;
	if (work->thread != thread || copy->position != position) {
		RING_LOST(collectives);
		return FINISH_CLOSED;
	}
	if (copy->t_done_lo < work->lo)
		copy->t_done_lo = work->lo;
	work->lo = copy->t_done_lo;
	record_end(copy, &e);
	RING_PUSH(collectives, copy);
	return FINISH_CLOSED;
}

static __always_inline void stream_advance(struct stream_state *s, __u64 position)
{
	if (s->oldest <= position)
		s->oldest = position + 1;
}

/* Closes the oldest operation of a stream of the calling process that has too many open operations. */
__noinline int stream_overflow(__u64 object, __u64 start_ns, __u64 now)
{
	struct stream_key key = {.object = object, .start_ns = start_ns, .tgid = current_tgid()};
	struct evidence none = {.position = UNKNOWN_WORD, .since = now, .kind = EVIDENCE_NONE};
	struct cuda_process *process = cuda_process_of(key.tgid, start_ns);
	struct stream_state *s = bpf_map_lookup_elem(&cuda_streams, &key);
	struct closing *work = closing_begin(&key);
	__u64 position;
	int i, found;

	if (!process || !s || !work)
		return 0;
	work->evidence = none;
	position = s->oldest;
	for (i = 0; i < SKIPPED_A_HIT; i++) {
		found = operation_finish(position);
		stream_advance(s, position);
		position++;
		if (found == FINISH_CLOSED) {
			__sync_fetch_and_add(&process->open, -1);
			return 1;
		}
	}
	return 0;
}

/* Makes the state of a stream of the calling process. Returns 0 if the process has too many streams. */
__noinline int stream_make(__u64 object, __u64 start_ns, __s32 device)
{
	struct stream_key key = {.object = object, .start_ns = start_ns, .tgid = current_tgid()};
	struct stream_state first = {.next = 1, .oldest = 1, .device = device};
	struct cuda_process *process = cuda_process_of(key.tgid, start_ns);
	int i;

	if (!process || process->made >= MAX_PROCESS_STREAMS)
		return 0;
	__sync_fetch_and_add(&process->made, 1);
	bpf_map_update_elem(&cuda_streams, &key, &first, BPF_NOEXIST);
	for (i = 0; i < PROCESS_STREAMS; i++) {
		if (!process->streams[i] || process->streams[i] == object) {
			process->streams[i] = object;
			break;
		}
	}
	return 1;
}

static __always_inline struct stream_state *stream_of(struct stream_key *key, __s32 device)
{
	struct stream_state *s = bpf_map_lookup_elem(&cuda_streams, key);

	if (s || !stream_make(key->object, key->start_ns, device))
		return s;
	return bpf_map_lookup_elem(&cuda_streams, key);
}

/*
 * A thread that calls again has returned from its previous call, and its operations of earlier groups are launched.
 * Only these count as being on the stream: an event does not cover a call that is in progress on another thread.
 */
static __always_inline void stream_run(struct stream_state *s, struct collective_record *r)
{
	__u64 next = *(volatile __u64 *)&s->next;

	if (s->run_tid == r->tid && s->run_group == r->group_id && r->group_id)
		return;
	if (s->run_tid == r->tid && s->launched + 1 >= s->run_first)
		s->launched = next - 1;
	if (s->run_tid == r->tid && s->run_group == r->group_id)
		return;
	s->run_tid = r->tid;
	s->run_group = r->group_id;
	s->run_first = next;
}

/* Returns the position of the operation, or 0. `process` is the process of `r`, or NULL. */
static __always_inline __u64 stream_place(struct collective_record *r, struct cuda_process *process)
{
	struct stream_key key = {.start_ns = r->start_ns, .tgid = r->tgid};
	struct operation_share *share;
	struct operation_key operation;
	struct stream_state *s;
	int i;

	if (!process)
		return 0;
	if (cuda_captures(process)) {
		r->timing = TIMING_GRAPH;
		return 0;
	}
	key.object = stream_object(r->stream);
	/* For an implicit handle the library uses the stream of the communicator's device. */
	if (!key.object || (r->stream < LEAST_HANDLE && current_device() != r->cuda_device))
		return 0;
	s = stream_of(&key, r->cuda_device);
	/* Tried again after GIVEN_UP_NS, since `asked` is only set while operations are open. */
	if (!s || (s->given_up && !s->asked && r->t_call < s->given_up + GIVEN_UP_NS))
		return 0;
	share = share_of(&key.start_ns);
	if (share_used_up(share))
		return 0;
	stream_run(s, r);
	operation = placed_at(&key, s->next);
	r->object = key.object;
	r->state = STATE_CALLED;
	__sync_fetch_and_add(&process->open, 1);
	for (i = 0; i < PLACE_TRIES; i++) {
		r->position = operation.position;
		if (!operation_put(share, &operation, r)) {
			__sync_fetch_and_add(&s->next, 1);
			if (operation.position - s->oldest >= OPEN_A_STREAM)
				stream_overflow(key.object, key.start_ns, r->t_call);
			return operation.position;
		}
		/* Another thread has this position, and is about to advance `next`. */
		operation.position++;
	}
	__sync_fetch_and_add(&process->open, -1);
	return 0;
}

/*
 * The calling thread has put `r` on the stream `r->stream`; `process` is its process, NULL if that is not followed. The
 * operation gets a position on the stream and stays in `operations` until its end is seen. In a process whose ends
 * cannot be seen, or that used up its share of `operations`, it goes to the ring at once. Returns the key of the open
 * operation, or a key with position 0.
 */
static __always_inline struct operation_key stream_enqueue(struct collective_record *r, struct cuda_process *process)
{
	struct operation_key key = {.object = r->stream, .start_ns = r->start_ns, .tgid = r->tgid};

	r->timing = TIMING_ENQUEUE_ONLY;
	key.position = stream_place(r, process);
	if (key.position) {
		key.object = r->object;
	} else {
		r->object = r->stream;
		r->position = 0;
		r->state = STATE_UNSEEN;
		RING_PUSH(collectives, r);
	}
	return key;
}

/*
 * The group of the operation `r` was launched. An event behind a group of many operations covers them all: a hit of its
 * probe looks at few of them, so the stream's state notes how far they go.
 */
static __always_inline void stream_launched(struct operation_key *key, struct collective_record *r, __u64 now)
{
	struct stream_key stream = {.object = key->object, .start_ns = key->start_ns, .tgid = key->tgid};
	struct stream_state *s = bpf_map_lookup_elem(&cuda_streams, &stream);

	r->t_launch = now;
	if (r->state == STATE_CALLED)
		r->state = STATE_LAUNCHED;
	if (s && s->launched < key->position &&
	    (s->launched + 1 == key->position || s->oldest == key->position))
		s->launched = key->position;
}

#endif
