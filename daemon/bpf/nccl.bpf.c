// SPDX-License-Identifier: Apache-2.0
/*
 * Collectives of NCCL. All operations go through ncclEnqueueCheck, which is probed if the library has its symbol;
 * otherwise the public calls are probed (symbols.py chooses). The calls return once the operation is enqueued, and
 * completion.bpf.h follows the operation on its stream.
 */
#include "nccl_comm.bpf.h"
#include "nccl_making.bpf.h"

/* The part of the attach cookie of a public call above the slot and the tag of the file. */
#define COOKIE_OPERATION(probe) ((probe)->cookie >> 48)

/* ncclFunc_t (nccl_common.h) */
enum nccl_function {
	NCCL_BROADCAST = 0,
	NCCL_REDUCE = 1,
	NCCL_ALL_GATHER = 2,
	NCCL_REDUCE_SCATTER = 3,
	NCCL_ALL_REDUCE = 4,
	NCCL_SEND = 6,
	NCCL_RECV = 7,
	NCCL_ALL_TO_ALL = 8,
	NCCL_SCATTER = 9,
	NCCL_GATHER = 10,
	NCCL_PUT_SIGNAL = 12,
	NCCL_SIGNAL = 13,
};

/* struct ncclInfo (src/include/info.h), the same in all versions from 2.18 to 2.32 */
struct nccl_info {
	__u32 coll;
	__u32 padding;
	__u64 name;
	__u64 send;
	__u64 receive;
	__u64 count;
	__u32 dtype;
	__u32 redop;
	__s32 root; /* or peer */
	__u32 more_padding;
	__u64 comm;
	__u64 stream;
};

/*
 * A file that is seen through two overlay mounts has two inodes, and both attached programs run at each call. The second
 * run is recognised by its different attachment at the same stack pointer.
 */
static __always_inline int is_echo(void *ctx, struct probe *probe, struct nccl_thread *thread, __u8 op)
{
	return thread->last == LAST_OPERATION && thread->record.op == op &&
	       thread->attachment != probe->cookie >> 16 && thread->stack_pointer == user_stack_pointer(ctx);
}

/* Begins the draft of an operation. Returns NULL for the second run at one call. */
static __always_inline struct collective_record *begin(void *ctx, struct probe *probe, struct nccl_thread *thread,
						       __u8 op)
{
	struct collective_record *r = &thread->record;
	__u64 id = bpf_get_current_pid_tgid();

	if (is_echo(ctx, probe, thread, op))
		return 0;
	thread->last = LAST_OPERATION;
	thread->attachment = probe->cookie >> 16;
	thread->stack_pointer = user_stack_pointer(ctx);
	__builtin_memset(r, 0, sizeof(*r));
	r->start_ns = thread->start_ns;
	r->tgid = id >> 32;
	r->tid = (__u32)id;
	r->t_call = probe->now;
	r->backend = BACKEND_NCCL;
	r->op = op;
	r->seq = UNKNOWN_WORD;
	r->comm_rank = UNKNOWN_INT;
	r->comm_size = UNKNOWN_INT;
	r->root = UNKNOWN_INT;
	r->peer = UNKNOWN_INT;
	r->cuda_device = UNKNOWN_INT;
	r->redop = UNKNOWN_BYTE;
	r->async_op = UNKNOWN_BYTE;
	r->state = STATE_CALLED;
	r->group_id = in_group(thread, probe->now) ? thread->group_id : 0;
	return r;
}

/* Numbers the operation within its communicator as NCCL does, which drops empty collectives before it counts. */
static __always_inline void number(struct collective_record *r, struct nccl_thread *thread, struct nccl_comm *comm,
				   struct cuda_process *process)
{
	if (r->op > NCCL_ALL_REDUCE || !r->count || (process && cuda_captures(process)))
		return;
	if (comm->base == UNKNOWN_WORD && comm->layout != NO_LAYOUT && !thread->depth)
		comm_count_from(comm, r->comm);
	if (comm->base != UNKNOWN_WORD)
		r->seq = comm->base + comm->count;
	comm->count++;
}

static __always_inline void enqueue(struct collective_record *r, struct nccl_thread *thread, __u64 count, __u32 dtype,
				    __u64 address, __u64 stream)
{
	struct cuda_process *process = cuda_process_of(r->tgid, r->start_ns);
	struct nccl_comm *comm;
	struct operation_key key;

	r->count = count;
	r->dtype = dtype < UNKNOWN_BYTE ? dtype : UNKNOWN_BYTE;
	r->stream = stream;
	r->comm = address;
	comm = comm_at(thread, address, r->t_call);
	if (comm) {
		if (comm->identity != IDENTITY_NONE) {
			r->name_form = NAME_NUMBER;
			__builtin_memcpy(r->name, &comm->hash, sizeof(comm->hash));
		}
		r->comm_rank = comm->rank;
		r->comm_size = comm->size;
		r->cuda_device = comm->device;
		number(r, thread, comm, process);
	}
	key = stream_enqueue(r, process);
	if (key.position)
		range_add(thread, &key);
	else if (!thread->depth)
		thread->ranges = 0;
}

static __always_inline void set_redop(struct collective_record *r, __u32 redop)
{
	if (r->op == NCCL_REDUCE || r->op == NCCL_REDUCE_SCATTER || r->op == NCCL_ALL_REDUCE)
		r->redop = redop < UNKNOWN_BYTE ? redop : UNKNOWN_BYTE;
}

static __always_inline void set_root(struct collective_record *r, __s32 root)
{
	switch (r->op) {
	case NCCL_BROADCAST:
	case NCCL_REDUCE:
	case NCCL_SCATTER:
	case NCCL_GATHER:
		r->root = root;
		break;
	case NCCL_SEND:
	case NCCL_RECV:
	case NCCL_PUT_SIGNAL:
	case NCCL_SIGNAL:
		r->peer = root;
		break;
	}
}

/* Opens the operation that `info` describes. */
static __always_inline void operation(void *ctx, struct probe *probe, struct nccl_thread *thread,
				      struct nccl_info *info)
{
	struct collective_record *r = begin(ctx, probe, thread, info->coll < UNKNOWN_BYTE ? info->coll : UNKNOWN_BYTE);

	if (!r)
		return;
	set_redop(r, info->redop);
	set_root(r, info->root);
	enqueue(r, thread, info->count, info->dtype, info->comm, info->stream);
}

/* ncclEnqueueCheck(struct ncclInfo *) */
UPROBE(nccl_enqueue)
{
	struct nccl_thread *thread = this_thread();
	struct nccl_info info;

	if (!thread || bpf_probe_read_user(&info, sizeof(info), (const void *)argument(ctx, 0))) {
		RING_LOST(collectives);
		return;
	}
	operation(ctx, probe, thread, &info);
}

/* The type always follows the count, and the stream follows the communicator. */
static __always_inline void read_call(void *ctx, struct nccl_info *info, const int count, const int comm)
{
	info->count = argument(ctx, count);
	info->dtype = argument(ctx, count + 1);
	info->comm = argument(ctx, comm);
	info->stream = argument(ctx, comm + 1);
}

/* A public call, which the cookie names. One program serves all, as each program is verified with all its callees. */
UPROBE(nccl_call)
{
	struct nccl_info info = {.coll = COOKIE_OPERATION(probe)};
	struct nccl_thread *thread = this_thread();

	if (!thread) {
		RING_LOST(collectives);
		return;
	}
	switch (info.coll) {
	/* (send, recv, count, dtype, op, comm, stream) */
	case NCCL_ALL_REDUCE:
	case NCCL_REDUCE_SCATTER:
		info.redop = argument(ctx, 4);
		read_call(ctx, &info, 2, 5);
		break;
	/* (send, recv, count, dtype, comm, stream) */
	case NCCL_ALL_GATHER:
	case NCCL_ALL_TO_ALL:
		read_call(ctx, &info, 2, 4);
		break;
	/* (send, recv, count, dtype, root, comm, stream). ncclBcast ends in a call of ncclBroadcast. */
	case NCCL_BROADCAST:
	case NCCL_GATHER:
	case NCCL_SCATTER:
		info.root = argument(ctx, 4);
		read_call(ctx, &info, 2, 5);
		break;
	/* (send, recv, count, dtype, op, root, comm, stream) */
	case NCCL_REDUCE:
		info.redop = argument(ctx, 4);
		info.root = argument(ctx, 5);
		read_call(ctx, &info, 2, 6);
		break;
	/* (buffer, count, dtype, peer, comm, stream) */
	case NCCL_SEND:
	case NCCL_RECV:
		info.root = argument(ctx, 3);
		read_call(ctx, &info, 1, 4);
		break;
	}
	operation(ctx, probe, thread, &info);
}

UPROBE(nccl_group_start)
{
	struct nccl_thread *thread = this_thread();

	if (!thread)
		return;
	thread->last = LAST_OTHER;
	if (!in_group(thread, probe->now)) {
		thread->group_id = probe->now;
		thread->ranges = 0;
	}
	thread->depth++;
}

/* The outermost call launches the operations of the group. */
UPROBE(nccl_group_end)
{
	struct nccl_thread *thread = this_thread();

	if (!thread)
		return;
	thread->last = LAST_OTHER;
	if (!thread->depth || --thread->depth)
		return;
	thread->last = LAST_GROUP_END;
	group_launched(thread, probe->now);
}

/* Ends the group and launches nothing. */
UPROBE(nccl_group_simulate_end)
{
	struct nccl_thread *thread = this_thread();

	if (!thread)
		return;
	thread->last = LAST_OTHER;
	if (thread->depth)
		thread->depth--;
}

/*
 * ncclGetErrorString(result): programs call it for a result other than success. The result is assumed to come from the
 * last call of this thread.
 */
UPROBE(nccl_error_string)
{
	struct nccl_thread *thread = this_thread();
	__u32 result = argument(ctx, 0);

	if (!thread || !result || result == NCCL_IN_PROGRESS || result >= UNKNOWN_BYTE)
		return;
	if (thread->last == LAST_OPERATION)
		last_failed(thread, result);
	else if (thread->last == LAST_GROUP_END)
		group_failed(thread, result);
	thread->last = LAST_OTHER;
}

/* ncclUniqueId is passed by value: on the stack on x86-64, by a pointer to a copy on arm64. */
static __always_inline __u64 id_argument(void *ctx)
{
	return target_arch == ARCH_X86_64 ? user_stack_pointer(ctx) + 8 : argument(ctx, 2);
}

/* The arguments after the id, from 0. */
static __always_inline __u64 after_id(void *ctx, const int n)
{
	return target_arch == ARCH_X86_64 ? argument(ctx, n + 2) : argument(ctx, n + 3);
}

/* (comm *, nranks, id, rank) */
static __always_inline struct nccl_making *init_rank(void *ctx, struct probe *probe, __u8 maker)
{
	struct nccl_making *making = making_begin(ctx, probe, maker, argument(ctx, 0));

	if (!making)
		return 0;
	making->record.size = argument(ctx, 1);
	making->record.rank = after_id(ctx, 0);
	making_id(&making->record, id_argument(ctx));
	return making;
}

UPROBE(nccl_init_rank)
{
	init_rank(ctx, probe, MADE_INIT_RANK);
}

UPROBE(nccl_init_rank_config)
{
	struct nccl_making *making = init_rank(ctx, probe, MADE_INIT_RANK_CONFIG);

	if (making)
		making_config(&making->record, after_id(ctx, 1));
}

/* (comm *, nranks, rank, number of ids, ids *, config): the first id gives the hash (src/init.cc) */
UPROBE(nccl_init_rank_scalable)
{
	struct nccl_making *making = making_begin(ctx, probe, MADE_INIT_RANK_SCALABLE, argument(ctx, 0));

	if (!making)
		return;
	making->record.size = argument(ctx, 1);
	making->record.rank = argument(ctx, 2);
	making_id(&making->record, argument(ctx, 4));
	making_config(&making->record, argument(ctx, 5));
}

/* (comm *, devices, device *) */
UPROBE(nccl_init_all)
{
	struct nccl_making *making = making_begin(ctx, probe, MADE_INIT_ALL, argument(ctx, 0));
	__u32 count = argument(ctx, 1);

	if (!making)
		return;
	making->count = count <= MAX_MADE ? count : MAX_MADE;
	making->record.size = count;
	making->devices = argument(ctx, 2);
}

/* (comm, color, key, comm *, config) */
UPROBE(nccl_split)
{
	struct nccl_making *making = making_begin(ctx, probe, MADE_SPLIT, argument(ctx, 3));

	if (!making)
		return;
	making->record.color = argument(ctx, 1);
	making->record.key = argument(ctx, 2);
	making_config(&making->record, argument(ctx, 4));
	making_parent(making, argument(ctx, 0), probe->now);
}

/* (comm, excluded *, number of them, comm *, config, flags) */
UPROBE(nccl_shrink)
{
	struct nccl_making *making = making_begin(ctx, probe, MADE_SHRINK, argument(ctx, 3));

	if (!making)
		return;
	making_config(&making->record, argument(ctx, 4));
	making_parent(making, argument(ctx, 0), probe->now);
}

/*
 * (comm, nranks, id *, rank, comm *, config): old ranks pass no id and rank -1, new ranks pass no communicator. As not
 * all ranks have the id, the identity comes only from the struct.
 */
UPROBE(nccl_grow)
{
	struct nccl_making *making = making_begin(ctx, probe, MADE_GROW, argument(ctx, 4));
	__u64 id = argument(ctx, 2);

	if (!making)
		return;
	if (id)
		making_id(&making->record, id);
	making->record.hash = 0;
	making->record.identity = IDENTITY_NONE;
	making->record.size = argument(ctx, 1);
	making->record.rank = argument(ctx, 3);
	making_config(&making->record, argument(ctx, 5));
	making_parent(making, argument(ctx, 0), probe->now);
}

UPROBE(nccl_made)
{
	making_return(ctx, probe);
}

static __always_inline void comm_event(struct nccl_thread *thread, struct probe *probe, __u64 address, __u8 event)
{
	struct comm_key key = comm_key(thread, address);
	struct nccl_comm *comm = bpf_map_lookup_elem(&nccl_comms, &key);

	if (!comm)
		return;
	comm_say(&thread->said, probe->now, event);
	comm_identify(&thread->said, comm, address);
	RING_PUSH(communicators, &thread->said);
	if (event != COMM_FINALIZED)
		bpf_map_delete_elem(&nccl_comms, &key);
}

static __always_inline void comm_call(void *ctx, struct probe *probe, __u8 event)
{
	struct nccl_thread *thread = this_thread();

	if (!thread)
		return;
	thread->last = LAST_OTHER;
	comm_event(thread, probe, argument(ctx, 0), event);
}

UPROBE(nccl_finalize)
{
	comm_call(ctx, probe, COMM_FINALIZED);
}

UPROBE(nccl_destroy)
{
	comm_call(ctx, probe, COMM_DESTROYED);
}

UPROBE(nccl_abort)
{
	comm_call(ctx, probe, COMM_ABORTED);
}

/* ncclCommGetAsyncError(comm, result *) */
UPROBE(nccl_async_error)
{
	struct nccl_thread *thread = this_thread();

	if (!thread)
		return;
	thread->last = LAST_OTHER;
	thread->asked_comm = argument(ctx, 0);
	thread->asked_where = argument(ctx, 1);
}

UPROBE(nccl_async_error_reported)
{
	struct nccl_thread *thread = this_thread();
	__u32 result = 0;
	struct nccl_comm *comm;

	if (!thread || !thread->asked_where || (__u32)return_value(ctx))
		return;
	if (bpf_probe_read_user(&result, sizeof(result), (const void *)thread->asked_where))
		result = NCCL_IN_PROGRESS;
	thread->asked_where = 0;
	/* A communicator in progress is not complete yet. */
	if (result == NCCL_IN_PROGRESS)
		return;
	comm = comm_at(thread, thread->asked_comm, probe->now);
	if (!comm || comm->async_result == result || result >= UNKNOWN_BYTE)
		return;
	comm->async_result = result;
	comm_say(&thread->said, probe->now, COMM_ERROR);
	comm_identify(&thread->said, comm, thread->asked_comm);
	thread->said.result = result;
	RING_PUSH(communicators, &thread->said);
}

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct collective_record);
} nccl_closing SEC(".maps");

/*
 * Run by the collector for an open operation whose communicator was destroyed or aborted. Arguments: object, position,
 * start_ns, tgid, and 1 for an abort. Returns 1 if the operation was open.
 */
SEC("raw_tp")
int nccl_close(struct bpf_raw_tracepoint_args *ctx)
{
	struct operation_key key = {
		.object = ctx->args[0],
		.position = ctx->args[1],
		.start_ns = ctx->args[2],
		.tgid = ctx->args[3],
	};
	struct collective_record *open = bpf_map_lookup_elem(&operations, &key), *draft;
	__u32 zero = 0;

	draft = bpf_map_lookup_elem(&nccl_closing, &zero);
	if (!open || !draft)
		return 0;
	__builtin_memcpy(draft, open, sizeof(*draft));
	draft->state = STATE_ABANDONED;
	if (ctx->args[4]) {
		draft->state = STATE_FAILED;
		__builtin_memcpy(draft->error, "the communicator was aborted", 29);
	}
	operation_take(&key, draft);
	return 1;
}

char LICENSE[] SEC("license") = "GPL";
