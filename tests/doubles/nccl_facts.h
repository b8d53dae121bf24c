/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An excerpt of nccl.h as the wheels nvidia-nccl-cu12 2.18.1 to 2.32.3 have it: declarations, each since the version
 * that it came with (none of them has changed), and values. Compiled beside nccl_public.h, it fails where they differ.
 */
#ifndef DOUBLE_NCCL_FACTS_H
#define DOUBLE_NCCL_FACTS_H

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
	ncclConfig_t *config);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
	ncclScalarResidence_t residence, ncclComm_t comm);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
	ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
	cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
	int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
	ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
	ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
	ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
	cudaStream_t stream);
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
	cudaStream_t stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

#if DOUBLE_VERSION >= 21903
ncclResult_t ncclMemAlloc(void **ptr, size_t size);
ncclResult_t ncclMemFree(void *ptr);
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
#endif

#if DOUBLE_VERSION >= 22203
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo);
#endif

#if DOUBLE_VERSION >= 22304
ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
	ncclUniqueId *commIds, ncclConfig_t *config);
#endif

#if DOUBLE_VERSION >= 22703
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
	ncclConfig_t *config, int shrinkFlags);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
#endif

#if DOUBLE_VERSION >= 22803
ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
	ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream);
#endif

#if DOUBLE_VERSION >= 22807
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
#endif

#if DOUBLE_VERSION >= 22902
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId);
ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t
	*newcomm, ncclConfig_t *config);
ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr);
ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
	ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t
	stream);
ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream);
#endif

#define FACT(what) _Static_assert(what, #what)
#define VALUE(name, value) FACT((int)(name) == (value))

VALUE(ncclSuccess, 0);
VALUE(ncclUnhandledCudaError, 1);
VALUE(ncclSystemError, 2);
VALUE(ncclInternalError, 3);
VALUE(ncclInvalidArgument, 4);
VALUE(ncclInvalidUsage, 5);
VALUE(ncclRemoteError, 6);
VALUE(ncclInProgress, 7);
VALUE(ncclInt8, 0);
VALUE(ncclUint8, 1);
VALUE(ncclInt32, 2);
VALUE(ncclUint32, 3);
VALUE(ncclInt64, 4);
VALUE(ncclUint64, 5);
VALUE(ncclFloat16, 6);
VALUE(ncclFloat32, 7);
VALUE(ncclFloat64, 8);
VALUE(ncclBfloat16, 9);
#if DOUBLE_VERSION >= 22403
VALUE(ncclFloat8e4m3, 10);
VALUE(ncclFloat8e5m2, 11);
VALUE(ncclNumTypes, 12);
#else
VALUE(ncclNumTypes, 10);
#endif
VALUE(ncclSum, 0);
VALUE(ncclProd, 1);
VALUE(ncclMax, 2);
VALUE(ncclMin, 3);
VALUE(ncclAvg, 4);
VALUE(ncclNumOps, 5);
VALUE(ncclScalarDevice, 0);
VALUE(ncclScalarHostImmediate, 1);
FACT(NCCL_SPLIT_NOCOLOR == -1);
FACT(NCCL_UNIQUE_ID_BYTES == 128);
FACT(sizeof(ncclUniqueId) == 128);
FACT(offsetof(ncclConfig_t, magic) == 8);
FACT(offsetof(ncclConfig_t, blocking) == 16);
FACT(offsetof(ncclConfig_t, netName) == 32);
FACT(offsetof(ncclConfig_t, splitShare) == 40);
#if DOUBLE_VERSION >= 22602
FACT(offsetof(ncclConfig_t, trafficClass) == 44);
#endif
#if DOUBLE_VERSION >= 22703
FACT(offsetof(ncclConfig_t, commName) == 48);
FACT(offsetof(ncclConfig_t, nvlsCTAs) == 68);
#endif
#if DOUBLE_VERSION >= 23102
FACT(sizeof(ncclConfig_t) == 120);
#elif DOUBLE_VERSION >= 23003
FACT(sizeof(ncclConfig_t) == 96);
#elif DOUBLE_VERSION >= 22902
FACT(sizeof(ncclConfig_t) == 88);
#elif DOUBLE_VERSION >= 22803
FACT(sizeof(ncclConfig_t) == 80);
#elif DOUBLE_VERSION >= 22703
FACT(sizeof(ncclConfig_t) == 72);
#else
FACT(sizeof(ncclConfig_t) == 48);
#endif

#undef VALUE
#undef FACT
#endif
