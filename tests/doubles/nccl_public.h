/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.h as far as the double goes, of the version DOUBLE_VERSION (2.27.5: 22705); test_doubles_abi.py compares. */
#ifndef DOUBLE_NCCL_PUBLIC_H
#define DOUBLE_NCCL_PUBLIC_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "cudart.h"
#include "nccl_layout.h"

#define NCCL_VERSION_CODE DOUBLE_VERSION
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_API_MAGIC 0xcafebeef
#define NCCL_UNIQUE_ID_BYTES 128

typedef struct ncclComm *ncclComm_t;
typedef struct {
	char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
	ncclSuccess = 0,
	ncclUnhandledCudaError = 1,
	ncclSystemError = 2,
	ncclInternalError = 3,
	ncclInvalidArgument = 4,
	ncclInvalidUsage = 5,
	ncclRemoteError = 6,
	ncclInProgress = 7,
#if DOUBLE_VERSION >= 23000
	ncclTimeout = 8,
#endif
	ncclNumResults,
} ncclResult_t;

typedef enum {
	ncclInt8 = 0,
	ncclUint8 = 1,
	ncclInt32 = 2,
	ncclUint32 = 3,
	ncclInt64 = 4,
	ncclUint64 = 5,
	ncclFloat16 = 6,
	ncclFloat32 = 7,
	ncclFloat64 = 8,
	ncclBfloat16 = 9,
#if DOUBLE_VERSION >= 22400
	ncclFloat8e4m3 = 10,
	ncclFloat8e5m2 = 11,
#endif
	ncclNumTypes,
} ncclDataType_t;

typedef enum {
	ncclSum = 0,
	ncclProd = 1,
	ncclMax = 2,
	ncclMin = 3,
	ncclAvg = 4,
	ncclNumOps = 5,
	ncclMaxRedOp = 0x7fffffff,
} ncclRedOp_t;

typedef enum {
	ncclScalarDevice = 0,
	ncclScalarHostImmediate = 1,
} ncclScalarResidence_t;

typedef struct {
	size_t size;
	unsigned int magic;
	unsigned int version;
	int blocking;
	int cgaClusterSize;
	int minCTAs;
	int maxCTAs;
	const char *netName;
	int splitShare;
#if DOUBLE_VERSION >= 22600
	int trafficClass;
#endif
#if DOUBLE_VERSION >= 22700
	const char *commName;
	int collnetEnable;
	int CTAPolicy;
	int shrinkShare;
	int nvlsCTAs;
#endif
#if DOUBLE_VERSION >= 22800
	int nChannelsPerNetPeer;
	int nvlinkCentricSched;
#endif
#if DOUBLE_VERSION >= 22900
	int graphUsageMode;
	int numRmaCtx;
#endif
#if DOUBLE_VERSION >= 23000
	int maxP2pPeers;
	int graphStreamOrdering;
#endif
#if DOUBLE_VERSION >= 23100
	int launchOrderImplicit;
	int numRmaSig;
	int rmaEagerInit;
	int hostCftMode;
	int nvlsHostMode;
#endif
} ncclConfig_t;

/* As NCCL_CONFIG_INITIALIZER, for all versions. */
static inline ncclConfig_t double_config(void)
{
	ncclConfig_t config;
	unsigned int i;

	for (i = 0; i < sizeof(config) / sizeof(int); i++)
		((int *)&config)[i] = NCCL_CONFIG_UNDEF_INT;
	config.size = sizeof(config);
	config.magic = NCCL_API_MAGIC;
	config.version = NCCL_VERSION_CODE;
	config.netName = NULL;
#if DOUBLE_VERSION >= 22700
	config.commName = NULL;
#endif
	return config;
}

#define API(returned, name, ...)                                                                                       \
	returned name(__VA_ARGS__);                                                                                    \
	returned p##name(__VA_ARGS__)

API(ncclResult_t, ncclGetVersion, int *version);
API(ncclResult_t, ncclGetUniqueId, ncclUniqueId *uniqueId);
API(ncclResult_t, ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
API(ncclResult_t, ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
    ncclConfig_t *config);
API(ncclResult_t, ncclCommInitAll, ncclComm_t *comm, int ndev, const int *devlist);
API(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);
API(ncclResult_t, ncclCommFinalize, ncclComm_t comm);
API(ncclResult_t, ncclCommDestroy, ncclComm_t comm);
API(ncclResult_t, ncclCommAbort, ncclComm_t comm);
API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *asyncError);
API(ncclResult_t, ncclCommCount, const ncclComm_t comm, int *count);
API(ncclResult_t, ncclCommCuDevice, const ncclComm_t comm, int *device);
API(ncclResult_t, ncclCommUserRank, const ncclComm_t comm, int *rank);
API(const char *, ncclGetErrorString, ncclResult_t result);
API(const char *, ncclGetLastError, ncclComm_t comm);
API(ncclResult_t, ncclRedOpCreatePreMulSum, ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
    ncclScalarResidence_t residence, ncclComm_t comm);
API(ncclResult_t, ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm);
API(ncclResult_t, ncclReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclBcast, void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream);
API(ncclResult_t, ncclBroadcast, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclAllReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclReduceScatter, const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclAllGather, const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclSend, const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream);
API(ncclResult_t, ncclRecv, void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream);
API(ncclResult_t, ncclGroupStart, void);
API(ncclResult_t, ncclGroupEnd, void);
#if DOUBLE_VERSION >= 21900
API(ncclResult_t, ncclMemAlloc, void **ptr, size_t size);
API(ncclResult_t, ncclMemFree, void *ptr);
API(ncclResult_t, ncclCommRegister, const ncclComm_t comm, void *buff, size_t size, void **handle);
API(ncclResult_t, ncclCommDeregister, const ncclComm_t comm, void *handle);
#endif
#if DOUBLE_VERSION >= 22200
typedef struct {
	size_t size;
	unsigned int magic;
	unsigned int version;
	float estimatedTime;
} ncclSimInfo_t;

API(ncclResult_t, ncclGroupSimulateEnd, ncclSimInfo_t *simInfo);
#endif
#if DOUBLE_VERSION >= 22300
API(ncclResult_t, ncclCommInitRankScalable, ncclComm_t *newcomm, int nranks, int myrank, int nId,
    ncclUniqueId *commIds, ncclConfig_t *config);
#endif
#if DOUBLE_VERSION >= 22700
#if DOUBLE_VERSION >= 22800
typedef struct ncclWindow_vidmem *ncclWindow_t;
#else
typedef struct ncclWindow *ncclWindow_t;
#endif

API(ncclResult_t, ncclCommShrink, ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
    ncclConfig_t *config, int shrinkFlags);
API(ncclResult_t, ncclCommWindowRegister, ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags);
API(ncclResult_t, ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win);
#endif
#if DOUBLE_VERSION >= 22803
API(ncclResult_t, ncclAlltoAll, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclGather, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclScatter, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream);
#endif
#if DOUBLE_VERSION >= 22807
API(ncclResult_t, ncclCommRevoke, ncclComm_t comm, int revokeFlags);
#endif
#if DOUBLE_VERSION >= 22902
typedef struct {
	int opCnt;
	int peer;
	int sigIdx;
	int ctx;
} ncclWaitSignalDesc_t;

API(ncclResult_t, ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId *uniqueId);
API(ncclResult_t, ncclCommGrow, ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
    ncclComm_t *newcomm, ncclConfig_t *config);
API(ncclResult_t, ncclWinGetUserPtr, ncclComm_t comm, ncclWindow_t win, void **outUserPtr);
API(ncclResult_t, ncclPutSignal, const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
    ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
    cudaStream_t stream);
API(ncclResult_t, ncclSignal, int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream);
API(ncclResult_t, ncclWaitSignal, int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream);
#endif

#undef API
#endif
