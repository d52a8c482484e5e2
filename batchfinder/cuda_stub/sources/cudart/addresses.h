#ifndef BATCHFINDER_ADDRESSES_H
#define BATCHFINDER_ADDRESSES_H
#include "stub.h"
#define GRANULE (2ull << 20)  // cudaMalloc's and cuMemCreate's
#define NO_GRANULE (~0ull)
// All under the lock of memory.c; sizes are multiples of GRANULE.
void *addresses_take(u64 size);  // readable and writable; NULL where the address space is full
void addresses_give(void *address, u64 size);
u64 addresses_granule(const void *address);
u64 addresses_granules(void);
#endif
