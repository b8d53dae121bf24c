/* SPDX-License-Identifier: Apache-2.0 */
/* What a process loses because it used up its share of a map or ring. */
#ifndef PROBING_SHARES_BPF_H
#define PROBING_SHARES_BPF_H

#include "guard.bpf.h"

/* Counts a record that was left out because its process used up its share, as a refused hit of `slot` (losses.py). */
static __noinline int left_out(__u32 slot, __u32 tgid, __u64 now)
{
	struct process_budget first = {.refused = 1, .refused_ns = now}, *own;
	struct process_budget_key key = {.tgid = tgid, .slot = slot};
	struct hit *hit = bpf_map_lookup_elem(&hits, &slot);

	if (hit) {
		hit->hits++;
		hit->refused++;
	}
	own = bpf_map_lookup_elem(&process_budgets, &key);
	if (own) {
		__sync_fetch_and_add(&own->refused, 1);
		own->refused_ns = now;
	} else {
		bpf_map_update_elem(&process_budgets, &key, &first, BPF_NOEXIST);
	}
	return 0;
}

#endif
