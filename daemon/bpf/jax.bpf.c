// SPDX-License-Identifier: Apache-2.0
/*
 * Collectives of JAX on CPUs, which XLA runs by a gloo of its own (xla/backends/cpu/collectives/gloo_communicator.h):
 *
 *	GlooCollectives::CreateCommunicators(key, ...)	names the devices, and on the same thread calls
 *	GlooCommunicator::GlooCommunicator(context, rank, ranks)
 *	GlooCommunicator::AllReduce(...)		the operation, which has ended when the call returns
 *
 * The calling thread itself runs the operation, so its number is the key of the open operation.
 */
#include "collectives.bpf.h"

#define MAX_RANKS (1 << 24)
#define MAX_DEVICE_WORDS 128
/* Operations are numbers of c10d::OpType (records/names.py); the last is ours. */
#define OP_ALLREDUCE 1
#define OP_REDUCE_SCATTER 9
#define OP_ALLTOALL 10
/* Set in no user-space address: the keys of torch's operations are such addresses. */
#define OF_THREAD (1ULL << 63)
#define FNV_PRIME 0x100000001b3ULL
#define FNV_BASIS 0xcbf29ce484222325ULL

/* The operation that the attach cookie names, as in symbols.py. */
#define OPERATION(probe) ((__u8)((probe)->cookie >> 48))

/* GlooCommunicator: after the vtable a shared_ptr to the context, then rank and number of ranks */
#define RANK_OFFSET 24

/* CliqueKey: after the vtable a vector with the numbers of its devices */
#define DEVICES_OFFSET 8

struct jax_communicator {
	__u64 name;
	__u64 seq; /* of the next operation */
};

struct jax_key {
	__u64 address;
	__u64 start_ns;
	__u64 tgid;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct jax_key);
	__type(value, struct jax_communicator);
} jax_communicators SEC(".maps");

/* The name of the communicators that a thread makes. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, __u64);
} jax_making SEC(".maps");

/* XLA's numbers of types and reductions (xla/xla_data.proto, PrimitiveType; xla/service/collective_ops_utils.h). */
static __always_inline __u8 torch_dtype(__u32 type)
{
	switch (type) {
	case 1: /* PRED */
		return 11;
	case 2: /* S8 */
		return 1;
	case 3:
		return 2;
	case 4:
		return 3;
	case 5:
		return 4;
	case 6: /* U8 */
		return 0;
	case 7:
		return 27;
	case 8:
		return 28;
	case 9:
		return 29;
	case 10: /* F16 */
		return 5;
	case 11:
		return 6;
	case 12:
		return 7;
	case 15: /* C64 */
		return 9;
	case 16: /* BF16 */
		return 15;
	case 18: /* C128 */
		return 10;
	case 19: /* F8E5M2 */
		return 23;
	case 20: /* F8E4M3FN */
		return 24;
	default:
		return UNKNOWN_BYTE;
	}
}

static __always_inline __u8 torch_redop(__u32 kind)
{
	/* SUM, PRODUCT, MIN, MAX; torch has AVG after SUM */
	return kind > 3 ? UNKNOWN_BYTE : kind ? kind + 1 : 0;
}

static __always_inline struct jax_key jax_key(__u64 address)
{
	struct jax_key key = {
		.address = address,
		.start_ns = current_start_ns(),
		.tgid = current_tgid(),
	};

	return key;
}

/*
 * Argument `n` after `this` of a member function whose result is returned in memory. Its first two arguments, pieces of
 * device memory of 24 bytes, are on the stack on x86-64, and by reference in registers on arm64.
 */
static __always_inline __u64 after_buffers(void *ctx, const int n)
{
	return target_arch == ARCH_X86_64 ? argument(ctx, n + 2) : argument(ctx, n + 3);
}

static __always_inline __u64 communicator_argument(void *ctx)
{
	return target_arch == ARCH_X86_64 ? argument(ctx, 1) : argument(ctx, 0);
}

/* GlooCollectives::CreateCommunicators(CliqueKey const &, ...) */
UPROBE(jax_create)
{
	__u64 key = target_arch == ARCH_X86_64 ? argument(ctx, 2) : argument(ctx, 1);
	__u64 thread = bpf_get_current_pid_tgid(), devices[2] = {}, name = FNV_BASIS;
	__u32 word;
	int i;

	if (bpf_probe_read_user(devices, sizeof(devices), (const void *)(key + DEVICES_OFFSET)) ||
	    devices[0] >= devices[1])
		return;
	name = (name ^ (devices[1] - devices[0])) * FNV_PRIME;
	/* A number has 4 or 8 bytes, by version. A list that is too long is distinguished by its length, above. */
	for (i = 0; i < MAX_DEVICE_WORDS && devices[0] < devices[1]; i++) {
		if (bpf_probe_read_user(&word, sizeof(word), (const void *)devices[0]))
			return;
		name = (name ^ word) * FNV_PRIME;
		devices[0] += sizeof(word);
	}
	bpf_map_update_elem(&jax_making, &thread, &name, BPF_ANY);
}

UPROBE(jax_created)
{
	__u64 thread = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&jax_making, &thread);
}

/* GlooCommunicator::GlooCommunicator(this, shared_ptr<Context>, rank, ranks) */
UPROBE(jax_communicator)
{
	__u64 thread = bpf_get_current_pid_tgid(), *name = bpf_map_lookup_elem(&jax_making, &thread);
	struct jax_key key = jax_key(argument(ctx, 0));
	struct jax_communicator made = {};

	if (name)
		made.name = *name;
	bpf_map_update_elem(&jax_communicators, &key, &made, BPF_ANY);
}

static __always_inline void read_communicator(struct collective_record *r, __u64 address)
{
	struct jax_key key = jax_key(address);
	struct jax_communicator *known = bpf_map_lookup_elem(&jax_communicators, &key);
	__u64 place[2] = {};

	r->comm = address;
	if (!bpf_probe_read_user(place, sizeof(place), (const void *)(address + RANK_OFFSET)) && place[0] < place[1] &&
	    place[1] <= MAX_RANKS) {
		r->comm_rank = place[0];
		r->comm_size = place[1];
	}
	__builtin_memset(r->name, 0, NAME_BYTES);
	__builtin_memset(r->desc, 0, DESC_BYTES);
	r->name_form = NAME_NONE;
	if (!known)
		return;
	if (known->name) {
		__builtin_memcpy(r->name, &known->name, sizeof(known->name));
		r->name_form = NAME_NUMBER;
	}
	r->seq = known->seq++;
}

static __always_inline struct operation_key key_of_thread(void)
{
	return operation_key(OF_THREAD | (__u32)bpf_get_current_pid_tgid());
}

/* AllReduce, ReduceScatter, AllGather, CollectivePermute: send, receive, type, count; the first two also: reduction */
UPROBE(jax_call)
{
	struct call *call = call_begin(ctx, probe, BACKEND_GLOO);
	__u8 op = OPERATION(probe);
	struct operation_key key = key_of_thread();
	struct collective_record *r;

	if (!call)
		return;
	r = &call->record;
	call->group = 0;
	read_communicator(r, communicator_argument(ctx));
	r->op = op;
	r->object = key.object;
	if (op == OP_ALLTOALL) {
		/* send and receive are vectors, by reference */
		r->dtype = torch_dtype(target_arch == ARCH_X86_64 ? argument(ctx, 4) : argument(ctx, 3));
		r->count = target_arch == ARCH_X86_64 ? argument(ctx, 5) : argument(ctx, 4);
	} else {
		r->dtype = torch_dtype(after_buffers(ctx, 0));
		r->count = after_buffers(ctx, 1);
		if (op == OP_ALLREDUCE || op == OP_REDUCE_SCATTER)
			r->redop = torch_redop(after_buffers(ctx, 2));
	}
	/* The argument counts one block, and a rank contributes a block for each rank. */
	if ((op == OP_ALLTOALL || op == OP_REDUCE_SCATTER) && r->comm_size > 0)
		r->count *= r->comm_size;
	r->timing = TIMING_EXACT;
	r->async_op = 0;
	r->t_start = r->t_call;
	r->state = STATE_STARTED;
	operation_open(&key, r);
	r->backend = 0;
}

/* The return of these functions. Only the future that they return tells whether they failed. */
UPROBE(jax_done)
{
	struct operation_key key = key_of_thread();

	operation_done(&key, probe->now);
}

char LICENSE[] SEC("license") = "GPL";
