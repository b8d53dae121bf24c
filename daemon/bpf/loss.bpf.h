/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rings of records of one size, each with counters of pushed and lost records.
 *
 *	RING(name, struct record, BYTES);
 *	...
 *	RING_PUSH(name, &record);
 *
 * A RING is the map `name`, the counters `name_loss`, and a variable `name_record`, by which readers find the record's
 * type in the object's BTF. BYTES is a power of two, and at least a page.
 */
#ifndef PROBING_LOSS_BPF_H
#define PROBING_LOSS_BPF_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct loss {
	__u64 pushed;
	__u64 lost;
};

#define RING(name, record, bytes)                                                                                      \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_RINGBUF);                                                                    \
		__uint(max_entries, bytes);                                                                            \
	} name SEC(".maps");                                                                                           \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);                                                               \
		__uint(max_entries, 1);                                                                                \
		__type(key, __u32);                                                                                    \
		__type(value, struct loss);                                                                            \
	} name##_loss SEC(".maps");                                                                                    \
	const volatile record *const volatile name##_record = 0

/*
 * bpf_ringbuf_output, not reserve and submit: a producer preempted between the two would hold back the whole ring.
 * Returns 0, or the error when the record was lost.
 */
static __always_inline long ring_push(void *ring, void *counters, void *record, __u64 size, __u64 flags)
{
	long error = bpf_ringbuf_output(ring, record, size, flags);
	__u32 zero = 0;
	struct loss *loss = bpf_map_lookup_elem(counters, &zero);

	if (loss) {
		if (error)
			loss->lost++;
		else
			loss->pushed++;
	}
	return error;
}

/* Like ring_push, for a record that the caller keeps if the ring is full: no loss is counted. */
static __always_inline long ring_offer(void *ring, void *counters, void *record, __u64 size)
{
	__u32 zero = 0;
	struct loss *loss;

	if (bpf_ringbuf_output(ring, record, size, BPF_RB_NO_WAKEUP))
		return -1;
	loss = bpf_map_lookup_elem(counters, &zero);
	if (loss)
		loss->pushed++;
	return 0;
}

/* Counts an event that became no record, because a map was full or an argument could not be read. */
static __always_inline void loss_count(void *counters)
{
	__u32 zero = 0;
	struct loss *loss = bpf_map_lookup_elem(counters, &zero);

	if (loss)
		loss->lost++;
}

/* Readers poll: waking one costs the calling thread an interrupt. */
#define RING_PUSH(name, record) RING_PUSH_FLAGS(name, record, BPF_RB_NO_WAKEUP)
/* `flags`: BPF_RB_NO_WAKEUP or BPF_RB_FORCE_WAKEUP, for programs that decide when the reader is woken. */
#define RING_PUSH_FLAGS(name, record, flags) ring_push(&name, &name##_loss, record, sizeof(*(record)), flags)
#define RING_OFFER(name, record) ring_offer(&name, &name##_loss, record, sizeof(*(record)))
#define RING_LOST(name) loss_count(&name##_loss)

#endif
