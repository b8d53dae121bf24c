/* SPDX-License-Identifier: Apache-2.0 */
/* The ring `communicators`: a record for each event of a communicator. */
#ifndef PROBING_COMMUNICATORS_BPF_H
#define PROBING_COMMUNICATORS_BPF_H

#include "guard.bpf.h"
#include "loss.bpf.h"

#define COMM_NAME_BYTES 48
#define UNIQUE_ID_BYTES 128

enum communicator_event {
	COMM_SEEN = 1, /* first seen in a call: made before the probes, or by a function without a probe */
	COMM_MADE = 2, /* the call that makes the communicator has returned `result` */
	COMM_FINALIZED = 3,
	COMM_DESTROYED = 4,
	COMM_ABORTED = 5,
	COMM_ERROR = 6, /* the result of ncclCommGetAsyncError has changed */
};

enum communicator_maker {
	MADE_UNKNOWN = 0,
	MADE_INIT_RANK = 1,
	MADE_INIT_RANK_CONFIG = 2,
	MADE_INIT_RANK_SCALABLE = 3,
	MADE_INIT_ALL = 4,
	MADE_SPLIT = 5,
	MADE_SHRINK = 6,
	MADE_GROW = 7,
};

/* The origin of hash, rank and size. */
enum communicator_identity {
	IDENTITY_NONE = 0,
	IDENTITY_STRUCT = 1,	/* read from struct ncclComm */
	IDENTITY_UNIQUE_ID = 2, /* commHash computed from the unique id of the call (bootstrap.cc, getHash) */
	IDENTITY_DERIVED = 3,	/* for a split without a readable hash: from parent, number of the split and color */
};

/* Unknown values are UNKNOWN_* (collectives.bpf.h). */
struct communicator_record {
	__u64 t; /* CLOCK_MONOTONIC ns */
	__u64 start_ns;
	__u64 comm; /* address of struct ncclComm */
	__u64 hash;
	__u64 parent; /* hash of the parent of a split; 0: none */
	__u64 bus_id;
	__u64 duration_ns; /* of the call that made the communicator */
	__u32 tgid;
	__u32 tid;
	__s32 rank;
	__s32 size;
	__s32 cuda_device;
	__s32 node;
	__s32 nodes;
	__s32 color;
	__s32 key;
	__u8 event;
	__u8 result; /* ncclResult_t of the call; in COMM_ERROR and COMM_SEEN the asynchronous error; 0xff: not known */
	__u8 maker;
	__u8 identity;
	__u8 aborted; /* 0, 1, or UNKNOWN_BYTE */
	__u8 reserved[7];
	char name[COMM_NAME_BYTES]; /* ncclConfig_t.commName; empty: none */
	__u8 root_address[28];	    /* sockaddr of the bootstrap root, from the unique id; zeros: not known */
	__u8 reserved_too[4];
};

RING(communicators, struct communicator_record, 1 << 20);

#endif
