// Streams, events and CUDA graphs.
//
// Kernels do nothing, so when work is done is for nobody to say. Either everything is done at once, or (events=late) an event is complete
// only when the host has waited for it, or for something that waited for it. What a card does lies between the two: PyTorch's
// allocator does not give a block that another stream has used to anyone before that stream's event is complete. With events=in-order
// it is also complete when the host has waited for anything that was issued later, on whatever stream, as if no stream fell behind.
#include "cudart.h"
#include <pthread.h>

struct stream {
    u64 recorded;       // how many points have been recorded on it
    u64 *seen;          // of each stream, which point this one has waited for
    size_t room;
    size_t number;      // among all streams, from 1
    int priority;
    u64 capture, launches;  // the graph that is being captured, 0 for none; kernels in it
};
struct event {
    struct stream *stream;  // where it was recorded last; NULL before that
    u64 point, *seen, capture;
    u64 issued;  // when, among all that were recorded
    size_t room;
};
struct graph { u64 launches; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream **streams;  // that live
static size_t n_streams, room_streams, numbers;
static u64 *done;  // of each stream, by its number: up to which point the host knows it to be complete
static size_t room_done;
static u64 issued, waited_for;  // how many events have been recorded, and up to which the host has waited, on whatever stream
static u64 captures;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void keep_lock_across_forks(void) { pthread_atfork(before_fork, after_fork, after_fork); }

static struct stream *new_stream(int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) return 0;
    pthread_mutex_lock(&lock);
    if (n_streams == room_streams) streams = realloc(streams, (room_streams = room_streams * 2 + 64) * sizeof *streams);
    stream->number = ++numbers;
    stream->priority = priority;
    streams[n_streams++] = stream;
    if (numbers >= room_done) {
        size_t room = room_done * 2 + 64;
        done = realloc(done, room * sizeof *done);
        memset(done + room_done, 0, (room - room_done) * sizeof *done);
        room_done = room;
    }
    pthread_mutex_unlock(&lock);
    return stream;
}

// A handle of 0, 1 or 2 is a default stream of the calling thread's device: one for each.
static struct stream *stream_of(void *handle) {
    static struct stream *defaults[MAX_CARDS];
    if ((uintptr_t)handle > 2) return handle;
    int device = stub_device();
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&making);
    if (!defaults[device]) defaults[device] = new_stream(0);
    pthread_mutex_unlock(&making);
    return defaults[device];
}

static void grow(u64 **seen, size_t *room, size_t to) {
    if (*room >= to) return;
    *seen = realloc(*seen, to * sizeof **seen);
    memset(*seen + *room, 0, (to - *room) * sizeof **seen);
    *room = to;
}
static void join(u64 **seen, size_t *room, const u64 *others, size_t count) {
    grow(seen, room, count);
    for (size_t i = 0; i < count; i++) if ((*seen)[i] < others[i]) (*seen)[i] = others[i];
}
static void complete(const struct stream *stream, u64 point, const u64 *seen, size_t count, u64 when) {
    if (waited_for < when) waited_for = when;
    if (done[stream->number] < point) done[stream->number] = point;
    for (size_t i = 0; i < count; i++) if (done[i] < seen[i]) done[i] = seen[i];
}

int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) { (void)flags; return (*out = new_stream(priority)) ? SUCCESS : failed(OUT_OF_MEMORY); }
int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
int cudaStreamDestroy(void *handle) {
    if ((uintptr_t)handle <= 2) return SUCCESS;
    struct stream *stream = handle;
    pthread_mutex_lock(&lock);
    done[stream->number] = ~0ull;  // its work is done; events that were recorded on it may still be asked for, so it stays
    for (size_t i = 0; i < n_streams; i++) if (streams[i] == stream) { streams[i] = streams[--n_streams]; break; }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cudaStreamGetPriority(void *handle, int *priority) { *priority = stream_of(handle)->priority; return SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}
int cudaStreamSynchronize(void *handle) {
    struct stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    complete(stream, ++stream->recorded, stream->seen, stream->room, issued);
    pthread_mutex_unlock(&lock);
    return context_error();
}
void streams_synchronize_all(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_streams; i++) complete(streams[i], ++streams[i]->recorded, streams[i]->seen, streams[i]->room, issued);
    pthread_mutex_unlock(&lock);
}
int cudaDeviceSynchronize(void) { streams_synchronize_all(); return context_error(); }
int cudaStreamQuery(void *handle) {
    struct stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    int ready = stub_settings()->events == EVENTS_EARLY || done[stream->number] >= stream->recorded;
    pthread_mutex_unlock(&lock);
    return ready ? context_error() : failed(NOT_READY);
}

int cudaEventCreateWithFlags(void **out, unsigned flags) { (void)flags; return (*out = calloc(1, sizeof(struct event))) ? SUCCESS : failed(OUT_OF_MEMORY); }
int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
int cudaEventDestroy(void *handle) {
    struct event *event = handle;
    if (event) free(event->seen);
    free(event);
    return SUCCESS;
}
int cudaEventRecord(void *handle, void *on) {
    struct event *event = handle;
    struct stream *stream = stream_of(on);
    pthread_mutex_lock(&lock);
    event->stream = stream;
    event->point = ++stream->recorded;
    event->issued = ++issued;
    event->capture = stream->capture;
    grow(&event->seen, &event->room, stream->room);
    memcpy(event->seen, stream->seen, stream->room * sizeof *stream->seen);
    memset(event->seen + stream->room, 0, (event->room - stream->room) * sizeof *event->seen);
    pthread_mutex_unlock(&lock);
    return context_error();
}
int cudaEventRecordWithFlags(void *handle, void *on, unsigned flags) { (void)flags; return cudaEventRecord(handle, on); }
int cudaEventQuery(void *handle) {
    struct event *event = handle;
    int dead = context_error();
    if (dead) return dead;
    if (stub_settings()->events == EVENTS_EARLY) return SUCCESS;
    pthread_mutex_lock(&lock);
    int ready = !event->stream || done[event->stream->number] >= event->point;
    ready |= stub_settings()->events == EVENTS_IN_ORDER && event->issued <= waited_for;
    pthread_mutex_unlock(&lock);
    return ready ? SUCCESS : failed(NOT_READY);
}
int cudaEventSynchronize(void *handle) {
    struct event *event = handle;
    pthread_mutex_lock(&lock);
    if (event->stream) complete(event->stream, event->point, event->seen, event->room, event->issued);
    pthread_mutex_unlock(&lock);
    return context_error();
}
int cudaEventElapsedTime(float *milliseconds, void *from, void *to) { (void)from, (void)to; *milliseconds = 1; return context_error(); }  // kernels take no time; a zero would be divided by
int cudaStreamWaitEvent(void *handle, void *waited, unsigned flags) {
    (void)flags;
    struct event *event = waited;
    struct stream *stream = stream_of(handle);
    if (!event->stream) return SUCCESS;
    pthread_mutex_lock(&lock);
    join(&stream->seen, &stream->room, event->seen, event->room);
    grow(&stream->seen, &stream->room, event->stream->number + 1);
    if (stream->seen[event->stream->number] < event->point) stream->seen[event->stream->number] = event->point;
    if (event->capture && event->stream->capture == event->capture) stream->capture = event->capture;  // it joins the graph
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

typedef void (*stream_callback)(void *stream, int status, void *data);
typedef void (*host_function)(void *data);
int cudaStreamAddCallback(void *stream, stream_callback callback, void *data, unsigned flags) { (void)flags; callback(stream, context_error(), data); return SUCCESS; }
int cudaLaunchHostFunc(void *stream, host_function function, void *data) { (void)stream; function(data); return SUCCESS; }

// -- graphs: what is captured is counted; a graph that is launched does nothing ---------------------------------------------------

void streams_count_launch(void *handle) {
    if ((uintptr_t)handle <= 2) return;
    struct stream *stream = handle;
    if (stream->capture) stream->launches++;
}
int cudaStreamBeginCapture(void *handle, int mode) {
    (void)mode;
    if ((uintptr_t)handle <= 2) return failed(900);  // cudaErrorStreamCaptureUnsupported
    struct stream *stream = handle;
    pthread_mutex_lock(&lock);
    stream->capture = ++captures;
    stream->launches = 0;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cudaStreamEndCapture(void *handle, void **out) {
    struct stream *stream = handle;
    *out = 0;
    if ((uintptr_t)handle <= 2 || !stream->capture) return failed(INVALID_VALUE);
    struct graph *graph = calloc(1, sizeof *graph);
    pthread_mutex_lock(&lock);
    u64 ended = stream->capture;
    for (size_t i = 0; i < n_streams; i++)
        if (streams[i]->capture == ended) {
            graph->launches += streams[i]->launches;
            streams[i]->capture = streams[i]->launches = 0;
        }
    pthread_mutex_unlock(&lock);
    *out = graph;
    return SUCCESS;
}
static int capture_of(void *handle, int *status, u64 *id) {
    u64 capture = (uintptr_t)handle <= 2 ? 0 : ((struct stream *)handle)->capture;
    *status = capture ? 1 : 0;  // cudaStreamCaptureStatusActive
    if (id) *id = capture;
    return SUCCESS;
}
int cudaStreamIsCapturing(void *handle, int *status) { return capture_of(handle, status, 0); }
// Since CUDA 13 with the data of the edges as well.
static int capture_info(void *handle, int *status, u64 *id, void **graph, const void **nodes, size_t *count) {
    if (graph) *graph = 0;
    if (nodes) *nodes = 0;
    if (count) *count = 0;
    return capture_of(handle, status, id);
}
int cudaStreamGetCaptureInfo_v2(void *handle, int *status, u64 *id, void **graph, const void **nodes, size_t *count) { return capture_info(handle, status, id, graph, nodes, count); }
int cudaStreamGetCaptureInfo(void *handle, int *status, u64 *id, void **graph, const void **nodes, const void **edges, size_t *count) {
#if CUDA_MAJOR >= 13
    if (edges) *edges = 0;
    return capture_info(handle, status, id, graph, nodes, count);
#else
    (void)graph, (void)nodes, (void)edges, (void)count;
    return capture_of(handle, status, id);
#endif
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }
int cudaGraphInstantiate(void **out, void *graph, u64 flags) { (void)graph, (void)flags; return NEW_HANDLE(out); }
int cudaGraphInstantiateWithFlags(void **out, void *graph, u64 flags) { return cudaGraphInstantiate(out, graph, flags); }
int cudaGraphLaunch(void *executable, void *stream) { (void)executable, (void)stream; return context_error(); }
int cudaGraphGetNodes(void *handle, void **nodes, size_t *count) {
    struct graph *graph = handle;
    if (!nodes) *count = graph->launches + 1;  // the nodes themselves are not kept; not all that cuBLAS would launch is counted
    else if (*count) return failed(stub_unwritten("cudaGraphGetNodes of the nodes themselves", NOT_SUPPORTED));
    return SUCCESS;
}
int cudaGraphDestroy(void *graph) { free(graph); return SUCCESS; }
int cudaGraphExecDestroy(void *executable) { (void)executable; return SUCCESS; }
