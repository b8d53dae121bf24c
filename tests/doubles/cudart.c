// SPDX-License-Identifier: Apache-2.0
/*
 * libcudart without a GPU. A stream is a queue with a thread that does its work in order and knows when each piece was
 * done. Implicit streams are one a device (and one a thread and device); they do not wait for the others, as the real
 * legacy stream does. One lock for all: what is asked of an event or stream is true at one instant.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cudart.h"

#define DEVICES 16

enum kind { KIND_WORK, KIND_KERNEL, KIND_RECORD, KIND_WAIT };

struct item {
	struct item *next;
	enum kind kind;
	struct double_work work;
	uint64_t kernel_ns;
	cudaEvent_t event;
	uint64_t generation;
};

struct CUgraph_st {
	struct item *first, **last;
};

struct CUstream_st {
	struct CUstream_st *next_stream;
	int device, running, closing;
	pthread_cond_t changed;
	struct item *first, **last;
	uint64_t pushed, done;
	cudaGraph_t capture;
};

struct CUevent_st {
	uint64_t recorded, done;
	int references, destroyed;
	cudaGraph_t capture;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams;
static struct CUstream_st *defaults[DEVICES];
static _Thread_local struct CUstream_st *thread_defaults[DEVICES];
static _Thread_local int device_now;
static _Thread_local cudaError_t last_error;
static int sticky, fail_allocation;

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

static cudaError_t result(cudaError_t error)
{
	if (error != cudaSuccess)
		last_error = error;
	return error;
}

static struct CUstream_st *stream_new(int device)
{
	struct CUstream_st *stream = calloc(1, sizeof(*stream));

	stream->device = device;
	stream->last = &stream->first;
	pthread_cond_init(&stream->changed, NULL);
	stream->next_stream = streams;
	streams = stream;
	return stream;
}

/* With the lock. */
static struct CUstream_st *stream_of(cudaStream_t handle)
{
	struct CUstream_st **slot;

	if (handle != NULL && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
		return handle;
	slot = handle == cudaStreamPerThread ? &thread_defaults[device_now] : &defaults[device_now];
	if (!*slot)
		*slot = stream_new(device_now);
	return *slot;
}

static void event_put(cudaEvent_t event)
{
	if (!event->references && event->destroyed)
		free(event);
}

static int is_done(cudaEvent_t event, uint64_t generation)
{
	return event->done >= generation || sticky;
}

static void event_come(cudaEvent_t event, uint64_t generation)
{
	if (event->done < generation)
		event->done = generation;
	event->references--;
	event_put(event);
}

/* With the lock. The events right behind work come at the very instant that it is done. */
static void do_records(struct CUstream_st *stream)
{
	struct item *item;

	while ((item = stream->first) && item->kind == KIND_RECORD) {
		stream->first = item->next;
		if (!stream->first)
			stream->last = &stream->first;
		event_come(item->event, item->generation);
		stream->done++;
		free(item);
	}
	pthread_cond_broadcast(&progress);
}

/* With the lock, which is let go while the item is done. */
static void do_item(struct CUstream_st *stream, struct item *item)
{
	uint64_t start = now_ns(), end;
	int failed = sticky != 0;

	if (item->kind == KIND_RECORD) {
		event_come(item->event, item->generation);
	} else if (item->kind == KIND_WAIT) {
		while (!is_done(item->event, item->generation))
			pthread_cond_wait(&progress, &lock);
		event_come(item->event, 0);
	} else if (!failed) {
		pthread_mutex_unlock(&lock);
		if (item->kind == KIND_KERNEL)
			pass(item->kernel_ns);
		else
			item->work.run(item->work.argument);
		pthread_mutex_lock(&lock);
	}
	end = now_ns();
	stream->done++;
	do_records(stream);
	if (item->kind == KIND_WORK) {
		pthread_mutex_unlock(&lock);
		item->work.ended(item->work.argument, start, end, failed);
		pthread_mutex_lock(&lock);
	}
	free(item);
}

static void *stream_thread(void *argument)
{
	struct CUstream_st *stream = argument, **at;

	pthread_mutex_lock(&lock);
	for (;;) {
		struct item *item = stream->first;

		if (!item && stream->closing)
			break;
		if (!item) {
			pthread_cond_wait(&stream->changed, &lock);
			continue;
		}
		stream->first = item->next;
		if (!stream->first)
			stream->last = &stream->first;
		do_item(stream, item);
	}
	for (at = &streams; *at != stream; at = &(*at)->next_stream)
		;
	*at = stream->next_stream;
	pthread_mutex_unlock(&lock);
	pthread_cond_destroy(&stream->changed);
	free(stream);
	return NULL;
}

static void start_thread(struct CUstream_st *stream)
{
	pthread_t thread;

	if (stream->running)
		return;
	stream->running = 1;
	pthread_create(&thread, NULL, stream_thread, stream);
	pthread_detach(thread);
}

/* With the lock. */
static void enqueue(struct CUstream_st *stream, struct item *item)
{
	start_thread(stream);
	item->next = NULL;
	*stream->last = item;
	stream->last = &item->next;
	stream->pushed++;
	pthread_cond_signal(&stream->changed);
}

/* With the lock. Returns 1 where it went into a graph. */
static int put(struct CUstream_st *stream, struct item item)
{
	struct item *copy = malloc(sizeof(*copy));

	*copy = item;
	if (!stream->capture) {
		enqueue(stream, copy);
		return 0;
	}
	copy->next = NULL;
	*stream->capture->last = copy;
	stream->capture->last = &copy->next;
	return 1;
}

int cudartDoublePush(cudaStream_t handle, const struct double_work *work)
{
	int captured;

	pthread_mutex_lock(&lock);
	captured = put(stream_of(handle), (struct item){.kind = KIND_WORK, .work = *work});
	pthread_mutex_unlock(&lock);
	return captured;
}

void cudartDoubleFail(int error)
{
	pthread_mutex_lock(&lock);
	sticky = error;
	pthread_cond_broadcast(&progress);
	pthread_mutex_unlock(&lock);
}

void cudartDoubleFailAllocation(void)
{
	fail_allocation = 1;
}

cudaError_t cudaGetDeviceCount(int *count)
{
	*count = DEVICES;
	return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
	if (device < 0 || device >= DEVICES)
		return result(cudaErrorInvalidDevice);
	device_now = device;
	return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
	*device = device_now;
	return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
	return sticky ? (cudaError_t)sticky : last_error;
}

cudaError_t cudaGetLastError(void)
{
	cudaError_t error = cudaPeekAtLastError();

	last_error = cudaSuccess;
	return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
	switch (error) {
	case cudaSuccess:
		return "cudaSuccess";
	case cudaErrorMemoryAllocation:
		return "cudaErrorMemoryAllocation";
	case cudaErrorNotReady:
		return "cudaErrorNotReady";
	case cudaErrorIllegalAddress:
		return "cudaErrorIllegalAddress";
	default:
		return "cudaErrorUnknown";
	}
}

const char *cudaGetErrorString(cudaError_t error)
{
	return cudaGetErrorName(error);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
	(void)flags, (void)priority;
	pthread_mutex_lock(&lock);
	*stream = stream_new(device_now);
	pthread_mutex_unlock(&lock);
	return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
	return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
	return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	pthread_mutex_lock(&lock);
	start_thread(stream);
	stream->closing = 1;
	pthread_cond_signal(&stream->changed);
	pthread_mutex_unlock(&lock);
	return cudaSuccess;
}

/* With the lock. */
static cudaError_t wait_for(struct CUstream_st *stream, uint64_t position)
{
	while (stream->done < position && !sticky)
		pthread_cond_wait(&progress, &lock);
	return sticky ? (cudaError_t)sticky : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
	struct CUstream_st *stream;
	cudaError_t error;

	pthread_mutex_lock(&lock);
	stream = stream_of(handle);
	error = sticky ? (cudaError_t)sticky : stream->done < stream->pushed ? cudaErrorNotReady : cudaSuccess;
	pthread_mutex_unlock(&lock);
	return result(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
	struct CUstream_st *stream;
	cudaError_t error;

	pthread_mutex_lock(&lock);
	stream = stream_of(handle);
	error = wait_for(stream, stream->pushed);
	pthread_mutex_unlock(&lock);
	return result(error);
}

cudaError_t cudaDeviceSynchronize(void)
{
	struct CUstream_st *stream;
	cudaError_t error = cudaSuccess;

	pthread_mutex_lock(&lock);
again:
	for (stream = streams; stream && !sticky; stream = stream->next_stream)
		if (stream->device == device_now && stream->done < stream->pushed) {
			pthread_cond_wait(&progress, &lock);
			goto again;
		}
	if (sticky)
		error = sticky;
	pthread_mutex_unlock(&lock);
	return result(error);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
	(void)flags;
	*event = calloc(1, sizeof(**event));
	return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
	return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	pthread_mutex_lock(&lock);
	event->destroyed = 1;
	event_put(event);
	pthread_mutex_unlock(&lock);
	return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t handle)
{
	struct CUstream_st *stream;
	cudaError_t error;

	pthread_mutex_lock(&lock);
	stream = stream_of(handle);
	error = sticky;
	event->capture = stream->capture;
	if (!error && !event->capture) {
		event->recorded++;
		event->references++;
		if (stream->done == stream->pushed)
			event_come(event, event->recorded);
		else
			put(stream, (struct item){.kind = KIND_RECORD, .event = event, .generation = event->recorded});
	}
	pthread_mutex_unlock(&lock);
	return result(error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle)
{
	return record(event, handle);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned int flags)
{
	(void)flags;
	return record(event, handle);
}

/* With the lock. */
static cudaError_t event_state(cudaEvent_t event)
{
	if (sticky)
		return sticky;
	if (event->capture)
		return cudaErrorCapturedEvent;
	return event->done < event->recorded ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
	cudaError_t error;

	pthread_mutex_lock(&lock);
	error = event_state(event);
	pthread_mutex_unlock(&lock);
	return result(error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
	uint64_t generation;
	cudaError_t error;

	pthread_mutex_lock(&lock);
	generation = event->recorded;
	event->references++;
	while (event_state(event) == cudaErrorNotReady && event->done < generation)
		pthread_cond_wait(&progress, &lock);
	error = sticky;
	event->references--;
	event_put(event);
	pthread_mutex_unlock(&lock);
	return result(error);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned int flags)
{
	struct CUstream_st *stream;

	(void)flags;
	pthread_mutex_lock(&lock);
	stream = stream_of(handle);
	if (event->capture) {
		/* The stream joins the capture; its work follows that of the first, one after the other. */
		stream->capture = event->capture;
	} else if (event->recorded) {
		event->references++;
		put(stream, (struct item){.kind = KIND_WAIT, .event = event, .generation = event->recorded});
	}
	pthread_mutex_unlock(&lock);
	return result(sticky);
}

/* args[0]: how long it takes, ns (uint64_t); without arguments no time. */
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	uint64_t ns = args && args[0] ? *(uint64_t *)args[0] : 0;

	(void)function, (void)grid, (void)block, (void)shared;
	pthread_mutex_lock(&lock);
	put(stream_of(stream), (struct item){.kind = KIND_KERNEL, .kernel_ns = ns});
	pthread_mutex_unlock(&lock);
	return result(sticky);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
	(void)mode;
	if (!stream)
		return result(cudaErrorInvalidValue);
	pthread_mutex_lock(&lock);
	stream->capture = calloc(1, sizeof(*stream->capture));
	stream->capture->last = &stream->capture->first;
	pthread_mutex_unlock(&lock);
	return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
	struct CUstream_st *other;

	pthread_mutex_lock(&lock);
	*graph = stream->capture;
	for (other = streams; other; other = other->next_stream)
		if (other->capture == *graph)
			other->capture = NULL;
	pthread_mutex_unlock(&lock);
	return *graph ? cudaSuccess : result(cudaErrorStreamCaptureInvalidated);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
	pthread_mutex_lock(&lock);
	*status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
	pthread_mutex_unlock(&lock);
	return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
	(void)flags;
	*executable = (cudaGraphExec_t)graph;
	return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle)
{
	struct CUstream_st *stream;
	struct item *item;

	pthread_mutex_lock(&lock);
	stream = stream_of(handle);
	for (item = ((cudaGraph_t)executable)->first; item; item = item->next)
		put(stream, *item);
	pthread_mutex_unlock(&lock);
	return result(sticky);
}

/* An executable graph is the graph itself here. */
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
	(void)executable;
	return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
	struct item *item, *next;

	for (item = graph->first; item; item = next) {
		next = item->next;
		free(item);
	}
	free(graph);
	return cudaSuccess;
}

static cudaError_t allocate(void **pointer, size_t size)
{
	if (fail_allocation) {
		fail_allocation = 0;
		return result(cudaErrorMemoryAllocation);
	}
	/* An address of its own and no memory: only the number matters. */
	*pointer = malloc(size < 64 ? size : 64);
	return sticky ? result(sticky) : cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t size)
{
	return allocate(pointer, size);
}

cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned int flags)
{
	(void)flags;
	return allocate(pointer, size);
}

cudaError_t cudaMallocHost(void **pointer, size_t size)
{
	return allocate(pointer, size);
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int flags)
{
	(void)flags;
	return allocate(pointer, size);
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream)
{
	(void)stream;
	return allocate(pointer, size);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t pool, cudaStream_t stream)
{
	(void)pool, (void)stream;
	return allocate(pointer, size);
}

cudaError_t cudaFree(void *pointer)
{
	free(pointer);
	return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer)
{
	return cudaFree(pointer);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
	(void)stream;
	return cudaFree(pointer);
}
