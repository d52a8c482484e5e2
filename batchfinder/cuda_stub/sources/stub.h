// What all stub libraries share. Types and numbers are those of CUDA's binary interface; no NVIDIA header is needed.
#ifndef BATCHFINDER_STUB_H
#define BATCHFINDER_STUB_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
#define MAX_CARDS 64
#define SUCCESS 0

// Errors of the CUDA runtime and of the driver, which use the same numbers for these.
enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

// One card, as BATCHFINDER_CUDA_STUB describes it.
struct card {
    char name[256];
    size_t total;    // bytes that the driver reports as the card's memory
    size_t context;  // bytes that each process's context takes at its first use
    size_t held;     // bytes that something else holds
    int capability;  // 80 for 8.0
    int multiprocessors;
    int l2_bytes;
    int clock_khz, memory_clock_khz, bus_bits;
};

struct settings {
    int cards;  // all of them, whatever CUDA_VISIBLE_DEVICES hides
    struct card card[MAX_CARDS];
    int visible, physical[MAX_CARDS];  // what CUDA_VISIBLE_DEVICES leaves, and which card each is
    int events;                        // when an event is complete, an enum events
    int addresses;                     // where segments lie, an enum addresses
    size_t copied;                     // copies up to so many bytes are real
    int verbose;
    char folder[3072];  // which processes on the same cards share; empty for none
    int ranks;          // processes of one job exchange small NCCL buffers through the folder
    char cudnn[3072];   // the folder of cuDNN's own libraries; empty for none
};
enum events { EVENTS_EARLY, EVENTS_LATE, EVENTS_IN_ORDER };
enum addresses { ADDRESSES_CUDA, ADDRESSES_LOW, ADDRESSES_RISING, ADDRESSES_FALLING };

const struct settings *stub_settings(void);
const struct card *stub_card(int device);  // of those that are visible; NULL for none
int stub_device(void);                     // the calling thread's

// A function that nobody wrote: says so once on stderr and in the log, and returns `code`.
int stub_unwritten(const char *name, int code);
// Something that is taken to be so; said once in the log.
void stub_assumed(const char *what);
void stub_log(const char *kind, const char *text);

// Memory of the calling thread's device: 0 where there was room for it.
int stub_take(size_t bytes);
void stub_give(int device, size_t bytes);
size_t stub_used(int device);         // of all processes, contexts and what else is held
size_t stub_used_by_me(int device);   // of this process, its context included
void *stub_reserve(size_t bytes, int device);
void stub_unreserve(void *address, size_t bytes);

// A handle that is not NULL and not equal to another one.
void *stub_new_handle(void);
#define NEW_HANDLE(out) (*(void **)(out) = stub_new_handle(), SUCCESS)

// What a card of a compute capability has, for PyTorch and for cuDNN.
struct limits {
    int shared_per_sm, shared_per_block_optin, reserved_shared, threads_per_sm, blocks_per_sm;
};
struct limits stub_limits(int capability);
int stub_driver_version(void);
#endif
