// The driver: what Triton, expandable segments and PyTorch's own launchers ask of libcuda.
#include "stub.h"
#include <dlfcn.h>

extern int cudaDriverGetVersion(int *), cudaGetDeviceCount(int *), cudaDeviceGetAttribute(int *, int, int), cudaGetDevice(int *), cudaSetDevice(int),
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t), cudaMemsetAsync(void *, int, size_t, void *), cudaDeviceGetPCIBusId(char *, int, int);
struct pointer_attributes { int type, device; void *device_pointer, *host_pointer; };
extern int cudaPointerGetAttributes(struct pointer_attributes *, const void *);

// NVIDIA's libraries that look for a driver by themselves, as cuDNN's engines do, are told that there is none: else their runtimes,
// which are linked into them, would ask it for what is not here.
int cuInit(unsigned flags) { (void)flags; return NO_DEVICE; }
int cuGetExportTable(const void **table, const void *id) { (void)id; *table = 0; return NO_DEVICE; }

int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return stub_card(ordinal) ? SUCCESS : INVALID_DEVICE; }
int cuDeviceGetName(char *out, int size, int device) {
    if (!stub_card(device)) return INVALID_DEVICE;
    snprintf(out, size, "%s", stub_card(device)->name);
    return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (!stub_card(device)) return INVALID_DEVICE;
    *bytes = stub_card(device)->total;
    return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 102: *value = 1; return SUCCESS;                      // virtual memory, which expandable segments are made of
    case 103: *value = 1; return SUCCESS;                      // handles as file descriptors
    case 128: case 132: *value = 0; return SUCCESS;            // fabric handles, multicast
    default: return cudaDeviceGetAttribute(value, attribute, device);
    }
}
static void *context_of(int device) { return (void *)(uintptr_t)(0x100 + device); }
int cuCtxGetCurrent(void **context) { *context = context_of(stub_device()); return SUCCESS; }
int cuCtxSetCurrent(void *context) { return context ? cudaSetDevice((int)((uintptr_t)context - 0x100)) : SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { (void)context; return SUCCESS; }
int cuCtxPopCurrent_v2(void **context) { if (context) *context = context_of(stub_device()); return SUCCESS; }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 8 << 20; return SUCCESS; }
int cuCtxSetLimit(int limit, size_t value) { (void)limit, (void)value; return SUCCESS; }
int cuCtxSynchronize(void) { extern int cudaDeviceSynchronize(void); return cudaDeviceSynchronize(); }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context_of(device); return stub_card(device) ? SUCCESS : INVALID_DEVICE; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = stub_used_by_me(device) > 0;
    return SUCCESS;
}
int cuGetErrorString(int error, const char **out) { extern const char *cudaGetErrorString(int); *out = cudaGetErrorString(error); return SUCCESS; }
int cuGetErrorName(int error, const char **out) { *out = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : error == 100 ? "CUDA_ERROR_NO_DEVICE" : error == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : error ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS"; return SUCCESS; }
int cuPointerGetAttribute(void *out, int attribute, u64 address) {
    struct pointer_attributes found;
    cudaPointerGetAttributes(&found, (void *)address);
    int on_card = found.type == 2;
    switch (attribute) {
    case 2: *(unsigned *)out = on_card ? 2 : 1; return SUCCESS;                       // kind of memory
    case 3: *(u64 *)out = address; return on_card || found.type == 1 ? SUCCESS : INVALID_VALUE;  // where the card sees it
    case 9: *(int *)out = found.device; return SUCCESS;
    default: return stub_unwritten("cuPointerGetAttribute of that attribute", NOT_SUPPORTED);
    }
}

// -- kernels, which do nothing
struct dim3 { unsigned x, y, z; };
extern int __cudaLaunchKernel(void *, struct dim3, struct dim3, void **, size_t, void *);
int cuModuleLoad(void **out, const char *path) { (void)path; return NEW_HANDLE(out); }
int cuModuleLoadData(void **out, const void *image) { (void)image; return NEW_HANDLE(out); }
int cuModuleLoadDataEx(void **out, const void *image, unsigned count, void *options, void **values) { (void)image, (void)count, (void)options, (void)values; return NEW_HANDLE(out); }
int cuModuleUnload(void *module) { (void)module; return SUCCESS; }
int cuModuleGetFunction(void **out, void *module, const char *name) { (void)module, (void)name; return NEW_HANDLE(out); }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;  // threads of a block, registers
    return SUCCESS;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { (void)function, (void)attribute, (void)value; return SUCCESS; }
int cuFuncSetCacheConfig(void *function, int config) { (void)function, (void)config; return SUCCESS; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    return __cudaLaunchKernel(function, (struct dim3){gx, gy, gz}, (struct dim3){bx, by, bz}, arguments ? arguments : extra, shared, stream);
}
int cuLaunchKernelEx(const void *how, void *function, void **arguments, void **extra) { (void)how, (void)function, (void)arguments, (void)extra; return SUCCESS; }
int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, 0);
}
int cuLibraryLoadData(void **out, const void *code, void *options, void **values, unsigned count, void *more, void **more_values, unsigned more_count) { (void)code, (void)options, (void)values, (void)count, (void)more, (void)more_values, (void)more_count; return NEW_HANDLE(out); }
int cuLibraryLoadFromFile(void **out, const char *path, void *options, void **values, unsigned count, void *more, void **more_values, unsigned more_count) { (void)path, (void)options, (void)values, (void)count, (void)more, (void)more_values, (void)more_count; return NEW_HANDLE(out); }
int cuLibraryUnload(void *library) { (void)library; return SUCCESS; }
int cuLibraryGetKernel(void **out, void *library, const char *name) { (void)library, (void)name; return NEW_HANDLE(out); }
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { (void)device; return cuFuncGetAttribute(value, attribute, kernel); }
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) { (void)attribute, (void)value, (void)kernel, (void)device; return SUCCESS; }
int cuOccupancyMaxPotentialClusterSize(int *size, void *function, const void *how) { (void)function, (void)how; *size = 8; return SUCCESS; }
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *how) { (void)function, (void)how; *count = 16; return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared); }
int cuStreamGetCtx(void *stream, void **context) { (void)stream; *context = context_of(stub_device()); return SUCCESS; }
int cuLinkCreate_v2(unsigned count, void *options, void **values, void **out) { (void)count, (void)options, (void)values; return NEW_HANDLE(out); }
int cuLinkAddData_v2(void *link, int type, void *data, size_t bytes, const char *name, unsigned count, void *options, void **values) { (void)link, (void)type, (void)data, (void)bytes, (void)name, (void)count, (void)options, (void)values; return SUCCESS; }
int cuLinkComplete(void *link, void **image, size_t *bytes) {
    static char none[64];
    (void)link;
    *image = none, *bytes = sizeof none;
    return SUCCESS;
}
// Some look for these without the version that CUDA's header adds.
#define PLAIN(name) extern __typeof(name##_v2) name __attribute__((alias(#name "_v2")));
PLAIN(cuCtxPushCurrent) PLAIN(cuCtxPopCurrent) PLAIN(cuLinkCreate) PLAIN(cuLinkAddData)
int cuLinkDestroy(void *link) { (void)link; return SUCCESS; }
int cuLogsRegisterCallback(void *callback, void *data, void **out) { (void)callback, (void)data; return out ? NEW_HANDLE(out) : SUCCESS; }
int cuLogsUnregisterCallback(void *handle) { (void)handle; return SUCCESS; }
int cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return SUCCESS; }
int cuTensorMapEncodeIm2col(void *map) { memset(map, 0, 128); return SUCCESS; }
int cuMemsetD32Async(u64 address, unsigned value, size_t count, void *stream) {
    (void)stream;
    if (count * 4 <= stub_settings()->copied) for (size_t i = 0; i < count; i++) ((unsigned *)address)[i] = value;
    return SUCCESS;
}
int cuStreamWriteValue32_v2(void *stream, u64 address, unsigned value, unsigned flags) { (void)stream, (void)flags; *(unsigned *)address = value; return SUCCESS; }

// -- virtual memory: addresses are reserved, memory of the card is mapped there (expandable segments)
struct physical { size_t bytes; int device; };
struct allocation_properties { int type, handle_types, location_type, location_device; };
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { (void)properties, (void)option; *bytes = 2u << 20; return SUCCESS; }
int cuMemAddressReserve(u64 *address, size_t bytes, size_t alignment, u64 wanted, u64 flags) {
    (void)alignment, (void)wanted, (void)flags;  // where it is wished to be is a wish
    void *at = stub_reserve(bytes, stub_device());
    *address = (u64)at;
    return at ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemAddressFree(u64 address, size_t bytes) { stub_unreserve((void *)address, bytes); return SUCCESS; }
int cuMemCreate(u64 *handle, size_t bytes, const struct allocation_properties *properties, u64 flags) {
    (void)flags;
    int before = stub_device();
    *handle = 0;
    if (properties->location_device != before) cudaSetDevice(properties->location_device);
    int error = stub_take(bytes);
    if (properties->location_device != before) cudaSetDevice(before);
    if (error) return error;
    struct physical *made = malloc(sizeof *made);
    *made = (struct physical){bytes, properties->location_device};
    *handle = (u64)made;
    return SUCCESS;
}
int cuMemRelease(u64 handle) {
    struct physical *made = (void *)handle;
    stub_give(made->device, made->bytes);
    free(made);
    return SUCCESS;
}
int cuMemMap(u64 address, size_t bytes, size_t offset, u64 handle, u64 flags) { (void)address, (void)bytes, (void)offset, (void)handle, (void)flags; return SUCCESS; }
int cuMemUnmap(u64 address, size_t bytes) {
    extern int madvise(void *, size_t, int);
    madvise((void *)address, bytes, 4);  // MADV_DONTNEED: what was written there is gone
    return SUCCESS;
}
int cuMemSetAccess(u64 address, size_t bytes, const void *access, size_t count) { (void)address, (void)bytes, (void)access, (void)count; return SUCCESS; }

// -- PyTorch asks for entries by their names, and keeps them whether it calls them or not: those that are not here fail by their names.
#define NAMES 64
static char unwritten[NAMES][64];
static int n_unwritten;
#define ENTRY(n) static int unwritten_##n(void) { return stub_unwritten(unwritten[n], NOT_SUPPORTED); }
#define EIGHT(each, t) each(t##0) each(t##1) each(t##2) each(t##3) each(t##4) each(t##5) each(t##6) each(t##7)
EIGHT(ENTRY, 0) EIGHT(ENTRY, 01) EIGHT(ENTRY, 02) EIGHT(ENTRY, 03) EIGHT(ENTRY, 04) EIGHT(ENTRY, 05) EIGHT(ENTRY, 06) EIGHT(ENTRY, 07)
#define PLACE(n) unwritten_##n,
static int (*const entries[NAMES])(void) = {EIGHT(PLACE, 0) EIGHT(PLACE, 01) EIGHT(PLACE, 02) EIGHT(PLACE, 03) EIGHT(PLACE, 04) EIGHT(PLACE, 05) EIGHT(PLACE, 06) EIGHT(PLACE, 07)};

void *stub_driver_entry(const char *name) {
    static const char *const versions[] = {"", "_v2", "_v3"};
    char with[128];
    for (int i = 0; i < 3; i++) {
        snprintf(with, sizeof with, "%s%s", name, versions[i]);
        void *found = dlsym(RTLD_DEFAULT, with);
        if (found) return found;
    }
    for (int i = 0; i < n_unwritten; i++) if (!strcmp(unwritten[i], name)) return (void *)entries[i];
    if (n_unwritten == NAMES) return 0;
    snprintf(unwritten[n_unwritten], sizeof *unwritten, "%s", name);
    return (void *)entries[n_unwritten++];
}
