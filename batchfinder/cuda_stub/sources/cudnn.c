// cuDNN. Since 9.8 its own heuristics and engines answer without a device, for a card that a "device properties" descriptor tells of:
// where its libraries are there, they choose the engine of each convolution and attention and say its workspace. Where they are
// not, every graph has one engine, without a workspace. Recurrent layers, batch norm and CTC need a handle there, so their sizes are here.
#include "stub.h"
#include <dlfcn.h>
#include <pthread.h>

extern int cudaDeviceGetAttribute(int *, int, int);
enum { BAD_PARAM = 2000, CUDNN_NOT_SUPPORTED = 3000 };

// -- the libraries themselves -----------------------------------------------------------------------------------------------------
static struct {
    size_t (*version)(void);
    int (*create)(int, void *), (*destroy)(void *), (*finalize)(void *), (*set)(void *, int, int, int64_t, const void *), (*get)(void *, int, int, int64_t, int64_t *, void *);
    void *device[MAX_CARDS];
} real;
static pthread_once_t load_once = PTHREAD_ONCE_INIT;
enum { DEVICE_DESCRIPTOR = 38, DEVICE_JSON = 2702, TYPE_CHAR = 24, TYPE_DESCRIPTOR = 15 };
static const int device_attribute[] = {[2] = 1307, [4] = 204, [5] = 407};  // of an engine, of its heuristics, of an execution plan
#define WITH_DEVICE (int)(sizeof device_attribute / sizeof *device_attribute)
enum { PLAN_HANDLE = 400, PLAN_WORKSPACE = 402, GRAPH_HANDLE = 800, HEURISTIC_RESULTS = 202, ENGINE_INDEX = 1301 };

static void *describe(int device) {
    const struct card *card = stub_card(device);
    struct limits limits = stub_limits(card->capability);
    char json[2048];
    void *made = 0;
    int n = snprintf(json, sizeof json,
        "{\"cudaDeviceId\":0,\"deviceName\":\"%s\",\"deviceVer\":%d,\"driverVer\":%d,\"totalGlobalMem\":%zu,\"multiProcessorCount\":%d,\"smClockRateKHz\":%d,"
        "\"memClockRateKHz\":%d,\"l2CacheSize\":%d,\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"maxThreadsPerBlock\":1024,"
        "\"warpSize\":32,\"regsPerBlock\":65536,\"maxRegistersPerSM\":65536,\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,"
        "\"reservedSharedMemoryPerBlock\":%d,\"maxCtasPerSM\":%d,\"maxThreadsPerSM\":%d,\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1}",
        card->name, card->capability * 10, stub_driver_version(), card->total, card->multiprocessors, card->clock_khz, card->memory_clock_khz, card->l2_bytes,
        limits.shared_per_block_optin, limits.reserved_shared, limits.blocks_per_sm, limits.threads_per_sm);
    if (real.create(DEVICE_DESCRIPTOR, &made) || real.set(made, DEVICE_JSON, TYPE_CHAR, n, json) || real.finalize(made)) return 0;
    return made;
}
static void load(void) {
    const char *folder = stub_settings()->cudnn;
    static const char *const libraries[] = {"graph", "ops", "cnn", "engines_precompiled", "engines_runtime_compiled", "heuristic", "adv"};
    void *graph = 0;
    if (!folder[0]) {
        stub_assumed("cuDNN takes no workspaces: its own libraries, which say how large they are, are not there");
        return;
    }
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/libcudnn_%s.so." CUDNN_MAJOR_TEXT, folder, libraries[i]);
        void *opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (!opened && i < 3) {
            stub_assumed("cuDNN takes no workspaces: its libraries, which say how large they are, cannot be loaded");
            stub_log("broken", dlerror());
            return;
        }
        if (!i) graph = opened;
    }
    *(void **)&real.version = dlsym(graph, "cudnnGetVersion");
    *(void **)&real.create = dlsym(graph, "cudnnBackendCreateDescriptor");
    *(void **)&real.destroy = dlsym(graph, "cudnnBackendDestroyDescriptor");
    *(void **)&real.finalize = dlsym(graph, "cudnnBackendFinalize");
    *(void **)&real.set = dlsym(graph, "cudnnBackendSetAttribute");
    *(void **)&real.get = dlsym(graph, "cudnnBackendGetAttribute");
    for (int i = 0; i < stub_settings()->visible; i++)
        if (!real.create || !real.destroy || !real.finalize || !real.set || !real.get || !(real.device[i] = describe(i))) {
            stub_assumed("cuDNN takes no workspaces: before version 9.8 it says how large they are on a GPU alone");
            memset(real.device, 0, sizeof real.device);
            return;
        }
}
static void *device(void) {
    pthread_once(&load_once, load);
    return real.device[stub_device()];
}

size_t cudnnGetVersion(void) {
    pthread_once(&load_once, load);
    return real.version ? real.version() : CUDNN_VERSION;
}
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
int cudnnGetProperty(int which, int *value) {
    int version = (int)cudnnGetVersion(), major = version >= 90000 ? 10000 : 1000;
    *value = which == 0 ? version / major : which == 1 ? version % major / 100 : version % 100;
    return SUCCESS;
}
const char *cudnnGetErrorString(int error) { return error == CUDNN_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : error ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *out, size_t bytes) { if (bytes) *out = 0; }

int cudnnBackendCreateDescriptor(int type, void **out) {
    if (!device()) return NEW_HANDLE(out);
    int error = real.create(type, out);
    if (!error && type < WITH_DEVICE && device_attribute[type]) error = real.set(*out, device_attribute[type], TYPE_DESCRIPTOR, 1, &real.device[stub_device()]);
    return error;
}
int cudnnBackendDestroyDescriptor(void *descriptor) { return device() ? real.destroy(descriptor) : SUCCESS; }
int cudnnBackendFinalize(void *descriptor) { return device() ? real.finalize(descriptor) : SUCCESS; }
int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values) {
    // A handle is no handle of theirs; the device's properties stand in for it.
    return !device() || name == GRAPH_HANDLE || name == PLAN_HANDLE ? SUCCESS : real.set(descriptor, name, type, count, values);
}
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *count, void *values) {
    if (device()) return real.get(descriptor, name, type, wanted, count, values);
    int known = name == HEURISTIC_RESULTS || name == PLAN_WORKSPACE || name == ENGINE_INDEX;
    if (known && name != HEURISTIC_RESULTS && values) *(int64_t *)values = 0;
    if (count) *count = known;
    return SUCCESS;
}
int cudnnBackendExecute(void *handle, void *plan, void *pack) { (void)handle, (void)plan, (void)pack; return SUCCESS; }

// -- handles and descriptors ------------------------------------------------------------------------------------------------------
int cudnnCreate(void **out) { return (*out = calloc(1, sizeof(void *))) ? SUCCESS : BAD_PARAM; }
int cudnnDestroy(void *handle) { free(handle); return SUCCESS; }
int cudnnSetStream(void **handle, void *stream) { *handle = stream; return SUCCESS; }
int cudnnGetStream(void **handle, void **stream) { *stream = *handle; return SUCCESS; }
#define PLAIN(what) int cudnnCreate##what##Descriptor(void **out) { return NEW_HANDLE(out); } int cudnnDestroy##what##Descriptor(void *descriptor) { (void)descriptor; return SUCCESS; }
PLAIN(Activation) PLAIN(Convolution) PLAIN(CTCLoss) PLAIN(Dropout) PLAIN(Pooling) PLAIN(SpatialTransformer)

// Tensors, filters, and the sequences of a recurrent layer.
#define MAX_DIMS 12
struct tensor { int type, count, size[MAX_DIMS], stride[MAX_DIMS]; long long samples; int vector; };
#define TENSOR(what) int cudnnCreate##what##Descriptor(void **out) { return (*out = calloc(1, sizeof(struct tensor))) ? SUCCESS : BAD_PARAM; } int cudnnDestroy##what##Descriptor(void *descriptor) { free(descriptor); return SUCCESS; }
TENSOR(Tensor) TENSOR(Filter) TENSOR(RNNData)
int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int count, const int *size, const int *stride) {
    if (count > MAX_DIMS) return BAD_PARAM;
    tensor->type = type, tensor->count = count;
    memcpy(tensor->size, size, count * sizeof *size);
    memcpy(tensor->stride, stride, count * sizeof *stride);
    return SUCCESS;
}
int cudnnGetTensorNdDescriptor(const struct tensor *tensor, int room, int *type, int *count, int *size, int *stride) {
    *type = tensor->type, *count = tensor->count;
    for (int i = 0; i < room && i < tensor->count; i++) size[i] = tensor->size[i], stride[i] = tensor->stride[i];
    return SUCCESS;
}
int cudnnSetFilterNdDescriptor(struct tensor *filter, int type, int format, int count, const int *size) { (void)format; return cudnnSetTensorNdDescriptor(filter, type, count, size, size); }
int cudnnGetFilterNdDescriptor(const struct tensor *filter, int room, int *type, int *format, int *count, int *size) {
    int stride[MAX_DIMS];
    *format = 0;
    return cudnnGetTensorNdDescriptor(filter, room < MAX_DIMS ? room : MAX_DIMS, type, count, size, stride);
}

// -- recurrent layers: weights in one block (all matrices, then all biases); reserve space and workspace by the formulas of
// batchfinder/recording/rnn.py, which were read off sizes that users printed in 2017.
struct rnn { int mode, two_biases, directions, type, input, hidden, projected, layers; };
enum { LSTM = 2, GRU = 3 };
int cudnnCreateRNNDescriptor(void **out) { return (*out = calloc(1, sizeof(struct rnn))) ? SUCCESS : BAD_PARAM; }
int cudnnDestroyRNNDescriptor(void *rnn) { free(rnn); return SUCCESS; }
int cudnnSetRNNDescriptor_v8(struct rnn *rnn, int algorithm, int mode, int bias, int direction, int input_mode, int type, int math_precision, int math_type, int input, int hidden, int projected, int layers, void *dropout, unsigned flags) {
    (void)algorithm, (void)input_mode, (void)math_precision, (void)math_type, (void)dropout, (void)flags;
    *rnn = (struct rnn){mode, bias == 0 ? 0 : bias == 2 ? 2 : 1, direction ? 2 : 1, type, input, hidden, projected ? projected : hidden, layers};
    return SUCCESS;
}
int cudnnSetRNNDataDescriptor(struct tensor *data, int type, int layout, int steps, int batch, int vector, const int *lengths, void *fill) {
    (void)layout, (void)steps, (void)fill;
    data->type = type, data->vector = vector, data->samples = 0;
    for (int i = 0; i < batch; i++) data->samples += lengths[i];
    return SUCCESS;
}
static int gates(const struct rnn *rnn) { return rnn->mode == LSTM ? 4 : rnn->mode == GRU ? 3 : 1; }
static size_t element(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; }  // double; half and bfloat16; float
static size_t input_of(const struct rnn *rnn, int layer) { return layer < rnn->directions ? (size_t)rnn->input : (size_t)rnn->projected * rnn->directions; }
static size_t projections(const struct rnn *rnn) { return rnn->projected != rnn->hidden ? (size_t)rnn->projected * rnn->hidden : 0; }
static size_t matrices(const struct rnn *rnn, int layer) { return (size_t)gates(rnn) * rnn->hidden * (input_of(rnn, layer) + rnn->projected) + projections(rnn); }
static size_t biases(const struct rnn *rnn) { return (size_t)rnn->two_biases * gates(rnn) * rnn->hidden; }
static size_t weights(const struct rnn *rnn) {
    size_t sum = 0;
    for (int layer = 0; layer < rnn->layers * rnn->directions; layer++) sum += matrices(rnn, layer) + biases(rnn);
    return sum;
}
int cudnnGetRNNWeightSpaceSize(void *handle, const struct rnn *rnn, size_t *bytes) { (void)handle; *bytes = weights(rnn) * element(rnn->type); return SUCCESS; }
// Matrix and bias number `which` of a layer and direction: those that read the input, those that read the state, the projection.
int cudnnGetRNNWeightParams(void *handle, const struct rnn *rnn, int layer, size_t bytes, const char *space, int which, struct tensor *matrix, void **matrix_at, struct tensor *bias, void **bias_at) {
    (void)handle, (void)bytes;
    size_t all_matrices = 0, before = 0, size = element(rnn->type);
    int count = gates(rnn), reads_state = which >= count, is_projection = which >= 2 * count;
    for (int i = 0; i < rnn->layers * rnn->directions; i++) {
        if (i == layer) before = all_matrices;
        all_matrices += matrices(rnn, i);
    }
    size_t columns = is_projection ? (size_t)rnn->hidden : reads_state ? (size_t)rnn->projected : input_of(rnn, layer), rows = is_projection ? (size_t)rnn->projected : (size_t)rnn->hidden;
    if (is_projection) before += (size_t)count * rnn->hidden * (input_of(rnn, layer) + rnn->projected);
    else if (reads_state) before += (size_t)count * rnn->hidden * input_of(rnn, layer) + (size_t)(which - count) * rnn->hidden * columns;
    else before += (size_t)which * rnn->hidden * columns;
    int has_matrix = !is_projection || projections(rnn), has_bias = !is_projection && (reads_state ? rnn->two_biases == 2 : rnn->two_biases);
    if (matrix_at) *matrix_at = has_matrix ? (void *)(space + before * size) : 0;
    if (matrix) *matrix = (struct tensor){rnn->type, has_matrix ? 3 : 0, {1, (int)rows, (int)columns}, {(int)(rows * columns), (int)columns, 1}, 0, 0};
    if (bias_at) *bias_at = has_bias ? (void *)(space + (all_matrices + layer * biases(rnn) + (size_t)which * rnn->hidden) * size) : 0;
    if (bias) *bias = (struct tensor){rnn->type, has_bias ? 3 : 0, {1, rnn->hidden, 1}, {rnn->hidden, 1, 1}, 0, 0};
    return SUCCESS;
}
int cudnnGetRNNTempSpaceSizes(void *handle, const struct rnn *rnn, int training, const struct tensor *data, size_t *work, size_t *reserve) {
    (void)handle;
    size_t size = element(rnn->type), output = (size_t)data->samples * rnn->directions * rnn->projected * size;
    int kept = rnn->mode == LSTM ? 5 : rnn->mode == GRU ? 6 : 1;
    *work = weights(rnn) * size + (rnn->directions == 2 ? 2 * output : 0);
    if (reserve) *reserve = training ? size * data->samples * rnn->directions * rnn->hidden * (rnn->layers * kept + rnn->layers - 1) : 0;
    stub_assumed("cuDNN's reserve space and workspaces of recurrent layers are taken to be those of 2017");
    return SUCCESS;
}

// -- what else needs a handle
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
    int multiprocessors = 0;
    (void)handle;
    cudaDeviceGetAttribute(&multiprocessors, 16, stub_device());
    *bytes = (size_t)multiprocessors * 2048 * 12;  // a state of each resident thread
    stub_assumed("cuDNN's states for dropout between recurrent layers: 24 KiB for each multiprocessor");
    return SUCCESS;
}
static int none(size_t *bytes) {
    *bytes = 0;
    stub_assumed("cuDNN's batch norm and CTC loss take no workspace and keep no reserve space");
    return SUCCESS;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, void *x, void *z, void *y, void *bias, void *activation, size_t *bytes) { (void)handle, (void)mode, (void)operation, (void)x, (void)z, (void)y, (void)bias, (void)activation; return none(bytes); }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, void *x, void *y, void *dy, void *dz, void *dx, void *bias, void *activation, size_t *bytes) { (void)handle, (void)mode, (void)operation, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)bias, (void)activation; return none(bytes); }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation, void *x, size_t *bytes) { (void)handle, (void)mode, (void)operation, (void)activation, (void)x; return none(bytes); }
int cudnnGetCTCLossWorkspaceSize(void *handle, void *probabilities, void *gradients, const int *labels, const int *label_lengths, const int *input_lengths, int algorithm, void *loss, size_t *bytes) { (void)handle, (void)probabilities, (void)gradients, (void)labels, (void)label_lengths, (void)input_lengths, (void)algorithm, (void)loss; return none(bytes); }
int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *loss, void *probabilities, void *gradients, size_t *bytes) { (void)handle, (void)algorithm, (void)loss, (void)probabilities, (void)gradients; return none(bytes); }
