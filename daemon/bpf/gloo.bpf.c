// SPDX-License-Identifier: Apache-2.0
/*
 * Collectives of torch's gloo backend, from functions that libtorch_cpu.so exports (ProcessGroupGloo.hpp):
 *
 *	ProcessGroupGloo::allreduce(...)	the call: group, tensors, options
 *	AsyncWork::AsyncWork(...)		inside of it, on the same thread: object, operation type, sequence number
 *	AsyncWork::execute(work)		a thread of gloo starts it
 *	AsyncWork::finishWorkGloo()		and ends it, or finishWorkGlooError(exception)
 *	SendWork, RecvWork			have no such end: Work::finishAndThrow, which their wait() calls, closes them
 *
 * An operation whose call was not seen is not reported.
 */
#include "collectives.bpf.h"

#define MAX_TENSORS 64
#define MAX_STRING (1 << 20)
#define MAX_HASHED 512
#define MAX_RANKS (1 << 24)
#define CALL_DEPTH_BYTES (1 << 16)
#define FUNCTION_BYTES (1 << 13)
#define ABSENT 0xffff
#define SSO_BYTES 16
#define INLINE_SIZES 5
#define MAX_DIMENSIONS 64

/* c10d::OpType (Types.hpp, Work.hpp) */
#define OP_ALLREDUCE 1
#define OP_REDUCE_SCATTER 9
#define OP_SEND 12
#define OP_RECVANYSOURCE 14
#define OP_BARRIER 15
#define OP_ALLREDUCE_SPARSE 18

/* Offsets in bytes, ABSENT for a missing member; written from layouts/gloo.py, one entry per build. */
struct gloo_layout {
	__u16 present;
	__u16 backend_rank;
	__u16 backend_size;
	__u16 backend_uid;
	__u16 backend_desc;
	__u16 tensor_sizes; /* SizesAndStrides: the number of dimensions, then up to 5 sizes */
	__u16 tensor_numel;
	__u16 tensor_dtype;
	__u16 broadcast_root;
	__u16 broadcast_async;
	__u16 allreduce_redop;
	__u16 allreduce_async;
	__u16 reduce_redop;
	__u16 reduce_root;
	__u16 reduce_async;
	__u16 allgather_async;
	__u16 gather_root;
	__u16 gather_async;
	__u16 scatter_root;
	__u16 scatter_async;
	__u16 reduce_scatter_redop;
	__u16 reduce_scatter_async;
	__u16 alltoall_async;
	__u16 barrier_async;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct gloo_layout);
} gloo_layouts SEC(".maps");

/* The part of the attach cookie above the slot. */
#define LAYOUT_INDEX(probe) ((__u32)((probe)->cookie >> 16))

struct vector {
	__u64 begin;
	__u64 end;
};

static __always_inline __u64 read_word(__u64 address)
{
	__u64 value = 0;

	if (bpf_probe_read_user(&value, sizeof(value), (const void *)address))
		return 0;
	return value;
}

/*
 * Argument `n` of a member function that returns an intrusive_ptr; 0 is `this`. The address for the return value is an
 * argument before them on x86-64, and has a register of its own (x8) on arm64.
 */
static __always_inline __u64 member_argument(void *ctx, const int n)
{
	return target_arch == ARCH_X86_64 ? argument(ctx, n + 1) : argument(ctx, n);
}

/*
 * A hash of the words of a long text and its last 8 bytes. A global function without a branch on the data: inlined and
 * with one, the verifier would walk each path through the loop with each path through its caller.
 */
static __noinline __u64 hash_of(__u64 text, __u64 length)
{
	__u64 hash = 0xcbf29ce484222325ULL, chunk;
	int i;

	for (i = 0; i < MAX_HASHED / 8; i++) {
		if (i * 8 + 8 > length)
			break;
		bpf_probe_read_user(&chunk, sizeof(chunk), (const void *)(text + i * 8));
		hash = (hash ^ chunk) * 0x100000001b3ULL;
		hash ^= hash >> 29;
	}
	bpf_probe_read_user(&chunk, sizeof(chunk), (const void *)(text + length - 8));
	return (hash ^ chunk) * 0x100000001b3ULL;
}

static __always_inline void hash_name(struct collective_record *r, __u64 text, __u64 length)
{
	__u64 hash = hash_of(text, length);

	__builtin_memcpy(r->name + NAME_BYTES - 8, &hash, 8);
}

/* Reads a libstdc++ std::string at `address`. Returns its length, or 0 if `address` holds no string. */
static __always_inline __u64 read_string(char *into, __u32 room, __u64 address, __u64 *text)
{
	struct {
		__u64 text;
		__u64 length;
	} s;
	__u32 size;

	if (bpf_probe_read_user(&s, sizeof(s), (const void *)address))
		return 0;
	if (s.length > MAX_STRING || (s.length >= SSO_BYTES && s.text == address + SSO_BYTES))
		return 0;
	if (s.length < SSO_BYTES && s.text != address + SSO_BYTES && read_word(address + SSO_BYTES) < s.length)
		return 0;
	size = s.length < room ? s.length : room;
	/* The verifier needs both bounds on the value that is passed. */
	if (size == 0 || size > room || bpf_probe_read_user(into, size, (const void *)s.text))
		return 0;
	*text = s.text;
	return s.length;
}

/* The word at `offset` of the window; an offset outside of the window wraps around and reads another value. */
static __always_inline __u64 word_at(const __u8 *window, __u32 offset)
{
	return *(const __u64 *)(window + (offset & (WINDOW - 8)));
}

/* Whether the string at `offset` of the window, which is at `address`, lies wholly in the window. */
static __always_inline int in_place(const __u8 *window, __u32 offset, __u64 address)
{
	return word_at(window, offset) == address + SSO_BYTES && word_at(window, offset + 8) < SSO_BYTES;
}

static __always_inline int same_head(const __u8 *a, const __u8 *b)
{
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;
	__u64 differs = 0;
	int i;

	for (i = 0; i < GROUP_BYTES / 8; i++)
		differs |= x[i] ^ y[i];
	return !differs;
}

static __always_inline void read_names(struct collective_record *r, struct gloo_layout *layout, __u64 group)
{
	__u64 text = 0, length;

	__builtin_memset(r->name, 0, NAME_BYTES);
	__builtin_memset(r->desc, 0, DESC_BYTES);
	if (layout->backend_uid != ABSENT) {
		length = read_string(r->name, NAME_BYTES, group + layout->backend_uid, &text);
		if (length > NAME_BYTES)
			hash_name(r, text, length);
		r->name_form = length > NAME_BYTES ? NAME_HASHED : length ? NAME_TEXT : NAME_NONE;
	}
	if (layout->backend_desc != ABSENT)
		read_string(r->desc, DESC_BYTES, group + layout->backend_desc, &text);
}

/*
 * Rank, size and names of the group, from the window that begins at its rank (layouts/gloo.py). Names that lie wholly in
 * the window are read again only after a change. Returns 0 if the offsets do not fit this build: then the caller reads
 * no further values with them.
 */
static __noinline int read_group(struct call *call, struct gloo_layout *layout, __u64 group)
{
	__u32 uid = layout->backend_uid - layout->backend_rank, desc = layout->backend_desc - layout->backend_rank;
	struct collective_record *r = &call->record;
	__s32 rank, size;
	__u64 ranks;

	r->comm = group;
	if (layout->backend_rank == ABSENT ||
	    bpf_probe_read_user(call->window, GROUP_BYTES, (const void *)(group + layout->backend_rank)))
		goto unknown;
	ranks = word_at(call->window, 0);
	rank = (__u32)ranks;
	size = ranks >> 32;
	if (rank < 0 || rank >= size || size > MAX_RANKS)
		goto unknown;
	r->comm_rank = rank;
	r->comm_size = size;
	if (call->group == group && same_head(call->window, call->head)) {
		r->name_form = word_at(call->head, uid + 8) ? NAME_TEXT : NAME_NONE;
		return 1;
	}
	read_names(r, layout, group);
	call->group = 0;
	if (layout->backend_uid != ABSENT && layout->backend_desc != ABSENT &&
	    in_place(call->window, uid, group + layout->backend_uid) &&
	    in_place(call->window, desc, group + layout->backend_desc)) {
		__builtin_memcpy(call->head, call->window, GROUP_BYTES);
		call->group = group;
	}
	return 1;
unknown:
	__builtin_memset(r->name, 0, NAME_BYTES);
	__builtin_memset(r->desc, 0, DESC_BYTES);
	call->group = 0;
	return 0;
}

/* The product of the sizes must be the number of elements: a check that the offsets fit this build. */
static __always_inline int is_tensor(const __u8 *window, __u64 numel)
{
	const __u64 *shape = (const __u64 *)window;
	__u64 dimensions = shape[0], product = 1;
	int i;

	if (dimensions > INLINE_SIZES)
		return dimensions <= MAX_DIMENSIONS;
	for (i = 0; i < INLINE_SIZES; i++)
		product *= i < dimensions ? shape[1 + i] : 1;
	return product == numel;
}

/*
 * Adds the elements of one tensor to the draft of the calling thread; tensors of several types together have no type.
 * Returns 0 if `tensor` is no tensor. A global function, verified once and not for each iteration of a loop.
 */
__noinline int add_tensor(__u32 index, __u64 tensor)
{
	__u64 thread = bpf_get_current_pid_tgid(), impl = read_word(tensor), numel;
	struct gloo_layout *layout = bpf_map_lookup_elem(&gloo_layouts, &index);
	struct call *call = bpf_map_lookup_elem(&calls, &thread);
	struct collective_record *r;
	__u16 dtype;

	if (!layout || !call || !impl || layout->tensor_sizes == ABSENT ||
	    bpf_probe_read_user(call->window, TENSOR_BYTES, (const void *)(impl + layout->tensor_sizes)))
		return 0;
	numel = word_at(call->window, layout->tensor_numel - layout->tensor_sizes);
	dtype = word_at(call->window, layout->tensor_dtype - layout->tensor_sizes);
	if (!is_tensor(call->window, numel))
		return 0;
	r = &call->record;
	if (r->count == UNKNOWN_WORD) {
		r->count = numel;
		r->dtype = dtype < UNKNOWN_BYTE ? dtype : UNKNOWN_BYTE;
	} else {
		r->count += numel;
		if (r->dtype != dtype)
			r->dtype = UNKNOWN_BYTE;
	}
	return 1;
}

static __always_inline void add_tensors(struct collective_record *r, __u32 layout, __u64 vector)
{
	__u64 tensor;
	struct vector v;
	int i;

	if (bpf_probe_read_user(&v, sizeof(v), (const void *)vector))
		return;
	tensor = v.begin;
	for (i = 0; i < MAX_TENSORS; i++) {
		if (tensor >= v.end || !add_tensor(layout, tensor))
			break;
		tensor += 8;
	}
	if (tensor < v.end)
		r->count = UNKNOWN_WORD;
}

/* std::vector<std::vector<Tensor>>: gloo takes one list only, and for scatter none except on the root. */
static __always_inline void add_nested(struct collective_record *r, __u32 layout, __u64 vector)
{
	struct vector v;

	if (bpf_probe_read_user(&v, sizeof(v), (const void *)vector))
		return;
	if (v.begin < v.end)
		add_tensors(r, layout, v.begin);
}

static __always_inline void read_async(struct collective_record *r, __u64 options, __u16 offset)
{
	__u8 value;

	if (offset != ABSENT && !bpf_probe_read_user(&value, 1, (const void *)(options + offset)) && value <= 1)
		r->async_op = value;
}

static __always_inline void read_redop(struct collective_record *r, __u64 options, __u16 offset)
{
	if (offset != ABSENT)
		bpf_probe_read_user(&r->redop, 1, (const void *)(options + offset));
}

static __always_inline void read_root(struct collective_record *r, __u64 options, __u16 offset)
{
	if (offset != ABSENT)
		r->root = (__s32)read_word(options + offset);
}

/*
 * Gloo has no reduce_scatter: torch implements it with allreduces. An allreduce that is called within a noted function
 * is part of it.
 */
static __always_inline void note_outer(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *call = bpf_map_lookup_elem(&calls, &thread);

	if (call)
		call->outer = user_ip(ctx);
}

static __always_inline __u64 operation_of(struct call *call, __u64 op)
{
	if (op == OP_ALLREDUCE && call->outer && call->returns_to - call->outer < FUNCTION_BYTES)
		return OP_REDUCE_SCATTER;
	return op;
}

static __always_inline struct gloo_layout *layout_of(struct probe *probe)
{
	__u32 index = LAYOUT_INDEX(probe);
	struct gloo_layout *layout = bpf_map_lookup_elem(&gloo_layouts, &index);

	return layout && layout->present ? layout : 0;
}

/* GLOO_CALL(name) { ... }: a public function; its body sees the draft `r`, `layout`, `probe` and `ctx`. */
#define GLOO_CALL(name)                                                                                                \
	static __always_inline void name##_fill(void *ctx, struct probe *probe, struct collective_record *r,           \
						struct gloo_layout *layout);                                           \
	UPROBE(name)                                                                                                   \
	{                                                                                                              \
		struct gloo_layout *layout = layout_of(probe);                                                         \
		struct call *call = layout ? call_begin(ctx, probe, BACKEND_GLOO) : 0;                                 \
                                                                                                                       \
		if (!call)                                                                                             \
			return;                                                                                        \
		if (read_group(call, layout, member_argument(ctx, 0)))                                        \
			name##_fill(ctx, probe, &call->record, layout);                                                \
	}                                                                                                              \
	static __always_inline void name##_fill(void *ctx, struct probe *probe, struct collective_record *r,           \
						struct gloo_layout *layout)

GLOO_CALL(gloo_broadcast)
{
	__u64 options = member_argument(ctx, 2);

	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 1));
	read_root(r, options, layout->broadcast_root);
	read_async(r, options, layout->broadcast_async);
}

/* allreduce and allreduce_coalesced: their options begin with the same members */
GLOO_CALL(gloo_allreduce)
{
	__u64 options = member_argument(ctx, 2);

	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 1));
	read_redop(r, options, layout->allreduce_redop);
	read_async(r, options, layout->allreduce_async);
}

GLOO_CALL(gloo_reduce)
{
	__u64 options = member_argument(ctx, 2);

	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 1));
	read_redop(r, options, layout->reduce_redop);
	read_root(r, options, layout->reduce_root);
	read_async(r, options, layout->reduce_async);
}

/* allgather, allgather_coalesced and allgather_into_tensor_coalesced: outputs, inputs, options */
GLOO_CALL(gloo_allgather)
{
	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_async(r, member_argument(ctx, 3), layout->allgather_async);
}

GLOO_CALL(gloo_gather)
{
	__u64 options = member_argument(ctx, 3);

	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_root(r, options, layout->gather_root);
	read_async(r, options, layout->gather_async);
}

GLOO_CALL(gloo_scatter)
{
	__u64 options = member_argument(ctx, 3);

	/* The outputs have the type. Only the root contributes elements. */
	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 1));
	r->count = r->count == UNKNOWN_WORD ? UNKNOWN_WORD : 0;
	add_nested(r, LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_root(r, options, layout->scatter_root);
	read_async(r, options, layout->scatter_async);
}

GLOO_CALL(gloo_reduce_scatter)
{
	__u64 options = member_argument(ctx, 3);

	note_outer(ctx);
	add_nested(r, LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_redop(r, options, layout->reduce_scatter_redop);
	read_async(r, options, layout->reduce_scatter_async);
}

/* reduce_scatter_tensor_coalesced: outputs, inputs, options */
GLOO_CALL(gloo_reduce_scatter_tensors)
{
	__u64 options = member_argument(ctx, 3);

	note_outer(ctx);
	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_redop(r, options, layout->reduce_scatter_redop);
	read_async(r, options, layout->reduce_scatter_async);
}

GLOO_CALL(gloo_alltoall)
{
	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_async(r, member_argument(ctx, 3), layout->alltoall_async);
}

/* alltoall_base: output tensor, input tensor, output counts, input counts, options */
GLOO_CALL(gloo_alltoall_base)
{
	add_tensor(LAYOUT_INDEX(probe), member_argument(ctx, 2));
	read_async(r, member_argument(ctx, 5), layout->alltoall_async);
}

GLOO_CALL(gloo_barrier)
{
	r->count = 0;
	read_async(r, member_argument(ctx, 1), layout->barrier_async);
}

/* send and recv: tensors, the other rank, tag */
GLOO_CALL(gloo_point_to_point)
{
	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 1));
	r->peer = (__s32)member_argument(ctx, 2);
}

GLOO_CALL(gloo_recv_any)
{
	add_tensors(r, LAYOUT_INDEX(probe), member_argument(ctx, 1));
}

/*
 * Opens the operation from the draft of the call that this thread is in. A call that threw before it created its
 * operation left its draft behind, so a draft from much further down the stack is not used.
 */
static __always_inline void open_work(void *ctx, __u64 object, __u64 op, __u64 seq)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *call = bpf_map_lookup_elem(&calls, &thread);
	__u64 stack_pointer = user_stack_pointer(ctx);
	struct operation_key key;

	if (!call || call->record.backend != BACKEND_GLOO || stack_pointer >= call->stack_pointer ||
	    call->stack_pointer - stack_pointer > CALL_DEPTH_BYTES)
		return;
	key = operation_key(object);
	call->record.object = object;
	call->record.op = operation_of(call, op);
	call->record.seq = seq;
	call->record.timing = op >= OP_SEND && op <= OP_RECVANYSOURCE ? TIMING_SYNC : TIMING_EXACT;
	if (op == OP_ALLREDUCE_SPARSE)
		call->record.count = UNKNOWN_WORD;
	operation_open(&key, &call->record);
	/* A draft is used for one operation. */
	call->record.backend = 0;
}

/* AsyncWork::AsyncWork(this, shared_ptr<Context>, outputs, OpType, seq, timeout, title, inputs) */
UPROBE(gloo_work)
{
	open_work(ctx, argument(ctx, 0), (__u8)argument(ctx, 3), argument(ctx, 4));
}

/* SendWork::SendWork(this, tensor, buffer, seq) */
UPROBE(gloo_send_work)
{
	open_work(ctx, argument(ctx, 0), OP_SEND, argument(ctx, 3));
}

/* RecvWork::RecvWork(this, tensor, buffer, OpType, seq, title) */
UPROBE(gloo_recv_work)
{
	open_work(ctx, argument(ctx, 0), (__u8)argument(ctx, 3), argument(ctx, 4));
}

/* AsyncWork::execute(intrusive_ptr<AsyncWork> const &) */
UPROBE(gloo_execute)
{
	struct operation_key key = operation_key(read_word(argument(ctx, 0)));
	struct collective_record *record = bpf_map_lookup_elem(&operations, &key);

	if (!record || record->state != STATE_CALLED)
		return;
	record->t_start = probe->now;
	record->state = STATE_STARTED;
}

/* AsyncWork::finishWorkGloo(this) */
UPROBE(gloo_finish)
{
	struct operation_key key = operation_key(argument(ctx, 0));

	operation_done(&key, probe->now);
}

/*
 * The text of an exception: std::runtime_error and c10::Error both hold a pointer to it after their vtable. The prefix
 * "[file:line] " of gloo is skipped, as it would take all the room.
 */
static __always_inline void read_error(struct collective_record *r, __u64 exception)
{
	__u64 text = read_word(read_word(exception) + 8);
	char head[96] = {};
	int i;

	if (bpf_probe_read_user_str(head, sizeof(head), (const void *)text) < 0)
		return;
	if (head[0] == '[') {
		for (i = 1; i < (int)sizeof(head) - 2; i++) {
			if (head[i] == ']' && head[i + 1] == ' ') {
				text += i + 2;
				break;
			}
		}
	}
	bpf_probe_read_user_str(r->error, ERROR_BYTES, (const void *)text);
}

/* AsyncWork::finishWorkGlooError(this, exception_ptr const &) */
UPROBE(gloo_finish_error)
{
	struct operation_key key = operation_key(argument(ctx, 0));
	struct leaving *leaving = operation_leave(&key);

	if (!leaving)
		return;
	leaving->record.t_done_lo = probe->now;
	leaving->record.t_done_hi = probe->now;
	read_error(&leaving->record, argument(ctx, 1));
	operation_close(&key, leaving, STATE_FAILED);
}

/* Work::finishAndThrow(this, exception_ptr): the caller has waited, so the operation has ended before now. */
UPROBE(gloo_waited)
{
	struct operation_key key = operation_key(argument(ctx, 0));
	struct leaving *leaving = operation_leave(&key);
	__u64 exception = argument(ctx, 1);

	if (!leaving || leaving->record.timing != TIMING_SYNC)
		return;
	leaving->record.t_done_hi = probe->now;
	if (read_word(exception)) {
		read_error(&leaving->record, exception);
		operation_close(&key, leaving, STATE_FAILED);
	} else {
		operation_close(&key, leaving, STATE_DONE);
	}
}

/*
 * Run by the collector for an operation whose process has ended. Arguments: object, position, start_ns, tgid. One run
 * moves the operation, so it is in the map or in the ring whenever the collector dies; the program that deletes it from
 * the map reports it. Returns 1 if it has closed the operation.
 */
SEC("raw_tp")
int collectives_abandon(struct bpf_raw_tracepoint_args *ctx)
{
	struct operation_key key = {
		.object = ctx->args[0],
		.position = ctx->args[1],
		.start_ns = ctx->args[2],
		.tgid = ctx->args[3],
	};
	struct leaving *leaving = operation_leave(&key);
	struct collective_record *draft;
	__u8 state;

	if (!leaving || !operation_left(&key, leaving))
		return 0;
	draft = &leaving->record;
	state = draft->state;
	draft->state = STATE_ABANDONED;
	if (!RING_OFFER(collectives, draft))
		return 1;
	/* The ring is full: the operation is put back as it was, and the collector tries again. */
	draft->state = state;
	if (operation_put(bpf_map_lookup_elem(&operation_shares, &key.start_ns), &key, draft))
		RING_LOST(collectives);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
