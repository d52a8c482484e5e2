// Kernels: which architectures they were built for, and their launches, which do nothing.
#include "cudart.h"
#include <pthread.h>

// Each object file of a library registers one "fat binary": its kernels for several architectures. A kernel's attributes tell the
// architecture that was chosen for the card, by which CUB chooses its algorithms.
struct fat_binary { int count, architectures[32]; };
struct function { const void *host; struct fat_binary *binary; };
static struct function *functions;  // a hash table by address
static size_t n_functions, room_functions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct fat_header { uint32_t magic; uint16_t version, header_bytes; u64 bytes; };
struct fat_entry { uint16_t kind, attributes; uint32_t header_bytes; u64 bytes; uint32_t compressed, unknown; uint16_t minor, major; uint32_t architecture; };

void **__cudaRegisterFatBinary(void *wrapper) {
    struct fat_binary *binary = calloc(1, sizeof *binary);
    const struct { int magic, version; const struct fat_header *data; } *given = wrapper;
    if (given->magic == 0x466243b1 && given->data->magic == 0xba55ed50) {
        const char *at = (const char *)given->data + given->data->header_bytes, *end = at + given->data->bytes;
        while (at < end && binary->count < 32) {
            const struct fat_entry *entry = (const void *)at;
            if (!entry->header_bytes) break;
            binary->architectures[binary->count++] = (int)entry->architecture;
            at += entry->header_bytes + entry->bytes;
        }
    }
    return (void **)binary;
}
void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
void __cudaUnregisterFatBinary(void **binary) { (void)binary; }
void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t bytes, int constant, int global) { (void)binary, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant, (void)global; }
char __cudaInitModule(void **binary) { (void)binary; return 0; }

static size_t place_of(const void *host, struct function *table, size_t room) {
    size_t at = ((uintptr_t)host >> 4) * 0x9e3779b97f4a7c15ull & (room - 1);
    while (table[at].host && table[at].host != host) at = (at + 1) & (room - 1);
    return at;
}
void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int threads, void *a, void *b, void *c, void *d, int *e) {
    (void)device, (void)name, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
    pthread_mutex_lock(&lock);
    if (2 * n_functions >= room_functions) {
        size_t room = room_functions ? 2 * room_functions : 1 << 14;
        struct function *more = calloc(room, sizeof *more);
        for (size_t i = 0; i < room_functions; i++) if (functions[i].host) more[place_of(functions[i].host, more, room)] = functions[i];
        free(functions);
        functions = more, room_functions = room;
    }
    struct function *entry = &functions[place_of(host, functions, room_functions)];
    if (!entry->host) n_functions++;
    *entry = (struct function){host, (struct fat_binary *)binary};
    pthread_mutex_unlock(&lock);
}

// The highest that the card runs: of its own major version, as kernels of another do not run there. A card for which nothing was
// built gets the lowest: PyTorch's host code would run there if it had been.
static int architecture_for(const struct fat_binary *binary, int capability) {
    int best = 0, lowest = 0;
    for (int i = 0; binary && i < binary->count; i++) {
        int each = binary->architectures[i];
        if (each / 10 == capability / 10 && each <= capability && each > best) best = each;
        if (!lowest || each < lowest) lowest = each;
    }
    return best ? best : lowest ? lowest : capability;
}

// struct cudaFuncAttributes
struct function_attributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared_bytes, preferred_carveout, cluster[4], more[16];
};
int cudaFuncGetAttributes(struct function_attributes *out, const void *host) {
    const struct card *card = stub_card(stub_device());
    if (!card) return failed(NO_DEVICE);
    pthread_mutex_lock(&lock);
    const struct fat_binary *binary = room_functions ? functions[place_of(host, functions, room_functions)].binary : 0;
    int architecture = architecture_for(binary, card->capability);
    pthread_mutex_unlock(&lock);
    memset(out, 0, 144);
    out->max_threads = 1024;
    out->registers = 32;
    out->ptx_version = out->binary_version = architecture;
    out->max_dynamic_shared_bytes = 48 << 10;
    return context_error();
}
int cudaFuncSetAttribute(const void *host, int attribute, int value) { (void)host, (void)attribute, (void)value; return context_error(); }
int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { (void)kernel, (void)attribute, (void)value, (void)device; return context_error(); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads, size_t shared, unsigned flags) {
    (void)host, (void)flags;
    const struct card *card = stub_card(stub_device());
    if (!card) return failed(NO_DEVICE);
    struct limits limits = stub_limits(card->capability);
    int by_threads = limits.threads_per_sm / (threads > 0 ? threads : 1);
    int by_shared = shared ? (int)(limits.shared_per_sm / (shared + limits.reserved_shared)) : by_threads;
    *blocks = by_threads < limits.blocks_per_sm ? by_threads : limits.blocks_per_sm;
    if (by_shared < *blocks) *blocks = by_shared;
    if (*blocks < 1) *blocks = 1;
    return SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) { return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0); }

struct dim3 { unsigned x, y, z; };
static __thread struct { struct dim3 grid, block; size_t shared; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void **stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
    return SUCCESS;
}
// What a card refuses: a grid beyond its limits is an error of the size, as in PyTorch's kernels with one block per row.
static int launch(struct dim3 grid, struct dim3 block, void *stream) {
    int dead = context_error();
    if (dead) return dead;
    if (!grid.x || !grid.y || !grid.z || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535 || !block.x || block.x * (u64)block.y * block.z > 1024) return failed(9);  // cudaErrorInvalidConfiguration
    streams_count_launch(stream);
    return SUCCESS;
}
int cudaLaunchKernel(const void *host, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream) { (void)host, (void)arguments, (void)shared; return launch(grid, block, stream); }
int cudaLaunchCooperativeKernel(const void *host, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream) { (void)host, (void)arguments, (void)shared; return launch(grid, block, stream); }
struct launch_configuration { struct dim3 grid, block; size_t shared; void *stream, *attributes; unsigned count; };
int cudaLaunchKernelExC(const struct launch_configuration *how, const void *host, void **arguments) { (void)host, (void)arguments; return launch(how->grid, how->block, how->stream); }
int __cudaGetKernel(void **out, const void *host) { *out = (void *)host; return SUCCESS; }
int __cudaLaunchKernel(void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream) { (void)kernel, (void)arguments, (void)shared; return launch(grid, block, stream); }
int cudaProfilerStart(void) { return SUCCESS; }
int cudaProfilerStop(void) { return SUCCESS; }
