// Devices, their properties and errors.
#include "cudart.h"
#include <dlfcn.h>

static __thread int current;
static __thread int last_error;
static int dead;  // what a kernel's failed assertion left

int failed(int error) { if (error) last_error = error; return error; }
int context_error(void) { return dead ? failed(dead) : SUCCESS; }
void stub_kill_context(int error) { dead = error; }  // 710: a kernel's assertion, 700: an illegal address
int stub_device(void) { return current; }

int cudaGetLastError(void) { int error = dead ? dead : last_error; last_error = 0; return error; }
int cudaPeekAtLastError(void) { return dead ? dead : last_error; }
static const struct { int error; const char *name, *words; } errors[] = {
    {0, "cudaSuccess", "no error"}, {1, "cudaErrorInvalidValue", "invalid argument"}, {2, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"}, {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"}, {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"}, {710, "cudaErrorAssert", "device-side assert triggered"},
    {801, "cudaErrorNotSupported", "operation not supported"}, {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
};
#define N_ERRORS (sizeof errors / sizeof *errors)
const char *cudaGetErrorString(int error) { for (size_t i = 0; i < N_ERRORS; i++) if (errors[i].error == error) return errors[i].words; return "unrecognized error code"; }
const char *cudaGetErrorName(int error) { for (size_t i = 0; i < N_ERRORS; i++) if (errors[i].error == error) return errors[i].name; return "cudaErrorUnknown"; }

int cudaGetDeviceCount(int *count) {
    *count = stub_settings()->visible;
    return *count ? SUCCESS : failed(NO_DEVICE);
}
int cudaGetDevice(int *device) { *device = current; return stub_settings()->visible ? SUCCESS : failed(NO_DEVICE); }
int cudaSetDevice(int device) {
    if (!stub_card(device)) return failed(INVALID_DEVICE);
    current = device;
    return context_error();
}
// The newest there is: a driver runs what was built for an older toolkit.
int stub_driver_version(void) { return CUDA_VERSION > 13020 ? CUDA_VERSION : 13020; }
int cudaDriverGetVersion(int *version) { *version = stub_driver_version(); return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { (void)device, (void)peer; *can = 0; return SUCCESS; }
int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { (void)peer, (void)flags; return failed(NOT_SUPPORTED); }
int cudaDeviceGetPCIBusId(char *out, int size, int device) {
    if (!stub_card(device)) return failed(INVALID_DEVICE);
    snprintf(out, size, "0000:%02X:00.0", stub_settings()->physical[device] + 1);
    return SUCCESS;
}

// enum cudaDeviceAttr, which is CUdevice_attribute as well.
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    const struct card *card = stub_card(device);
    if (!card) return failed(INVALID_DEVICE);
    struct limits limits = stub_limits(card->capability);
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;                     // threads of a block, its x, its y
    case 4: *value = 64; break;                                       // its z
    case 5: *value = 2147483647; break;                               // a grid's x
    case 6: case 7: *value = 65535; break;                            // its y and z
    case 8: *value = 48 << 10; break;                                 // shared memory of a block
    case 9: *value = 65536; break;                                    // constant memory
    case 10: *value = 32; break;                                      // threads of a warp
    case 11: *value = 2147483647; break;                              // pitch
    case 12: case 82: *value = 65536; break;                          // registers of a block, of a multiprocessor
    case 13: *value = card->clock_khz; break;
    case 14: *value = 512; break;                                     // alignment of textures
    case 16: *value = card->multiprocessors; break;
    case 19: case 31: case 41: case 78: case 83: case 95: *value = 1; break;  // mapped memory, concurrent kernels, one address space, priorities, managed memory, cooperative launch
    case 33: *value = stub_settings()->physical[device] + 1; break;   // PCI bus
    case 36: *value = card->memory_clock_khz; break;
    case 37: *value = card->bus_bits; break;
    case 38: *value = card->l2_bytes; break;
    case 39: *value = limits.threads_per_sm; break;
    case 40: *value = 3; break;                                       // engines for copies
    case 75: *value = card->capability / 10; break;
    case 76: *value = card->capability % 10; break;
    case 81: *value = limits.shared_per_sm; break;
    case 97: *value = limits.shared_per_block_optin; break;
    case 106: *value = limits.blocks_per_sm; break;
    case 111: *value = limits.reserved_shared; break;
    case 115: *value = 1; break;                                      // memory pools
    case 120: *value = card->capability >= 90; break;                 // clusters
    default: *value = 0;
    }
    return SUCCESS;
}

// struct cudaDeviceProp: where its fields are, in bytes. benchmarks and tests compare them with NVIDIA's headers.
#if CUDA_MAJOR >= 13
enum { PROPERTIES_BYTES = 1008, MULTIPROCESSORS = 384, MAP_HOST = 392, CONCURRENT = 560, PCI_BUS = 568, ENGINES = 584, UNIFIED = 588, BUS = 592, L2 = 596,
       THREADS_PER_SM = 604, PRIORITIES = 608, SHARED_PER_SM = 624, REGISTERS_PER_SM = 632, MANAGED = 636, COOPERATIVE = 668, SHARED_OPTIN = 672,
       BLOCKS_PER_SM = 688, RESERVED_SHARED = 696, POOLS = 720, CLUSTERS = 748 };
#else
enum { PROPERTIES_BYTES = 1032, MULTIPROCESSORS = 388, MAP_HOST = 400, CONCURRENT = 576, PCI_BUS = 584, ENGINES = 600, UNIFIED = 604, BUS = 612, L2 = 616,
       THREADS_PER_SM = 624, PRIORITIES = 628, SHARED_PER_SM = 640, REGISTERS_PER_SM = 648, MANAGED = 652, COOPERATIVE = 688, SHARED_OPTIN = 696,
       BLOCKS_PER_SM = 712, RESERVED_SHARED = 720, POOLS = 744, CLUSTERS = 772 };
#endif
enum { NAME = 0, UUID = 256, TOTAL = 288, SHARED = 296, REGISTERS = 304, WARP = 308, PITCH = 312, BLOCK_THREADS = 320, BLOCK = 324, GRID = 336,
       CONSTANT = 352, MAJOR = 360, MINOR = 364, TEXTURES = 368 };
int cudaGetDeviceProperties(void *out, int device) {
    const struct card *card = stub_card(device);
    if (!card) return failed(INVALID_DEVICE);
    struct limits limits = stub_limits(card->capability);
    char *at = out;
    memset(out, 0, PROPERTIES_BYTES);
#define INT(place, value) (*(int *)(at + (place)) = (value))
#define SIZE(place, value) (*(size_t *)(at + (place)) = (value))
    snprintf(at + NAME, 256, "%s", card->name);
    at[UUID + 3] = (char)(stub_settings()->physical[device] + 1);
    SIZE(TOTAL, card->total); SIZE(SHARED, 48 << 10); INT(REGISTERS, 65536); INT(WARP, 32); SIZE(PITCH, 2147483647); INT(BLOCK_THREADS, 1024);
    INT(BLOCK, 1024); INT(BLOCK + 4, 1024); INT(BLOCK + 8, 64); INT(GRID, 2147483647); INT(GRID + 4, 65535); INT(GRID + 8, 65535);
    SIZE(CONSTANT, 65536); INT(MAJOR, card->capability / 10); INT(MINOR, card->capability % 10); SIZE(TEXTURES, 512);
    INT(MULTIPROCESSORS, card->multiprocessors); INT(MAP_HOST, 1); INT(CONCURRENT, 1); INT(PCI_BUS, stub_settings()->physical[device] + 1); INT(ENGINES, 3); INT(UNIFIED, 1);
    INT(BUS, card->bus_bits); INT(L2, card->l2_bytes); INT(THREADS_PER_SM, limits.threads_per_sm); INT(PRIORITIES, 1);
    SIZE(SHARED_PER_SM, limits.shared_per_sm); INT(REGISTERS_PER_SM, 65536); INT(MANAGED, 1); INT(COOPERATIVE, 1); SIZE(SHARED_OPTIN, limits.shared_per_block_optin);
    INT(BLOCKS_PER_SM, limits.blocks_per_sm); SIZE(RESERVED_SHARED, limits.reserved_shared); INT(POOLS, 1); INT(CLUSTERS, card->capability >= 90);
#if CUDA_MAJOR < 13
    INT(348, card->clock_khz); INT(608, card->memory_clock_khz);
#endif
    return SUCCESS;
}
int cudaGetDeviceProperties_v2(void *out, int device) { return cudaGetDeviceProperties(out, device); }

// Pools of cudaMallocAsync, which PyTorch asks for at its start and does not use.
int cudaDeviceGetDefaultMemPool(void **out, int device) { (void)device; *out = (void *)1; return SUCCESS; }
int cudaMemPoolGetAttribute(void *pool, int attribute, u64 *value) { (void)pool, (void)attribute; *value = 0; return SUCCESS; }
int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { (void)pool, (void)attribute, (void)value; return SUCCESS; }
int cudaMemPoolSetAccess(void *pool, const void *access, size_t count) { (void)pool, (void)access, (void)count; return SUCCESS; }
int cudaMemPoolTrimTo(void *pool, size_t bytes) { (void)pool, (void)bytes; return SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, u64 flags, int *result) {
    (void)version, (void)flags;
    static void *(*entry)(const char *);
    if (!entry) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (driver) entry = (void *(*)(const char *))dlsym(driver, "stub_driver_entry");
    }
    *out = entry ? entry(name) : 0;
    if (result) *result = *out ? 0 : 1;  // found, or not
    return SUCCESS;
}
int cudaGetDriverEntryPoint(const char *name, void **out, u64 flags, int *result) { return cudaGetDriverEntryPointByVersion(name, out, CUDA_VERSION, flags, result); }
