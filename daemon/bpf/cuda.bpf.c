// SPDX-License-Identifier: Apache-2.0
/*
 * The calls of the CUDA runtime that show when work on a stream was done (cuda_runtime_api.h): a thread records an event
 * after the work, and queries or waits for the event, its stream or its device.
 */
#include "completion.bpf.h"

#define WALKED_A_HIT 64

/* cudaError_t (driver_types.h) */
#define CUDA_SUCCESS 0
#define CUDA_ILLEGAL_STATE 401
#define CUDA_NOT_READY 600
#define CUDA_CAPTURE_UNMATCHED 903
#define CUDA_CAPTURE_WRONG_THREAD 908

/* The part of the attach cookie above the slot. */
enum cuda_call_kind {
	CALL_NONE = 0,
	CALL_STREAM_SYNC = 1,
	CALL_EVENT_SYNC = 2,
	CALL_DEVICE_SYNC = 3,
	CALL_EVENT_QUERY = 4,
	CALL_STREAM_QUERY = 5,
	CALL_BEGIN_CAPTURE = 6,
	CALL_END_CAPTURE = 7,
	CALL_SET_DEVICE = 8,
	CALL_KERNEL = 9,
	CALL_GRAPH = 10,
};
#define COOKIE_KIND(probe) ((probe)->cookie >> 16 & 0xff)
#define COOKIE_PER_THREAD(probe) ((probe)->cookie >> 24 & 1)

#define EVENT_PROBES 3

struct cuda_settings {
	__u64 void_before; /* CLOCK_MONOTONIC ns: events recorded earlier may have been recorded again unseen */
	__u32 syncs;	   /* 1: calls that wait become records */
	__u32 event_slots[EVENT_PROBES]; /* slots of the probes that must see each recording of an event */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cuda_settings);
} cuda_settings SEC(".maps");

/* Handles are reused: the last recording counts. */
struct event_key {
	__u64 event;
	__u64 start_ns;
	__u64 tgid;
};

struct event_state {
	__u64 object;
	__u64 position;
	__u64 recorded;
	__u64 stream; /* the handle */
	__u32 generation;
	__u32 tight; /* 1: the operation's caller recorded it as the first event after the operation */
	__u64 check; /* checksum over all fields and the event, as the element is written in place while others read */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct event_key);
	__type(value, struct event_state);
} cuda_events SEC(".maps");

/* The call that a thread is in. */
struct cuda_call {
	__u64 t;
	__u64 stack_pointer;
	__u64 stream;
	__u64 event;
	struct event_state asked; /* position 0: no operation that is followed */
	__u64 kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct cuda_call);
} cuda_calls SEC(".maps");

/* For a thread that waits for its device: the positions on the streams of its process, by index in `streams`. */
struct device_wait {
	__u64 positions[PROCESS_STREAMS];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, struct device_wait);
} cuda_device_waits SEC(".maps");

/* Streams in capture. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct stream_key);
	__type(value, __u32);
} cuda_captures_of SEC(".maps");

struct cuda_sync_record {
	__u64 t; /* CLOCK_MONOTONIC ns, of the call */
	__u64 duration_ns;
	__u64 start_ns;
	__u64 stream;
	__u64 event;
	__u32 tgid;
	__u32 tid;
	__u32 result; /* cudaError_t */
	__u8 kind;
	__u8 stream_known;
	__u8 reserved[2];
};

RING(cuda_syncs, struct cuda_sync_record, 1 << 20);

struct cuda_launches {
	__u64 kernels;
	__u64 graphs;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct process_key);
	__type(value, struct cuda_launches);
} cuda_launches SEC(".maps");

/* Launches of processes without room in the map. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} cuda_launches_lost SEC(".maps");

const volatile struct cuda_process no_process = {};
const volatile struct device_wait no_wait = {};

/* Notes that the calling process uses these calls. */
static __always_inline void be_witness(void)
{
	__u32 tgid = current_tgid();
	struct cuda_process *process;

	if (bpf_map_update_elem(&cuda_processes, &tgid, (const void *)&no_process, BPF_NOEXIST))
		return;
	process = bpf_map_lookup_elem(&cuda_processes, &tgid);
	if (process)
		process->start_ns = current_start_ns();
}

/* The calling process if it has open operations, else NULL. */
static __always_inline struct cuda_process *process_with_open(void)
{
	__u32 tgid = current_tgid();
	struct cuda_process *process = bpf_map_lookup_elem(&cuda_processes, &tgid);

	if (!process) {
		be_witness();
		return 0;
	}
	if (!process->open)
		return 0;
	return process->start_ns == current_start_ns() ? process : cuda_process_of(tgid, current_start_ns());
}

static __always_inline __u64 event_check(struct event_state *state, __u64 event)
{
	__u64 sum = event;

	sum = (sum ^ state->object) * 0x9e3779b97f4a7c15ULL;
	sum = (sum ^ state->position) * 0x9e3779b97f4a7c15ULL;
	sum = (sum ^ state->recorded) * 0x9e3779b97f4a7c15ULL;
	sum = (sum ^ state->stream) * 0x9e3779b97f4a7c15ULL;
	return (sum ^ state->generation ^ (__u64)state->tight << 32) * 0x9e3779b97f4a7c15ULL;
}

static __always_inline __u64 stream_argument(struct probe *probe, __u64 handle)
{
	return stream_object(!handle && COOKIE_PER_THREAD(probe) ? STREAM_PER_THREAD : handle);
}

/* Whether the operation of the calling process is on its stream for sure: it was launched, or is no longer open. */
__noinline int operation_sure(__u64 object, __u64 position, __u64 start_ns)
{
	struct stream_key key = {.object = object, .start_ns = start_ns, .tgid = current_tgid()};
	struct operation_key operation = placed_at(&key, position);
	struct collective_record *r = bpf_map_lookup_elem(&operations, &operation);

	return !r || r->state == STATE_LAUNCHED || (r->tid == current_tid() && !r->group_id);
}

/* The last operation up to `last` that is on the stream for sure. */
__noinline __u64 stream_walk(__u64 object, __u64 last, __u64 start_ns)
{
	struct stream_key key = {.object = object, .start_ns = start_ns, .tgid = current_tgid()};
	struct stream_state *s = bpf_map_lookup_elem(&cuda_streams, &key);
	__u64 sure;
	int i;

	if (!s)
		return 0;
	sure = s->launched;
	if (sure + 1 < s->oldest)
		sure = s->oldest - 1;
	for (i = 0; i < WALKED_A_HIT; i++) {
		if (sure >= last || !operation_sure(object, sure + 1, start_ns))
			break;
		sure++;
	}
	if (s->launched < sure)
		s->launched = sure;
	return sure;
}

/*
 * The last operation that is on the stream for sure now: all before it are, and the calling thread has returned from its
 * own calls.
 */
static __always_inline __u64 stream_sure(struct stream_key *key, struct stream_state *s)
{
	/* Read first: operations that are put on the stream from here on do not count. */
	__u64 last = *(volatile __u64 *)&s->next - 1;

	s->asked = 1;
	if (s->run_tid == current_tid() && !s->run_group && s->launched + 1 >= s->run_first) {
		s->launched = last;
		return last;
	}
	return stream_walk(key->object, last, key->start_ns);
}

/* Notes that the operation at `position` was not done at `t`. */
static __always_inline void not_done_before(struct stream_key *key, __u64 position, __u64 t)
{
	struct operation_key operation = placed_at(key, position);
	struct collective_record *r = bpf_map_lookup_elem(&operations, &operation);

	if (r && r->t_done_lo < t)
		r->t_done_lo = t;
}

/*
 * Closes operations that the evidence covers, at most CLOSED_A_HIT. Operations that an earlier hit left come first, and
 * are closed by the evidence of that hit.
 */
static __always_inline int close_covered(struct stream_key *key, struct evidence *e)
{
	struct cuda_process *process = cuda_process_of(key->tgid, key->start_ns);
	struct stream_state *s = bpf_map_lookup_elem(&cuda_streams, key);
	struct closing *work = closing_begin(key);
	__u64 position, first, rest;
	struct evidence *known;
	int i, found;

	if (!s || !process || !work)
		return 0;
	known = s->rest ? bpf_map_lookup_elem(&cuda_rests, key) : 0;
	if (known)
		work->rest = *known;
	work->evidence = *e;
	work->destroyed = s->destroyed;
	/* 0: none is left. Volatile, as below: else the verifier would walk the loop once for each path to here. */
	rest = *(volatile __u64 *)&work->rest.position;
	first = position = s->oldest;
	for (i = 0; i < CLOSED_A_HIT; i++) {
		found = operation_finish(position);
		if (found == FINISH_REFUSED)
			break;
		if (found == FINISH_CLOSED)
			__sync_fetch_and_add(&process->open, -1);
		stream_advance(s, position);
		position++;
	}
	/* Other threads may have closed more meanwhile. */
	position = *(volatile __u64 *)&s->oldest;
	if (position - first >= CLOSED_A_HIT && position <= e->position && e->position > rest) {
		s->rest = 1;
		bpf_map_update_elem(&cuda_rests, key, e, BPF_ANY);
	} else if (rest && (position - first < CLOSED_A_HIT || position > rest)) {
		s->rest = 0;
		bpf_map_delete_elem(&cuda_rests, key);
	}
	if (work->lo)
		not_done_before(key, position, work->lo);
	return position - first;
}

/* A global function, for the loop over streams. `how`: the kind of evidence, and from bit 8 on the error. */
__noinline int stream_learn(__u64 object, __u64 position, __u64 since, __u64 t, __u64 how)
{
	struct stream_key key = {.object = object, .start_ns = current_start_ns(), .tgid = current_tgid()};
	struct evidence e = {
		.position = position,
		.since = since,
		.t = t,
		.tid = current_tid(),
		.error = how >> 8,
		.kind = how & 0xff,
	};

	return close_covered(&key, &e);
}

static __always_inline void bind_event(struct stream_key *key, struct stream_state *s, struct event_key *event,
				       __u64 handle, __u64 now)
{
	__u64 position = stream_sure(key, s);
	struct event_state state = {
		.object = key->object,
		.position = position,
		.recorded = now,
		.stream = handle,
		.generation = current_generation(),
	};
	struct operation_key operation = placed_at(key, position);
	struct collective_record *r = bpf_map_lookup_elem(&operations, &operation);
	struct event_state *known;

	if (r) {
		if (r->state == STATE_CALLED) {
			if (!r->t_launch)
				r->t_launch = now;
			r->state = STATE_LAUNCHED;
		}
		state.tight = r->tid == current_tid() && s->marked != position;
	}
	s->marked = position;
	state.check = event_check(&state, event->event);
	known = bpf_map_lookup_elem(&cuda_events, event);
	/* In place: a new element costs twice as much as the rest. */
	if (known)
		*known = state;
	else
		bpf_map_update_elem(&cuda_events, event, &state, BPF_ANY);
}

/* cudaEventRecord(event, stream), cudaEventRecordWithFlags(event, stream, flags) */
UPROBE(cuda_event_record)
{
	struct cuda_process *process = process_with_open();
	struct stream_key key;
	struct event_key event;
	struct stream_state *s;

	if (!process)
		return;
	event.event = argument(ctx, 0);
	event.start_ns = process->start_ns;
	event.tgid = current_tgid();
	key.object = stream_argument(probe, argument(ctx, 1));
	key.start_ns = process->start_ns;
	key.tgid = event.tgid;
	s = key.object ? bpf_map_lookup_elem(&cuda_streams, &key) : 0;
	if (s)
		s->asked = 1;
	if (!s || s->oldest >= s->next || cuda_captures(process))
		bpf_map_delete_elem(&cuda_events, &event);
	else
		bind_event(&key, s, &event, argument(ctx, 1), probe->now);
}

UPROBE(cuda_event_destroy)
{
	struct cuda_process *process = process_with_open();
	struct event_key event;

	if (!process)
		return;
	event.event = argument(ctx, 0);
	event.start_ns = process->start_ns;
	event.tgid = current_tgid();
	bpf_map_delete_elem(&cuda_events, &event);
}

/* From now on only events show the ends of the stream's operations, and a new stream may get the same handle. */
UPROBE(cuda_stream_destroy)
{
	struct cuda_process *process = process_with_open();
	struct stream_key key;
	struct stream_state *s;

	if (!process || argument(ctx, 0) < LEAST_HANDLE)
		return;
	key.object = argument(ctx, 0);
	key.start_ns = process->start_ns;
	key.tgid = current_tgid();
	s = bpf_map_lookup_elem(&cuda_streams, &key);
	if (!s || s->oldest >= s->next)
		return;
	s->destroyed = s->next - 1;
	stream_learn(key.object, s->destroyed, probe->now, probe->now, EVIDENCE_NONE);
}

static __always_inline void call_enter(void *ctx, struct probe *probe, struct cuda_call *call)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct cuda_call *last = bpf_map_lookup_elem(&cuda_calls, &thread);

	call->t = probe->now;
	call->kind = COOKIE_KIND(probe);
	call->stack_pointer = user_stack_pointer(ctx);
	/* Written in place, as events are. Only a return at the same stack pointer belongs to this call. */
	if (last)
		*last = *call;
	else
		bpf_map_update_elem(&cuda_calls, &thread, call, BPF_ANY);
}

static __always_inline void call_forget(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct cuda_call *call = bpf_map_lookup_elem(&cuda_calls, &thread);

	if (call)
		call->kind = CALL_NONE;
}

/* Whether the programs have seen each hit that could have recorded the event again. */
static __always_inline int still_means(struct event_state *state)
{
	__u32 zero = 0, slot;
	struct cuda_settings *settings = bpf_map_lookup_elem(&cuda_settings, &zero);
	int i;

	if (!settings || state->recorded < settings->void_before || state->generation != current_generation())
		return 0;
	for (i = 0; i < EVENT_PROBES; i++) {
		slot = settings->event_slots[i];
		if (guard_refused_since(slot, state->recorded))
			return 0;
	}
	return 1;
}

static __always_inline void ask_event(struct cuda_process *process, struct cuda_call *call)
{
	struct event_key key = {.event = call->event, .start_ns = process->start_ns, .tgid = current_tgid()};
	struct event_state *state = bpf_map_lookup_elem(&cuda_events, &key), seen;

	if (!state)
		return;
	seen = *state;
	if (seen.check != event_check(&seen, call->event) || !still_means(&seen))
		return;
	call->asked = seen;
	call->stream = seen.stream;
}

static __always_inline void ask_stream(struct cuda_process *process, struct cuda_call *call, __u64 object, __u64 now)
{
	struct stream_key key = {.object = object, .start_ns = process->start_ns, .tgid = current_tgid()};
	struct stream_state *s = object ? bpf_map_lookup_elem(&cuda_streams, &key) : 0;

	if (s)
		s->asked = 1;
	if (!s || s->oldest >= s->next)
		return;
	call->asked.object = object;
	call->asked.position = stream_sure(&key, s);
	call->asked.recorded = now;
}

UPROBE(cuda_event_query)
{
	struct cuda_process *process = process_with_open();
	struct cuda_call call = {};

	if (!process)
		return;
	call.event = argument(ctx, 0);
	ask_event(process, &call);
	if (call.asked.position)
		call_enter(ctx, probe, &call);
	else
		call_forget();
}

UPROBE(cuda_stream_query)
{
	struct cuda_process *process = process_with_open();
	struct cuda_call call = {};

	if (!process)
		return;
	ask_stream(process, &call, stream_argument(probe, argument(ctx, 0)), probe->now);
	if (call.asked.position)
		call_enter(ctx, probe, &call);
	else
		call_forget();
}

static __always_inline int stores_syncs(void)
{
	__u32 zero = 0;
	struct cuda_settings *settings = bpf_map_lookup_elem(&cuda_settings, &zero);

	return settings && settings->syncs;
}

UPROBE(cuda_event_sync)
{
	struct cuda_process *process = process_with_open();
	struct cuda_call call = {};

	call.event = argument(ctx, 0);
	if (process)
		ask_event(process, &call);
	if (process || stores_syncs())
		call_enter(ctx, probe, &call);
}

UPROBE(cuda_stream_sync)
{
	struct cuda_process *process = process_with_open();
	struct cuda_call call = {};

	call.stream = argument(ctx, 0);
	if (process)
		ask_stream(process, &call, stream_argument(probe, call.stream), probe->now);
	if (process || stores_syncs())
		call_enter(ctx, probe, &call);
}

/* Notes the position of each stream of the thread's device. */
static __always_inline void ask_device(struct cuda_process *process)
{
	struct stream_key key = {.start_ns = process->start_ns, .tgid = current_tgid()};
	__u64 thread = bpf_get_current_pid_tgid();
	__s32 device = current_device();
	struct device_wait *wait;
	struct stream_state *s;
	int i;

	if (bpf_map_update_elem(&cuda_device_waits, &thread, (const void *)&no_wait, BPF_ANY) || device < 0)
		return;
	wait = bpf_map_lookup_elem(&cuda_device_waits, &thread);
	if (!wait)
		return;
	for (i = 0; i < PROCESS_STREAMS; i++) {
		key.object = process->streams[i];
		if (!key.object)
			break;
		s = bpf_map_lookup_elem(&cuda_streams, &key);
		if (s && s->device == device && s->oldest < s->next)
			wait->positions[i] = stream_sure(&key, s);
	}
}

UPROBE(cuda_device_sync)
{
	struct cuda_process *process = process_with_open();
	struct cuda_call call = {};

	if (process)
		ask_device(process);
	if (process || stores_syncs()) {
		call.asked.recorded = process ? probe->now : 0;
		call_enter(ctx, probe, &call);
	}
}

static __always_inline void learn_device(struct cuda_call *call, __u64 now, __u64 how)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct cuda_process *process = cuda_process_of(current_tgid(), current_start_ns());
	struct device_wait *wait = bpf_map_lookup_elem(&cuda_device_waits, &thread);
	int i;

	if (!process || !wait)
		return;
	for (i = 0; i < PROCESS_STREAMS; i++) {
		if (!process->streams[i])
			break;
		if (wait->positions[i])
			stream_learn(process->streams[i], wait->positions[i], call->asked.recorded, now, how);
	}
	bpf_map_delete_elem(&cuda_device_waits, &thread);
}

/* Whether the device does no more work for the process after this error (driver_types.h). */
static __always_inline int is_fatal(__u32 error)
{
	switch (error) {
	case 214: /* ECCUncorrectable */
	case 220: /* NvlinkUncorrectable */
	case 700: /* IllegalAddress */
	case 702: /* LaunchTimeout */
	case 709: /* ContextIsDestroyed */
	case 710: /* Assert */
	case 714: /* HardwareStackError */
	case 715: /* IllegalInstruction */
	case 716: /* MisalignedAddress */
	case 717: /* InvalidAddressSpace */
	case 718: /* InvalidPc */
	case 719: /* LaunchFailure */
	case 721: /* Contained */
	case 722: /* TensorMemoryLeak */
	case 999: /* Unknown */
		return 1;
	}
	return 0;
}

static __always_inline void tell_sync(struct cuda_call *call, __u32 result, __u64 now)
{
	struct cuda_sync_record record = {
		.t = call->t,
		.duration_ns = now - call->t,
		.start_ns = current_start_ns(),
		.stream = call->stream,
		.event = call->event,
		.tgid = current_tgid(),
		.tid = current_tid(),
		.result = result,
		.kind = call->kind,
		.stream_known = call->kind == CALL_STREAM_SYNC || call->asked.position,
	};

	RING_PUSH(cuda_syncs, &record);
}

static __always_inline int call_returns(void *ctx, struct probe *probe, struct cuda_call *call)
{
	__u64 popped = target_arch == ARCH_X86_64 ? 8 : 0;

	if (!call || call->kind != COOKIE_KIND(probe))
		return 0;
	call->kind = CALL_NONE;
	return call->stack_pointer + popped == user_stack_pointer(ctx);
}

/* At the return of a call that waits or queries. */
UPROBE(cuda_returned)
{
	__u64 thread = bpf_get_current_pid_tgid(), how;
	struct cuda_call *found = bpf_map_lookup_elem(&cuda_calls, &thread), call;
	__u32 result = return_value(ctx);

	if (!call_returns(ctx, probe, found))
		return;
	call = *found;
	call.kind = COOKIE_KIND(probe);
	how = call.kind <= CALL_DEVICE_SYNC ? EVIDENCE_SYNC : EVIDENCE_POLL;
	if (how == EVIDENCE_SYNC && stores_syncs())
		tell_sync(&call, result, probe->now);
	if (result == CUDA_NOT_READY && call.asked.tight) {
		struct stream_key key = {call.asked.object, current_start_ns(), current_tgid()};

		not_done_before(&key, call.asked.position, call.t);
	}
	if (result && !is_fatal(result))
		return;
	how |= result << 8;
	if (call.kind == CALL_DEVICE_SYNC && call.asked.recorded)
		learn_device(&call, probe->now, how);
	else if (call.asked.position)
		stream_learn(call.asked.object, call.asked.position, call.asked.recorded, probe->now, how);
}

/* Begin and end of a capture (stream, ...), and cudaSetDevice(device): they count if they succeed. */
UPROBE(cuda_switch)
{
	struct cuda_call call = {};

	call.stream = argument(ctx, 0);
	call_enter(ctx, probe, &call);
}

static __always_inline void set_device(__u64 device)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct cuda_device current = {
		.started = thread_started(),
		.number = (__s32)device,
		.generation = current_generation(),
	};

	bpf_map_update_elem(&cuda_devices, &thread, &current, BPF_ANY);
}

static __always_inline void capture(struct stream_key *key, __u32 result, __u64 kind)
{
	__u32 tgid = key->tgid, one = 1, generation = current_generation();
	struct cuda_process *process = cuda_process_of(tgid, key->start_ns);

	if (!process)
		return;
	/* A capture may have ended while the programs were off. */
	if (process->generation != generation) {
		process->generation = generation;
		process->captures = 0;
	}
	if (kind == CALL_BEGIN_CAPTURE) {
		if (!result && !bpf_map_update_elem(&cuda_captures_of, key, &one, BPF_NOEXIST))
			__sync_fetch_and_add(&process->captures, 1);
		return;
	}
	if (result == CUDA_ILLEGAL_STATE || result == CUDA_CAPTURE_UNMATCHED || result == CUDA_CAPTURE_WRONG_THREAD)
		return;
	if (!bpf_map_delete_elem(&cuda_captures_of, key) && process->captures)
		__sync_fetch_and_add(&process->captures, -1);
}

UPROBE(cuda_switched)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct cuda_call *call = bpf_map_lookup_elem(&cuda_calls, &thread);
	struct stream_key key = {};
	__u32 result = return_value(ctx);

	if (!call_returns(ctx, probe, call))
		return;
	if (COOKIE_KIND(probe) == CALL_SET_DEVICE) {
		if (!result)
			set_device(call->stream);
		return;
	}
	be_witness();
	key.object = call->stream;
	key.start_ns = current_start_ns();
	key.tgid = current_tgid();
	capture(&key, result, COOKIE_KIND(probe));
}

/* Launches of kernels and graphs, counted. */
UPROBE(cuda_launch)
{
	struct process_key key = {.start_ns = current_start_ns(), .tgid = current_tgid()};
	struct cuda_launches *count = bpf_map_lookup_elem(&cuda_launches, &key);
	struct cuda_launches first = {};
	__u32 zero = 0;
	__u64 *lost;

	if (!count) {
		bpf_map_update_elem(&cuda_launches, &key, &first, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&cuda_launches, &key);
	}
	if (!count) {
		lost = bpf_map_lookup_elem(&cuda_launches_lost, &zero);
		if (lost)
			++*lost;
		return;
	}
	if (COOKIE_KIND(probe) == CALL_GRAPH)
		count->graphs++;
	else
		count->kernels++;
}

/* Run by the collector for a stream with evidence that is not used up. Arguments: object, start_ns, tgid. */
SEC("raw_tp")
int cuda_close_rest(struct bpf_raw_tracepoint_args *ctx)
{
	struct stream_key key = {.object = ctx->args[0], .start_ns = ctx->args[1], .tgid = ctx->args[2]};
	struct evidence *rest = bpf_map_lookup_elem(&cuda_rests, &key), e;

	if (!rest)
		return 0;
	e = *rest;
	return close_covered(&key, &e);
}

/*
 * Run by the collector for a stream that its process neither queries nor waits for. Arguments: object, start_ns, tgid.
 * Closes up to CLOSED_A_HIT of its operations, which would stay open for ever.
 */
SEC("raw_tp")
int cuda_give_up(struct bpf_raw_tracepoint_args *ctx)
{
	struct stream_key key = {.object = ctx->args[0], .start_ns = ctx->args[1], .tgid = ctx->args[2]};
	struct stream_state *s = bpf_map_lookup_elem(&cuda_streams, &key);
	struct evidence none = {.kind = EVIDENCE_NONE};

	if (!s || s->asked)
		return 0;
	none.since = bpf_ktime_get_ns();
	none.position = s->next - 1;
	s->given_up = none.since;
	return close_covered(&key, &none);
}

char LICENSE[] SEC("license") = "GPL";
