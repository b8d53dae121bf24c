// SPDX-License-Identifier: Apache-2.0
/*
 * libnccl without a GPU, with the ABI of one version: its public functions, struct ncclComm and struct ncclInfo with
 * the real offsets, and the internal ncclEnqueueCheck that all operations go through.
 *
 * Environment: NCCL_DOUBLE_DIR, a folder in which ranks of different processes meet (an operation ends for all when the
 * last has come); without it nobody waits. NCCL_DOUBLE_TRUTH, a file to which every call, end and communicator is
 * written as a line of JSON. NCCL_DOUBLE_LOCAL, ranks a node.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef DOUBLE_REAL_HEADER
#include "nccl.h"
#include "cudart.h"
#include "nccl_layout.h"
#else
#include "nccl_public.h"
#endif
#include "nccl_double.h"
#include "nccl_structs.h"

#define MAX_RANKS 64
#define MAX_SPLITS 64
#define MAX_GROUP 4096
#define CONFIG_MAGIC 0xcafebeef /* NCCL_API_MAGIC */
#define NONBLOCKING_POLLS 3
#define WEAK(name) extern __typeof__(p##name) name __attribute__((weak, alias("p" #name)))

/* ncclFunc_t (nccl_common.h) */
enum {
	FUNC_BROADCAST = 0,
	FUNC_REDUCE = 1,
	FUNC_ALL_GATHER = 2,
	FUNC_REDUCE_SCATTER = 3,
	FUNC_ALL_REDUCE = 4,
	FUNC_SEND = 6,
	FUNC_RECV = 7,
	FUNC_ALL_TO_ALL = 8,
	FUNC_SCATTER = 9,
	FUNC_GATHER = 10,
	FUNC_PUT_SIGNAL = 12,
	FUNC_SIGNAL = 13,
	FUNC_WAIT_SIGNAL = 14,
};
/* seqNumber[] counts the first of them that are not empty, with or without a profiler, since 2.26 (enqueue.cc). */
#define COUNTED_FUNCS 5

/* What the ranks of a communicator share. */
struct meeting {
	_Atomic uint32_t joined;
	_Atomic uint64_t arrived[MAX_RANKS];
	_Atomic uint64_t sent[MAX_RANKS][MAX_RANKS], received[MAX_RANKS][MAX_RANKS];
	struct {
		_Atomic uint32_t joined;
		int color[MAX_RANKS], key[MAX_RANKS];
	} splits[MAX_SPLITS];
};

/* The double's own half of a communicator, by the address of the real one. */
struct own {
	struct own *next;
	struct ncclComm *comm;
	struct meeting *meeting;
	int alone, init_polls, rank, size;
	unsigned int splits;
	uint64_t hash, seq, arrived, sent[MAX_RANKS], received[MAX_RANKS];
	uint32_t abort_flag;
	_Atomic int under_way;
	ncclUniqueId id;
};

struct operation {
	struct own *own;
	cudaStream_t stream;
	uint64_t id;
	size_t elements;
	int func, peer;
};

/* Operations of one communicator and stream that run as one kernel. */
struct plan {
	struct own *own;
	int count, captured;
	uint64_t duration;
	struct operation operations[];
};

struct group {
	int depth, count, inits, error, fail;
	uint64_t id;
	struct operation *operations;
	struct own *joining[MAX_RANKS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct own *owns;
static _Atomic uint64_t duration, ids, group_ids;
static int instant;
static _Thread_local struct group group;
static _Thread_local int fail_next;
static _Thread_local uint64_t before;

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static void pass(uint64_t ns)
{
	struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

	while (ns && clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t))
		;
}

__attribute__((format(printf, 1, 2))) static void tell(const char *format, ...)
{
	static int fd = -2;
	char line[1024];
	va_list list;
	int length;

	if (fd == -2) {
		const char *path = getenv("NCCL_DOUBLE_TRUTH");

		fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
	}
	if (fd < 0)
		return;
	va_start(list, format);
	length = vsnprintf(line, sizeof(line), format, list);
	va_end(list);
	if (write(fd, line, length) != length)
		abort();
}

void ncclDoubleDuration(uint64_t ns)
{
	duration = ns;
}

void ncclDoubleFail(int result, int at_end)
{
	if (at_end)
		group.fail = result;
	else
		fail_next = result;
}

void ncclDoubleAsyncError(void *comm, int result)
{
	((struct ncclComm *)comm)->asyncResult = result;
}

void ncclDoubleInstant(int on)
{
	instant = on;
}

uint64_t *ncclDoubleBefore(void)
{
	return &before;
}

/* utils.cc: getHash */
static uint64_t get_hash(const char *text, int length)
{
	uint64_t hash = 5381;
	int i;

	for (i = 0; i < length; i++)
		hash = ((hash << 5) + hash) ^ text[i];
	return hash;
}

/* The real ones: to 2.26 the hash of a text of both; since 2.27 of both and the parent's count of splits, mixed. */
static uint64_t child_hash(struct own *parent, int color)
{
	char text[NCCL_UNIQUE_ID_BYTES] = {0};

#if DOUBLE_VERSION >= 22700
	snprintf(text, sizeof(text), "%016lx-%u-%d", parent->hash, parent->splits, color);
#else
	snprintf(text, sizeof(text), "%016lx-%d", parent->hash, color);
#endif
	return get_hash(text, sizeof(text));
}

static struct own *own_of(struct ncclComm *comm)
{
	struct own *own;

	pthread_mutex_lock(&lock);
	for (own = owns; own && own->comm != comm; own = own->next)
		;
	pthread_mutex_unlock(&lock);
	return own;
}

static struct meeting *meet(uint64_t hash, int *alone)
{
	const char *folder = getenv("NCCL_DOUBLE_DIR");
	char path[512];
	void *memory;
	int fd;

	*alone = !folder;
	if (!folder)
		return calloc(1, sizeof(struct meeting));
	snprintf(path, sizeof(path), "%s/comm-%016lx", folder, hash);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	if (fd < 0 || ftruncate(fd, sizeof(struct meeting)))
		abort();
	memory = mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (memory == MAP_FAILED)
		abort();
	return memory;
}

static int aborted(struct own *own)
{
	return __atomic_load_n(&own->abort_flag, __ATOMIC_RELAXED);
}

#define WAIT_UNTIL(own, condition)                                                                                     \
	while (!(own)->alone && !aborted(own) && !(condition))                                                         \
	pass(50000)

/* Rarely looked at, so that a reader of its stack finds it at rest. */
#define JOIN_UNTIL(own, condition)                                                                                     \
	while (!(own)->alone && !aborted(own) && !(condition))                                                         \
	pass(20000000)

/* What the real one writes when its communicator is made. */
static void fill(struct own *own)
{
	struct ncclComm *comm = own->comm;
	const char *local = getenv("NCCL_DOUBLE_LOCAL");
	int a_node = local ? atoi(local) : own->size;

	comm->commHash = own->hash;
	comm->rank = own->rank;
	comm->nRanks = own->size;
	cudaGetDevice(&comm->cudaDev);
	comm->nvmlDev = comm->cudaDev;
	comm->busId = (int64_t)(0x17 + comm->cudaDev) << 12;
	comm->node = own->rank / a_node;
	comm->nNodes = (own->size + a_node - 1) / a_node;
	comm->localRank = own->rank % a_node;
	comm->localRanks = a_node;
}

static struct own *comm_new(const ncclUniqueId *id, uint64_t hash, int rank, int size, const ncclConfig_t *config)
{
	struct ncclComm *comm = calloc(1, sizeof(*comm));
	struct own *own = calloc(1, sizeof(*own));

	own->comm = comm;
	own->rank = rank;
	own->size = size;
	own->hash = hash;
	if (id)
		own->id = *id;
	own->meeting = meet(hash, &own->alone);
#ifdef HAS_startMagic
	comm->startMagic = comm->endMagic = 0x0280028002800280;
#endif
	memcpy(&comm->magic, &own->id, sizeof(comm->magic));
	comm->abortFlag = &own->abort_flag;
	if (config && config->magic == CONFIG_MAGIC)
		memcpy(&comm->config, config, config->size < sizeof(*config) ? config->size : sizeof(*config));
#if DOUBLE_VERSION >= 22700
	if (comm->config.commName)
		comm->config.commName = strdup(comm->config.commName);
#endif
	pthread_mutex_lock(&lock);
	own->next = owns;
	owns = own;
	pthread_mutex_unlock(&lock);
	if (config && config->magic == CONFIG_MAGIC && config->blocking == 0) {
		own->init_polls = NONBLOCKING_POLLS;
		comm->asyncResult = ncclInProgress;
	} else {
		fill(own);
	}
	return own;
}

static const char *name_of(struct own *own)
{
#if DOUBLE_VERSION >= 22700
	return own->comm->config.commName ? own->comm->config.commName : "";
#else
	(void)own;
	return "";
#endif
}

static void tell_made(struct own *own, const char *made, uint64_t parent, int color)
{
	tell("{\"event\": \"made\", \"t\": %lu, \"address\": %lu, \"comm\": \"%016lx\", \"rank\": %d, \"size\": %d,"
	     " \"name\": \"%s\", \"made_by\": \"%s\", \"parent\": \"%016lx\", \"color\": %d}\n",
	     now_ns(), (uint64_t)own->comm, own->hash, own->rank, own->size, name_of(own), made, parent, color);
}

static void tell_gone(struct own *own, const char *how)
{
	tell("{\"event\": \"%s\", \"t\": %lu, \"comm\": \"%016lx\", \"rank\": %d}\n", how, now_ns(), own->hash, own->rank);
}

static ncclResult_t join(struct own *own)
{
	own->meeting->joined++;
	if (group.depth) {
		group.joining[group.inits++ % MAX_RANKS] = own;
		return ncclSuccess;
	}
	JOIN_UNTIL(own, own->meeting->joined >= (uint32_t)own->size);
	return ncclSuccess;
}

static ncclResult_t init(ncclComm_t *comm, int size, const ncclUniqueId *id, int rank, const ncclConfig_t *config,
			 const char *made)
{
	struct own *own;

	if (!comm || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size)
		return ncclInvalidArgument;
	own = comm_new(id, get_hash(id->internal, sizeof(id->internal)), rank, size, config);
	*comm = own->comm;
	tell_made(own, made, 0, 0);
	if (own->init_polls) {
		own->meeting->joined++;
		return ncclInProgress;
	}
	return join(own);
}

ncclResult_t pncclGetVersion(int *version)
{
	*version = DOUBLE_VERSION;
	return ncclSuccess;
}
WEAK(ncclGetVersion);

/* bootstrap.cc: struct ncclBootstrapHandle, a random number and the address of the root. */
ncclResult_t pncclGetUniqueId(ncclUniqueId *id)
{
	struct sockaddr_in root = {.sin_family = AF_INET, .sin_port = htons(29999), .sin_addr = {htonl(INADDR_LOOPBACK)}};

	memset(id, 0, sizeof(*id));
	if (getrandom(id->internal, 8, 0) != 8)
		return ncclSystemError;
	memcpy(id->internal + 8, &root, sizeof(root));
	return ncclSuccess;
}
WEAK(ncclGetUniqueId);

ncclResult_t pncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)
{
	return init(comm, nranks, &commId, rank, NULL, "init_rank");
}
WEAK(ncclCommInitRank);

/* The real entry begins with a constant that holds the version of its NVTX payload, and the push comes after it. */
#if defined(__x86_64__) && DOUBLE_VERSION >= 22400 && !defined(DOUBLE_REAL_HEADER)
ncclResult_t double_init_rank_config(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)
	__attribute__((visibility("hidden")));
__asm__(".text\n"
	".p2align 4\n"
	".globl pncclCommInitRankConfig\n"
	".weak ncclCommInitRankConfig\n"
	".type pncclCommInitRankConfig, @function\n"
	".type ncclCommInitRankConfig, @function\n"
	"pncclCommInitRankConfig:\n"
	"ncclCommInitRankConfig:\n"
	"	movabs $0x58b1cafebeef, %rax\n"
	"	push %rbp\n"
	"	mov %rsp, %rbp\n"
	"	pop %rbp\n"
	"	jmp double_init_rank_config\n"
	".size pncclCommInitRankConfig, . - pncclCommInitRankConfig\n"
	".size ncclCommInitRankConfig, . - ncclCommInitRankConfig\n");
#define INIT_RANK_CONFIG double_init_rank_config
#else
#define INIT_RANK_CONFIG pncclCommInitRankConfig
WEAK(ncclCommInitRankConfig);
#endif

ncclResult_t INIT_RANK_CONFIG(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)
{
	return init(comm, nranks, &commId, rank, config, "init_rank_config");
}

ncclResult_t pncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist)
{
	struct own *first = NULL;
	ncclUniqueId id;
	int i, device;

	if (!comm || ndev < 1 || ndev > MAX_RANKS)
		return ncclInvalidArgument;
	cudaGetDevice(&device);
	pncclGetUniqueId(&id);
	for (i = 0; i < ndev; i++) {
		struct own *own;

		cudaSetDevice(devlist ? devlist[i] : i);
		own = comm_new(&id, get_hash(id.internal, sizeof(id.internal)), i, ndev, NULL);
		if (!first)
			first = own;
		own->meeting = first->meeting;
		own->alone = 0;
		comm[i] = own->comm;
		tell_made(own, "init_all", 0, 0);
	}
	cudaSetDevice(device);
	return ncclSuccess;
}
WEAK(ncclCommInitAll);

static int child_rank(struct own *parent, unsigned int split, int color, int key, int *size)
{
	int i, rank = 0;

	*size = 0;
	for (i = 0; i < parent->size; i++) {
		int other = parent->meeting->splits[split].key[i];

		if (parent->meeting->splits[split].color[i] != color)
			continue;
		++*size;
		if (other < key || (other == key && i < parent->rank))
			rank++;
	}
	return rank;
}

ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)
{
	struct own *parent = own_of(comm), *own;
	unsigned int split;
	int rank, size;

	if (!parent || !newcomm || color < NCCL_SPLIT_NOCOLOR)
		return ncclInvalidArgument;
	parent->splits++;
	split = parent->splits % MAX_SPLITS;
	*newcomm = NULL;
	parent->meeting->splits[split].color[parent->rank] = color;
	parent->meeting->splits[split].key[parent->rank] = key;
	parent->meeting->splits[split].joined++;
	WAIT_UNTIL(parent, parent->meeting->splits[split].joined >= (uint32_t)parent->size);
	if (color == NCCL_SPLIT_NOCOLOR)
		return ncclSuccess;
	rank = parent->rank;
	size = parent->size;
	if (!parent->alone)
		rank = child_rank(parent, split, color, key, &size);
	own = comm_new(NULL, child_hash(parent, color), rank, size, config);
	*newcomm = own->comm;
	tell_made(own, "split", parent->hash, color);
	return join(own);
}
WEAK(ncclCommSplit);

#if DOUBLE_VERSION >= 22300
ncclResult_t pncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
				       ncclConfig_t *config)
{
	return nId < 1 ? ncclInvalidArgument
		       : init(newcomm, nranks, commIds, myrank, config, "init_rank_scalable");
}
WEAK(ncclCommInitRankScalable);
#endif

#if DOUBLE_VERSION >= 22700
ncclResult_t pncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
			     ncclConfig_t *config, int shrinkFlags)
{
	struct own *parent = own_of(comm), *own;
	int i, rank;

	(void)shrinkFlags;
	if (!parent || !newcomm || excludeRanksCount < 1 || excludeRanksCount >= parent->size)
		return ncclInvalidArgument;
	parent->splits++;
	rank = parent->rank;
	for (i = 0; i < excludeRanksCount; i++)
		rank -= excludeRanksList[i] < parent->rank;
	own = comm_new(NULL, child_hash(parent, 0), rank, parent->size - excludeRanksCount, config);
	*newcomm = own->comm;
	tell_made(own, "shrink", parent->hash, 0);
	return join(own);
}
WEAK(ncclCommShrink);

ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags)
{
	(void)size, (void)winFlags;
	*win = buff;
	return own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclCommWindowRegister);

ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)
{
	(void)win;
	return own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclCommWindowDeregister);
#endif

#if DOUBLE_VERSION >= 22902
ncclResult_t pncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId)
{
	return own_of(comm) ? pncclGetUniqueId(uniqueId) : ncclInvalidArgument;
}
WEAK(ncclCommGetUniqueId);

ncclResult_t pncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm,
			   ncclConfig_t *config)
{
	struct own *parent = comm ? own_of(comm) : NULL, *own;

	if (!newcomm || !uniqueId || (comm && !parent))
		return ncclInvalidArgument;
	if (parent)
		rank = parent->rank;
	own = comm_new(uniqueId, get_hash(uniqueId->internal, sizeof(uniqueId->internal)), rank, nRanks, config);
	*newcomm = own->comm;
	tell_made(own, "grow", parent ? parent->hash : 0, 0);
	return join(own);
}
WEAK(ncclCommGrow);

ncclResult_t pncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr)
{
	*outUserPtr = win;
	return own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclWinGetUserPtr);
#endif

#if DOUBLE_VERSION >= 22807
ncclResult_t pncclCommRevoke(ncclComm_t comm, int revokeFlags)
{
	return own_of(comm) && !revokeFlags ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclCommRevoke);
#endif

/* init.cc: commPoison and commFree. What is under way has ended. */
static void comm_free(struct own *own)
{
	struct own **at;

	while (own->under_way)
		pass(50000);
	pthread_mutex_lock(&lock);
	for (at = &owns; *at != own; at = &(*at)->next)
		;
	*at = own->next;
	pthread_mutex_unlock(&lock);
	own->comm->rank = own->comm->nRanks = own->comm->cudaDev = -1;
#ifdef HAS_startMagic
	own->comm->startMagic = own->comm->endMagic = 0;
#endif
	free(own->comm);
	free(own);
}

ncclResult_t pncclCommFinalize(ncclComm_t comm)
{
	struct own *own = own_of(comm);

	if (!own)
		return ncclInvalidArgument;
	comm->finalizeCalled = true;
	tell_gone(own, "finalized");
	return ncclSuccess;
}
WEAK(ncclCommFinalize);

ncclResult_t pncclCommDestroy(ncclComm_t comm)
{
	struct own *own = own_of(comm);

	if (!own)
		return ncclInvalidArgument;
	tell_gone(own, "destroyed");
	comm_free(own);
	return ncclSuccess;
}
WEAK(ncclCommDestroy);

ncclResult_t pncclCommAbort(ncclComm_t comm)
{
	struct own *own = own_of(comm);

	if (!own)
		return ncclInvalidArgument;
	__atomic_store_n(&own->abort_flag, 1, __ATOMIC_RELAXED);
	tell_gone(own, "aborted");
	comm_free(own);
	return ncclSuccess;
}
WEAK(ncclCommAbort);

ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
	struct own *own = own_of(comm);

	if (!own || !asyncError)
		return ncclInvalidArgument;
	if (own->init_polls && --own->init_polls == 0) {
		fill(own);
		WAIT_UNTIL(own, own->meeting->joined >= (uint32_t)own->size);
		comm->asyncResult = ncclSuccess;
	}
	*asyncError = comm->asyncResult;
	return ncclSuccess;
}
WEAK(ncclCommGetAsyncError);

ncclResult_t pncclCommCount(const ncclComm_t comm, int *count)
{
	*count = comm->nRanks;
	return ncclSuccess;
}
WEAK(ncclCommCount);

ncclResult_t pncclCommCuDevice(const ncclComm_t comm, int *device)
{
	*device = comm->cudaDev;
	return ncclSuccess;
}
WEAK(ncclCommCuDevice);

ncclResult_t pncclCommUserRank(const ncclComm_t comm, int *rank)
{
	*rank = comm->rank;
	return ncclSuccess;
}
WEAK(ncclCommUserRank);

const char *pncclGetErrorString(ncclResult_t result)
{
	static const char *const texts[] = {
		"no error",
		"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
		"unhandled system error (run with NCCL_DEBUG=INFO for details)",
		"internal error - please report this issue to the NCCL developers",
		"invalid argument (run with NCCL_DEBUG=WARN for details)",
		"invalid usage (run with NCCL_DEBUG=WARN for details)",
		"remote process exited or there was a network error",
		"NCCL operation in progress",
	};

	return (unsigned int)result < sizeof(texts) / sizeof(*texts) ? texts[result] : "unknown result code";
}
WEAK(ncclGetErrorString);

const char *pncclGetLastError(ncclComm_t comm)
{
	(void)comm;
	return "the double failed as it was asked to";
}
WEAK(ncclGetLastError);

ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
				       ncclScalarResidence_t residence, ncclComm_t comm)
{
	(void)scalar, (void)datatype, (void)residence;
	*op = (ncclRedOp_t)ncclNumOps;
	return own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclRedOpCreatePreMulSum);

ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
	return op >= ncclNumOps && own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclRedOpDestroy);

#if DOUBLE_VERSION >= 21900
ncclResult_t pncclMemAlloc(void **ptr, size_t size)
{
	*ptr = malloc(size < 64 ? size : 64);
	return ncclSuccess;
}
WEAK(ncclMemAlloc);

ncclResult_t pncclMemFree(void *ptr)
{
	free(ptr);
	return ncclSuccess;
}
WEAK(ncclMemFree);

ncclResult_t pncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle)
{
	(void)size;
	*handle = buff;
	return own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclCommRegister);

ncclResult_t pncclCommDeregister(const ncclComm_t comm, void *handle)
{
	(void)handle;
	return own_of(comm) ? ncclSuccess : ncclInvalidArgument;
}
WEAK(ncclCommDeregister);
#endif

static int waits_for_all(int func)
{
	return func != FUNC_SEND && func != FUNC_RECV && func < FUNC_PUT_SIGNAL;
}

/* A plan's kernel: says that this rank has come, and waits for the others. */
static void run_plan(void *argument)
{
	struct plan *plan = argument;
	struct own *own = plan->own;
	struct meeting *meeting = own->meeting;
	int i, other;

	for (i = 0; i < plan->count; i++) {
		struct operation *o = &plan->operations[i];

		if (waits_for_all(o->func))
			meeting->arrived[own->rank] = ++own->arrived;
		else if (o->func == FUNC_SEND)
			meeting->sent[own->rank][o->peer] = ++own->sent[o->peer];
		else if (o->func == FUNC_RECV)
			meeting->received[own->rank][o->peer] = ++own->received[o->peer];
	}
	for (i = 0; i < plan->count; i++) {
		struct operation *o = &plan->operations[i];

		for (other = 0; waits_for_all(o->func) && other < own->size; other++)
			WAIT_UNTIL(own, meeting->arrived[other] >= own->arrived);
		if (o->func == FUNC_SEND)
			WAIT_UNTIL(own, meeting->received[o->peer][own->rank] >= own->sent[o->peer]);
		else if (o->func == FUNC_RECV)
			WAIT_UNTIL(own, meeting->sent[o->peer][own->rank] >= own->received[o->peer]);
	}
	if (!aborted(own))
		pass(plan->duration);
}

static void plan_ended(void *argument, uint64_t start_ns, uint64_t end_ns, int failed)
{
	struct plan *plan = argument;
	struct own *own = plan->own;
	int i;

	for (i = 0; i < plan->count; i++)
		tell("{\"event\": \"end\", \"id\": %lu, \"start\": %lu, \"end\": %lu, \"failed\": %d, \"aborted\": %d}\n",
		     plan->operations[i].id, start_ns, end_ns, failed, aborted(own));
	if (plan->captured)
		return;
	free(plan);
	own->under_way--;
}

/* Launches operations [0, count) of one communicator and stream. A captured plan lives as long as the process. */
static void launch(const struct operation *operations, int count)
{
	struct plan *plan = malloc(sizeof(*plan) + count * sizeof(*operations));
	struct own *own = operations[0].own;
	enum cudaStreamCaptureStatus status;
	cudaStream_t stream = operations[0].stream;
	int i;

	plan->own = own;
	plan->count = count;
	plan->duration = duration;
	memcpy(plan->operations, operations, count * sizeof(*operations));
	cudaStreamIsCapturing(stream, &status);
	plan->captured = status == cudaStreamCaptureStatusActive;
	if (!plan->captured)
		own->under_way++;
#if DOUBLE_VERSION >= 22600
	for (i = 0; i < count && !plan->captured; i++)
		if (operations[i].func < COUNTED_FUNCS && operations[i].elements)
			own->comm->seqNumber[operations[i].func]++;
#else
	(void)i;
#endif
	cudartDoublePush(stream, &(struct double_work){.run = run_plan, .ended = plan_ended, .argument = plan});
}

static ncclResult_t check(struct ncclInfo *info, struct own *own)
{
	int rooted = info->coll == FUNC_BROADCAST || info->coll == FUNC_REDUCE || info->coll == FUNC_GATHER ||
		     info->coll == FUNC_SCATTER || info->coll == FUNC_SEND || info->coll == FUNC_RECV;

	if (!own || own->init_polls || (unsigned int)info->datatype >= ncclNumTypes)
		return ncclInvalidArgument;
	if (rooted && (info->root < 0 || info->root >= own->size))
		return ncclInvalidArgument;
	return ncclSuccess;
}

static void tell_call(struct ncclInfo *info, struct own *own, uint64_t id, int result)
{
	enum cudaStreamCaptureStatus status;
	int64_t seq = -1;

	cudaStreamIsCapturing(info->stream, &status);
	if (own && !result && status == cudaStreamCaptureStatusNone && info->coll < COUNTED_FUNCS && info->count)
		seq = own->seq++;
	tell("{\"event\": \"call\", \"id\": %lu, \"func\": %d, \"count\": %lu, \"dtype\": %d, \"redop\": %d, \"root\": %d,"
	     " \"comm\": \"%016lx\", \"rank\": %d, \"size\": %d, \"stream\": %lu, \"tid\": %ld, \"before\": %lu,"
	     " \"inside\": %lu, \"group\": %lu, \"captured\": %d, \"seq\": %ld, \"result\": %d}\n",
	     id, info->coll, info->count, info->datatype, info->op, info->root, own ? own->hash : 0,
	     own ? own->rank : -1, own ? own->size : -1, (uint64_t)info->stream, syscall(SYS_gettid), before, now_ns(),
	     group.depth ? group.id : 0, status == cudaStreamCaptureStatusActive, seq, result);
}

static ncclResult_t enqueue_check(struct ncclInfo *info) __asm__("_Z16ncclEnqueueCheckP8ncclInfo");

__attribute__((noipa, used)) static ncclResult_t enqueue_check(struct ncclInfo *info)
{
	struct operation operation;
	struct own *own;
	ncclResult_t result;

	if (instant) {
#if DOUBLE_VERSION >= 22600
		if (info->coll < COUNTED_FUNCS && info->count)
			info->comm->seqNumber[info->coll]++;
#endif
		return ncclSuccess;
	}
	own = own_of(info->comm);
	result = fail_next ? (ncclResult_t)fail_next : check(info, own);
	operation = (struct operation){own, info->stream, ++ids, info->count, info->coll, info->root};
	fail_next = 0;
	tell_call(info, own, operation.id, result);
	if (result) {
		if (group.depth)
			group.error = result;
		return result;
	}
	if (!group.depth) {
		launch(&operation, 1);
	} else if (group.count < MAX_GROUP) {
		if (!group.operations)
			group.operations = calloc(MAX_GROUP, sizeof(*group.operations));
		group.operations[group.count++] = operation;
	} else {
		return ncclInternalError;
	}
	return ncclSuccess;
}

ncclResult_t pncclGroupStart(void)
{
	if (!group.depth++)
		group.id = ++group_ids;
	return ncclSuccess;
}
WEAK(ncclGroupStart);

/* One launch for each communicator and stream, in the order of their first operations. */
static void launch_group(void)
{
	struct operation *plan = calloc(group.count + 1, sizeof(*plan));
	int i, j, count;

	for (i = 0; i < group.count; i++) {
		struct operation first = group.operations[i];

		if (!first.own)
			continue;
		for (count = 0, j = i; j < group.count; j++) {
			struct operation *o = &group.operations[j];

			if (o->own == first.own && o->stream == first.stream) {
				plan[count++] = *o;
				o->own = NULL;
			}
		}
		launch(plan, count);
	}
	free(plan);
}

ncclResult_t pncclGroupEnd(void)
{
	ncclResult_t result;
	int i;

	if (!group.depth)
		return ncclInvalidUsage;
	if (--group.depth)
		return ncclSuccess;
	result = group.error ? group.error : group.fail;
	if (instant)
		return result;
	tell("{\"event\": \"launch\", \"group\": %lu, \"before\": %lu, \"inside\": %lu, \"result\": %d}\n", group.id,
	     before, now_ns(), result);
	for (i = 0; i < group.inits; i++) {
		struct own *own = group.joining[i];

		WAIT_UNTIL(own, own->meeting->joined >= (uint32_t)own->size);
	}
	if (!result)
		launch_group();
	group.count = group.inits = group.error = group.fail = 0;
	return result;
}
WEAK(ncclGroupEnd);

#if DOUBLE_VERSION >= 22200
ncclResult_t pncclGroupSimulateEnd(ncclSimInfo_t *simInfo)
{
	if (!group.depth)
		return ncclInvalidUsage;
	if (simInfo)
		simInfo->estimatedTime = 1.0f;
	if (!--group.depth)
		group.count = group.inits = group.error = group.fail = 0;
	return ncclSuccess;
}
WEAK(ncclGroupSimulateEnd);
#endif

#define ENQUEUE(...)                                                                                                   \
	struct ncclInfo info = {__VA_ARGS__};                                                                          \
	return enqueue_check(&info)

ncclResult_t pncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
			    ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_ALL_REDUCE, "AllReduce", sendbuff, recvbuff, count, datatype, op, 0, comm, stream);
}
WEAK(ncclAllReduce);

ncclResult_t pncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
				ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_REDUCE_SCATTER, "ReduceScatter", sendbuff, recvbuff, recvcount, datatype, op, 0, comm, stream);
}
WEAK(ncclReduceScatter);

ncclResult_t pncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
			    ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_ALL_GATHER, "AllGather", sendbuff, recvbuff, sendcount, datatype, ncclSum, 0, comm, stream);
}
WEAK(ncclAllGather);

ncclResult_t pncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			    ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_BROADCAST, "Broadcast", sendbuff, recvbuff, count, datatype, ncclSum, root, comm, stream);
}
WEAK(ncclBroadcast);

ncclResult_t pncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
			cudaStream_t stream)
{
	return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}
WEAK(ncclBcast);

ncclResult_t pncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
			 int root, ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_REDUCE, "Reduce", sendbuff, recvbuff, count, datatype, op, root, comm, stream);
}
WEAK(ncclReduce);

ncclResult_t pncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
		       cudaStream_t stream)
{
	ENQUEUE(FUNC_SEND, "Send", NULL, (void *)sendbuff, count, datatype, ncclSum, peer, comm, stream);
}
WEAK(ncclSend);

ncclResult_t pncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
		       cudaStream_t stream)
{
	ENQUEUE(FUNC_RECV, "Recv", NULL, recvbuff, count, datatype, ncclSum, peer, comm, stream);
}
WEAK(ncclRecv);

#if DOUBLE_VERSION >= 22803
ncclResult_t pncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
			   cudaStream_t stream)
{
	ENQUEUE(FUNC_ALL_TO_ALL, "AlltoAll", sendbuff, recvbuff, count, datatype, ncclSum, 0, comm, stream);
}
WEAK(ncclAlltoAll);

ncclResult_t pncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			 ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_GATHER, "Gather", sendbuff, recvbuff, count, datatype, ncclSum, root, comm, stream);
}
WEAK(ncclGather);

ncclResult_t pncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			  ncclComm_t comm, cudaStream_t stream)
{
	ENQUEUE(FUNC_SCATTER, "Scatter", sendbuff, recvbuff, count, datatype, ncclSum, root, comm, stream);
}
WEAK(ncclScatter);
#endif

#if DOUBLE_VERSION >= 22902
ncclResult_t pncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
			    ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags,
			    ncclComm_t comm, cudaStream_t stream)
{
	(void)peerWin, (void)peerWinOffset, (void)sigIdx, (void)ctx, (void)flags;
	ENQUEUE(FUNC_PUT_SIGNAL, "PutSignal", localbuff, NULL, count, datatype, ncclSum, peer, comm, stream);
}
WEAK(ncclPutSignal);

ncclResult_t pncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)
{
	(void)sigIdx, (void)ctx, (void)flags;
	ENQUEUE(FUNC_SIGNAL, "Signal", NULL, NULL, 0, ncclInt8, ncclSum, peer, comm, stream);
}
WEAK(ncclSignal);

ncclResult_t pncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream)
{
	(void)nDesc, (void)signalDescs;
	ENQUEUE(FUNC_WAIT_SIGNAL, "WaitSignal", NULL, NULL, 0, ncclInt8, ncclSum, 0, comm, stream);
}
WEAK(ncclWaitSignal);
#endif
