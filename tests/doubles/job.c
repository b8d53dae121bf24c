// SPDX-License-Identifier: Apache-2.0
/*
 * One rank of a job that calls NCCL and CUDA as ProcessGroupNCCL does (ProcessGroupNCCL.cpp: collective, Watchdog). It
 * executes commands, a line each, and answers each with "done" and its results.
 *
 * Environment: RANK, WORLD_SIZE, NCCL_DOUBLE_DIR, WATCHDOG_MS (100). With NCCL2 it does as ProcessGroup nccl2
 * (WorkNCCL.cpp, checkStatus): a start event before each operation, for which the watchdog asks before the end event.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "nccl_public.h"
#include "nccl_double.h"

#define MAX_COMMS 64
#define MAX_WORKS 65536
#define MAX_WORDS 16

struct communicator {
	char name[48];
	ncclComm_t comm;
	cudaStream_t stream;
};

struct work {
	ncclComm_t comm;
	cudaEvent_t start, end; /* `start` is NULL without one, or once it has passed */
};

enum style { SIDE, CURRENT, PLAIN, BLOCKING };

static int rank, world;
static struct communicator communicators[MAX_COMMS];
static struct communicator *used;
static int communicator_count;
static enum style style;
static int nccl2;
static cudaStream_t current;

static pthread_mutex_t works_lock = PTHREAD_MUTEX_INITIALIZER;
static struct work works[MAX_WORKS];
static int work_count;
/* Events are used again, the last one first, as in the event cache of torch. */
static cudaEvent_t cache[MAX_WORKS];
static int cached;
/* The start event of the operation that is being made. */
static cudaEvent_t started;

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

/* With the lock. */
static cudaEvent_t event_take(void)
{
	cudaEvent_t event;

	if (cached)
		return cache[--cached];
	cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
	return event;
}

/* With the lock. */
static void works_sweep(void)
{
	int i, kept = 0;

	for (i = 0; i < work_count; i++) {
		ncclResult_t error;

		ncclCommGetAsyncError(works[i].comm, &error);
		if (works[i].start && cudaEventQuery(works[i].start) != cudaErrorNotReady) {
			cache[cached++] = works[i].start;
			works[i].start = NULL;
		}
		if (works[i].start || cudaEventQuery(works[i].end) == cudaErrorNotReady)
			works[kept++] = works[i];
		else
			cache[cached++] = works[i].end;
	}
	work_count = kept;
}

static void *watchdog(void *argument)
{
	uint64_t interval = *(uint64_t *)argument;

	prctl(PR_SET_NAME, nccl2 ? "pt_nccl2_watchd" : "pt_nccl_watchdg");
	for (;;) {
		pass(interval);
		pthread_mutex_lock(&works_lock);
		works_sweep();
		pthread_mutex_unlock(&works_lock);
	}
	return NULL;
}

/* The thread asks what a result means, as C10D_NCCL_CHECK does. */
static ncclResult_t checked(ncclResult_t result)
{
	if (result != ncclSuccess && result != ncclInProgress)
		ncclGetErrorString(result);
	return result;
}

#define CALL(expression) (*ncclDoubleBefore() = now_ns(), checked(expression))

struct arguments {
	const char *op;
	size_t count;
	int dtype, redop, root;
};

/* `root` is the peer of send and recv. */
static ncclResult_t call(const struct arguments *a, cudaStream_t stream)
{
	static char buffer[8];
	ncclComm_t comm = used->comm;

	if (!strcmp(a->op, "all_reduce"))
		return CALL(ncclAllReduce(buffer, buffer, a->count, a->dtype, a->redop, comm, stream));
	if (!strcmp(a->op, "broadcast"))
		return CALL(ncclBroadcast(buffer, buffer, a->count, a->dtype, a->root, comm, stream));
	if (!strcmp(a->op, "bcast"))
		return CALL(ncclBcast(buffer, a->count, a->dtype, a->root, comm, stream));
	if (!strcmp(a->op, "reduce"))
		return CALL(ncclReduce(buffer, buffer, a->count, a->dtype, a->redop, a->root, comm, stream));
	if (!strcmp(a->op, "all_gather"))
		return CALL(ncclAllGather(buffer, buffer, a->count, a->dtype, comm, stream));
	if (!strcmp(a->op, "reduce_scatter"))
		return CALL(ncclReduceScatter(buffer, buffer, a->count, a->dtype, a->redop, comm, stream));
	if (!strcmp(a->op, "send"))
		return CALL(ncclSend(buffer, a->count, a->dtype, a->root, comm, stream));
	if (!strcmp(a->op, "recv"))
		return CALL(ncclRecv(buffer, a->count, a->dtype, a->root, comm, stream));
#if DOUBLE_VERSION >= 22803
	if (!strcmp(a->op, "all_to_all"))
		return CALL(ncclAlltoAll(buffer, buffer, a->count, a->dtype, comm, stream));
	if (!strcmp(a->op, "gather"))
		return CALL(ncclGather(buffer, buffer, a->count, a->dtype, a->root, comm, stream));
	if (!strcmp(a->op, "scatter"))
		return CALL(ncclScatter(buffer, buffer, a->count, a->dtype, a->root, comm, stream));
#endif
	fprintf(stderr, "no operation %s\n", a->op);
	exit(2);
}

static cudaStream_t work_stream(void)
{
	return style == SIDE || style == BLOCKING ? used->stream : current;
}

/* What comes before ncclX: the NCCL stream waits for what the current one has to do. */
static void before_work(void)
{
	cudaEvent_t event;

	if (work_stream() != current) {
		pthread_mutex_lock(&works_lock);
		event = event_take();
		pthread_mutex_unlock(&works_lock);
		cudaEventRecord(event, current);
		cudaStreamWaitEvent(used->stream, event, 0);
		pthread_mutex_lock(&works_lock);
		cache[cached++] = event;
		pthread_mutex_unlock(&works_lock);
	}
	started = NULL;
	if (nccl2 && (style == SIDE || style == CURRENT)) {
		pthread_mutex_lock(&works_lock);
		started = event_take();
		pthread_mutex_unlock(&works_lock);
		cudaEventRecord(started, work_stream());
	}
}

/* What comes behind it: the end event, which the watchdog asks for, or in the blocking mode this thread. */
static void after_work(void)
{
	cudaEvent_t event;

	if (style == PLAIN)
		return;
	pthread_mutex_lock(&works_lock);
	event = event_take();
	pthread_mutex_unlock(&works_lock);
	cudaEventRecord(event, work_stream());
	if (style == BLOCKING)
		while (cudaEventQuery(event) == cudaErrorNotReady)
			pass(1000000);
	pthread_mutex_lock(&works_lock);
	if (style == BLOCKING)
		cache[cached++] = event;
	else
		works[work_count++] = (struct work){used->comm, started, event};
	pthread_mutex_unlock(&works_lock);
}

static int works_left(void)
{
	int left;

	pthread_mutex_lock(&works_lock);
	left = work_count;
	pthread_mutex_unlock(&works_lock);
	return left;
}

static void forget_works_of(ncclComm_t comm)
{
	int i, kept = 0;

	pthread_mutex_lock(&works_lock);
	for (i = 0; i < work_count; i++)
		if (works[i].comm != comm)
			works[kept++] = works[i];
	work_count = kept;
	pthread_mutex_unlock(&works_lock);
}

static ncclUniqueId unique_id(const char *name)
{
	char path[512], made[520];
	ncclUniqueId id;
	int fd;

	snprintf(path, sizeof(path), "%s/id-%s", getenv("NCCL_DOUBLE_DIR"), name);
	snprintf(made, sizeof(made), "%s.new", path);
	if (rank == 0) {
		ncclGetUniqueId(&id);
		fd = open(made, O_WRONLY | O_CREAT, 0644);
		if (fd < 0 || write(fd, &id, sizeof(id)) != sizeof(id) || rename(made, path))
			abort();
		close(fd);
		return id;
	}
	while ((fd = open(path, O_RDONLY)) < 0)
		pass(1000000);
	if (read(fd, &id, sizeof(id)) != sizeof(id))
		abort();
	close(fd);
	return id;
}

static struct communicator *communicator_new(const char *name)
{
	struct communicator *c = &communicators[communicator_count++];

	snprintf(c->name, sizeof(c->name), "%s", name);
	cudaStreamCreateWithFlags(&c->stream, 1);
	used = c;
	return c;
}

static struct communicator *communicator_of(const char *name)
{
	int i;

	for (i = communicator_count; i--;)
		if (!strcmp(communicators[i].name, name))
			return &communicators[i];
	fprintf(stderr, "no communicator %s\n", name);
	exit(2);
}

static ncclResult_t make(const char *name, const char *how)
{
	struct communicator *c = communicator_new(name);
	ncclUniqueId id = unique_id(name);
	ncclConfig_t config = double_config();
	ncclResult_t result, async;

#if DOUBLE_VERSION >= 22700
	config.commName = c->name;
#endif
	if (!strcmp(how, "plain"))
		return CALL(ncclCommInitRank(&c->comm, world, id, rank));
#if DOUBLE_VERSION >= 22300
	if (!strcmp(how, "scalable"))
		return CALL(ncclCommInitRankScalable(&c->comm, world, rank, 1, &id, &config));
#endif
	config.blocking = strcmp(how, "nonblocking") != 0;
	result = CALL(ncclCommInitRankConfig(&c->comm, world, id, rank, &config));
	while (result == ncclInProgress) {
		ncclCommGetAsyncError(c->comm, &async);
		if (async != ncclInProgress)
			result = async;
	}
	return result;
}

static ncclResult_t split(const char *name, int color, int key)
{
	ncclComm_t parent = used->comm;
	struct communicator *c = communicator_new(name);
	ncclConfig_t config = double_config();

#if DOUBLE_VERSION >= 22700
	config.commName = c->name;
#endif
	return CALL(ncclCommSplit(parent, color, key, &c->comm, &config));
}

static ncclResult_t do_operations(int times, const struct arguments *a)
{
	ncclResult_t result = ncclSuccess;

	while (times--) {
		before_work();
		result = call(a, work_stream());
		if (result == ncclSuccess)
			after_work();
	}
	return result;
}

/* Coalesced: a group of `times` operations with one end event. */
static ncclResult_t do_group(int times, const struct arguments *a)
{
	ncclResult_t result;

	before_work();
	ncclGroupStart();
	while (times--)
		call(a, work_stream());
	result = CALL(ncclGroupEnd());
	if (result == ncclSuccess)
		after_work();
	return result;
}

/* To the next rank and from the one before, in one group, as batch_isend_irecv. */
static ncclResult_t do_ring(int times, size_t count)
{
	struct arguments a = {.count = count, .dtype = ncclFloat32};
	int me, size;
	ncclResult_t result = ncclSuccess;

	ncclCommUserRank(used->comm, &me);
	ncclCommCount(used->comm, &size);
	while (times--) {
		before_work();
		ncclGroupStart();
		a.op = "send";
		a.root = (me + 1) % size;
		call(&a, work_stream());
		a.op = "recv";
		a.root = (me + size - 1) % size;
		call(&a, work_stream());
		result = CALL(ncclGroupEnd());
		after_work();
	}
	return result;
}

/* `times` operations captured, and the graph launched `launches` times. */
static ncclResult_t do_graph(int times, int launches, const struct arguments *a)
{
	cudaGraphExec_t executable;
	cudaGraph_t graph;
	ncclResult_t result = ncclSuccess;

	cudaStreamBeginCapture(current, cudaStreamCaptureModeThreadLocal);
	while (times--)
		result = call(a, current);
	cudaStreamEndCapture(current, &graph);
	cudaGraphInstantiate(&executable, graph, 0);
	while (launches--)
		cudaGraphLaunch(executable, current);
	cudaStreamSynchronize(current);
	return result;
}

static void do_sync(const char *what)
{
	cudaEvent_t event;

	if (!strcmp(what, "stream")) {
		cudaStreamSynchronize(work_stream());
	} else if (!strcmp(what, "device")) {
		cudaDeviceSynchronize();
	} else {
		cudaEventCreate(&event);
		cudaEventRecord(event, work_stream());
		cudaEventSynchronize(event);
		cudaEventDestroy(event);
	}
}

static __attribute__((noipa)) void spin(uint64_t times)
{
	while (times--)
		__asm__ volatile("");
}

/* `times` hits of one probe each, in a loop; returns ns. */
static uint64_t do_loop(const char *what, uint64_t times)
{
	static char buffer[8];
	cudaEvent_t event;
	uint64_t begin, i;

	cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
	ncclDoubleInstant(1);
	begin = now_ns();
	if (!strcmp(what, "all_reduce"))
		for (i = 0; i < times; i++)
			ncclAllReduce(buffer, buffer, 1024, ncclFloat32, ncclSum, used->comm, current);
	else if (!strcmp(what, "group"))
		for (i = 0; i < times; i++)
			ncclGroupStart(), ncclGroupEnd();
	else if (!strcmp(what, "record"))
		for (i = 0; i < times; i++)
			cudaEventRecord(event, current);
	else if (!strcmp(what, "query"))
		for (i = 0; i < times; i++)
			cudaEventQuery(event);
	else if (!strcmp(what, "work"))
		for (i = 0; i < times; i++) {
			ncclAllReduce(buffer, buffer, 1024, ncclFloat32, ncclSum, used->comm, current);
			cudaEventRecord(event, current);
			cudaEventQuery(event);
		}
	else
		cudaStreamSynchronize(current);
	begin = now_ns() - begin;
	ncclDoubleInstant(0);
	cudaEventDestroy(event);
	return begin;
}

/*
 * Steps of `turns` turns of a loop and one operation with its end event, until `seconds` are over; the end of every
 * 100 of them, ns, goes to the file.
 */
static void do_pace(uint64_t turns, uint64_t seconds, const char *path)
{
	static char buffer[8];
	uint64_t end = now_ns() + seconds * 1000000000ULL, now;
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644), i;

	ncclDoubleInstant(1);
	do {
		for (i = 0; i < 100; i++) {
			spin(turns);
			before_work();
			ncclAllReduce(buffer, buffer, 1024, ncclFloat32, ncclSum, used->comm, work_stream());
			after_work();
		}
		now = now_ns();
		if (write(fd, &now, sizeof(now)) != sizeof(now))
			abort();
	} while (now < end);
	ncclDoubleInstant(0);
	close(fd);
}

/* Calls in bursts of 100, as many as make `rate` a second; returns ns. */
static uint64_t do_burst(uint64_t times, uint64_t rate)
{
	static char buffer[8];
	uint64_t begin = now_ns(), i, due, now;

	ncclDoubleInstant(1);
	for (i = 0; i < times; i++) {
		ncclAllReduce(buffer, buffer, 1 + i, ncclFloat32, ncclSum, used->comm, current);
		if (!rate || i % 100 != 99)
			continue;
		due = begin + (i + 1) * 1000000000ULL / rate;
		now = now_ns();
		if (now < due)
			pass(due - now);
	}
	ncclDoubleInstant(0);
	return now_ns() - begin;
}

static void style_set(const char *name)
{
	static const char *const names[] = {"side", "current", "plain", "blocking"};
	int i;

	for (i = 0; i < 4; i++)
		if (!strcmp(name, names[i]))
			style = i;
}

static void answer(long result)
{
	printf("done %ld\n", result);
	fflush(stdout);
}

static struct arguments arguments(char **words)
{
	return (struct arguments){words[0], strtoull(words[1], NULL, 0), atoi(words[2]), atoi(words[3]), atoi(words[4])};
}

static long gone(const char *how, const char *name)
{
	struct communicator *c = communicator_of(name);

	if (!strcmp(how, "finalize"))
		return CALL(ncclCommFinalize(c->comm));
	forget_works_of(c->comm);
	return !strcmp(how, "abort") ? CALL(ncclCommAbort(c->comm)) : CALL(ncclCommDestroy(c->comm));
}

/* What a line says; missing words are "0". */
static long obey(char **words)
{
	const char *verb = words[0];
	struct arguments a;

	if (!strcmp(verb, "init"))
		return make(words[1], words[2]);
	if (!strcmp(verb, "split"))
		return split(words[1], atoi(words[2]), atoi(words[3]));
	if (!strcmp(verb, "do") || !strcmp(verb, "group")) {
		a = arguments(words + 2);
		return *verb == 'd' ? do_operations(atoi(words[1]), &a) : do_group(atoi(words[1]), &a);
	}
	if (!strcmp(verb, "graph")) {
		a = arguments(words + 3);
		return do_graph(atoi(words[1]), atoi(words[2]), &a);
	}
	if (!strcmp(verb, "ring"))
		return do_ring(atoi(words[1]), strtoull(words[2], NULL, 0));
	if (!strcmp(verb, "loop"))
		return do_loop(words[1], strtoull(words[2], NULL, 0));
	if (!strcmp(verb, "spin")) {
		uint64_t begin = now_ns();

		spin(strtoull(words[1], NULL, 0));
		return now_ns() - begin;
	}
	if (!strcmp(verb, "burst"))
		return do_burst(strtoull(words[1], NULL, 0), strtoull(words[2], NULL, 0));
	if (!strcmp(verb, "abort") || !strcmp(verb, "destroy") || !strcmp(verb, "finalize"))
		return gone(verb, words[1]);
	if (!strcmp(verb, "left"))
		return works_left();
	if (!strcmp(verb, "use"))
		used = communicator_of(words[1]);
	else if (!strcmp(verb, "style"))
		style_set(words[1]);
	else if (!strcmp(verb, "duration"))
		ncclDoubleDuration(strtoull(words[1], NULL, 0));
	else if (!strcmp(verb, "pace"))
		do_pace(strtoull(words[1], NULL, 0), strtoull(words[2], NULL, 0), words[3]);
	else if (!strcmp(verb, "sync"))
		do_sync(words[1]);
	else if (!strcmp(verb, "drain"))
		while (works_left())
			pass(1000000);
	else if (!strcmp(verb, "fail"))
		ncclDoubleFail(atoi(words[1]), atoi(words[2]));
	else if (!strcmp(verb, "async"))
		ncclDoubleAsyncError(used->comm, atoi(words[1]));
	else if (!strcmp(verb, "poll"))
		ncclCommGetAsyncError(used->comm, &(ncclResult_t){0});
	else if (!strcmp(verb, "cuda"))
		cudartDoubleFail(atoi(words[1]));
	else
		return -1;
	return 0;
}

int main(void)
{
	static char none[] = "0";
	static uint64_t interval;
	const char *set = getenv("WATCHDOG_MS");
	pthread_t thread;
	char line[1024];

	nccl2 = !!getenv("NCCL2");
	rank = atoi(getenv("RANK"));
	world = atoi(getenv("WORLD_SIZE"));
	cudaSetDevice(rank % 8);
	cudaStreamCreate(&current);
	interval = (set ? strtoull(set, NULL, 0) : 100) * 1000000ULL;
	pthread_create(&thread, NULL, watchdog, &interval);
	answer(0);
	while (fgets(line, sizeof(line), stdin)) {
		char *words[MAX_WORDS], *rest = line;
		int i;

		for (i = 0; i < MAX_WORDS; i++) {
			words[i] = strtok_r(rest, " \n", &rest);
			if (!words[i])
				words[i] = none;
		}
		if (!strcmp(words[0], "exit"))
			break;
		answer(obey(words));
	}
	return 0;
}
