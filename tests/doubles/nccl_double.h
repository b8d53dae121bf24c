/* SPDX-License-Identifier: Apache-2.0 */
/* What only the double of libnccl has: how a job arms it. */
#ifndef DOUBLE_NCCL_DOUBLE_H
#define DOUBLE_NCCL_DOUBLE_H

#include <stdint.h>

/* How long an operation runs after its last rank has come, ns. */
void ncclDoubleDuration(uint64_t ns);
/* The next operation of this thread, or with `at_end` the next end of a group, fails with `result`. */
void ncclDoubleFail(int result, int at_end);
/* What ncclCommGetAsyncError says of the communicator from now on. */
void ncclDoubleAsyncError(void *comm, int result);
/* Operations only count: nothing is put on a stream and nothing written down. */
void ncclDoubleInstant(int on);
/* Where the calling thread notes the time before its next call; goes into the truth of the call. */
uint64_t *ncclDoubleBefore(void);

#endif
