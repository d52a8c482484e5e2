// NVML: what PyTorch, pynvml and nvidia-smi's kind ask of the cards. CUDA_VISIBLE_DEVICES hides none of them here.
#include "stub.h"
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_INSUFFICIENT_SIZE = 7 };
static int card_of(void *handle) { return (int)((uintptr_t)handle - 1); }
static const struct card *at(void *handle) { int i = card_of(handle); return i >= 0 && i < stub_settings()->cards ? &stub_settings()->card[i] : 0; }
static int visible(int card) {
    for (int i = 0; i < stub_settings()->visible; i++) if (stub_settings()->physical[i] == card) return i;
    return -1;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error == NVML_NOT_SUPPORTED ? "Not Supported" : error == NVML_INVALID_ARGUMENT ? "Invalid Argument" : error ? "Unknown Error" : "Success"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = stub_settings()->cards; return SUCCESS; }
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= (unsigned)stub_settings()->cards) return NVML_INVALID_ARGUMENT;
    *handle = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    const char *colon = strchr(bus, ':');
    return nvmlDeviceGetHandleByIndex_v2(colon ? (unsigned)strtoul(colon + 1, 0, 16) - 1 : 0, handle);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { return strncmp(uuid, "GPU-", 4) ? NVML_INVALID_ARGUMENT : nvmlDeviceGetHandleByIndex_v2((unsigned)strtoul(uuid + 4, 0, 16) - 1, handle); }
int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = card_of(handle); return SUCCESS; }
int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) { snprintf(out, size, "GPU-%08x-0000-0000-0000-000000000000", card_of(handle) + 1); return SUCCESS; }
int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
    if (!at(handle)) return NVML_INVALID_ARGUMENT;
    snprintf(out, size, "%s", at(handle)->name);
    return SUCCESS;
}
static u64 used(void *handle) {
    int device = visible(card_of(handle));
    return device >= 0 ? stub_used(device) : at(handle)->held;
}
int nvmlDeviceGetMemoryInfo(void *handle, u64 *total_free_used) {
    if (!at(handle)) return NVML_INVALID_ARGUMENT;
    u64 total = at(handle)->total, taken = used(handle);
    total_free_used[0] = total, total_free_used[1] = taken < total ? total - taken : 0, total_free_used[2] = taken;
    return SUCCESS;
}
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out) {
    u64 three[3];
    int error = nvmlDeviceGetMemoryInfo(handle, three);
    if (!error) out->total = three[0], out->reserved = 0, out->free = three[1], out->used = three[2];
    return error;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    if (!at(handle)) return NVML_INVALID_ARGUMENT;
    *major = at(handle)->capability / 10, *minor = at(handle)->capability % 10;
    return SUCCESS;
}
struct process { unsigned pid; u64 bytes; };
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process *out) {
    int device = visible(card_of(handle));
    unsigned room = *count, there = device >= 0 && stub_used_by_me(device) > 0;
    *count = there;
    if (room < there) return NVML_INSUFFICIENT_SIZE;
    if (there) out[0] = (struct process){(unsigned)getpid(), stub_used_by_me(device)};
    return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *out) { (void)handle; memset((char *)out + 4, 0, 32); return SUCCESS; }  // its state: not supported
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, void *type) { (void)handle, (void)link, (void)type; return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *bus) { (void)handle, (void)link, (void)bus; return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) { (void)handle; out[0] = out[1] = 0; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = stub_driver_version(); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "batchfinder stub"); return SUCCESS; }
