// Memory of the cards: cudaMalloc and what the driver's virtual memory shares with it; pinned memory of the host; copies.
#include "addresses.h"
#include "cudart.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void keep_lock_across_forks(void) { pthread_atfork(before_fork, after_fork, after_fork); }

// -- what is used of each card --------------------------------------------------------------------------------------------------
// Processes on the same cards see each other's memory in a file; an entry of a process that has ended counts no more.

#define PROCESSES 512
struct process { pid_t pid; u64 used[MAX_CARDS]; };
struct shared { pthread_mutex_t lock; volatile int ready; struct process process[PROCESSES]; };
static struct shared *shared;
static struct process alone, *me;

static void lock_shared(void) {
    if (shared && pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}
static void unlock_shared(void) { if (shared) pthread_mutex_unlock(&shared->lock); }

static void open_shared(void) {
    const struct settings *s = stub_settings();
    if (!s->folder[0]) return;
    char path[4096], fresh[4096];
    snprintf(path, sizeof path, "%s/memory", s->folder);
    snprintf(fresh, sizeof fresh, "%s/memory.%d", s->folder, (int)getpid());
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {  // made under another name and linked, so that nobody sees half of it
        file = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, sizeof(struct shared))) { if (file >= 0) close(file); return; }
        struct shared *new = mmap(0, sizeof *new, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (new == MAP_FAILED) { close(file); unlink(fresh); return; }
        pthread_mutexattr_t how;
        pthread_mutexattr_init(&how);
        pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&new->lock, &how);
        munmap(new, sizeof *new);
        int lost = link(fresh, path);
        unlink(fresh);
        if (lost) { close(file); file = open(path, O_RDWR | O_CLOEXEC); if (file < 0) return; }
    }
    struct shared *found = mmap(0, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) shared = found;
}

// This process's entry, under `lock`; a fork gets one of its own.
static struct process *mine(void) {
    if (me && me->pid == getpid()) return me;
    if (!me) open_shared();
    me = &alone;
    memset(&alone, 0, sizeof alone);
    alone.pid = getpid();
    if (!shared) return me;
    lock_shared();
    for (int i = 0; i < PROCESSES; i++) {
        struct process *entry = &shared->process[i];
        if (entry->pid && (kill(entry->pid, 0) == 0 || errno == EPERM)) continue;
        memset(entry, 0, sizeof *entry);
        entry->pid = getpid();
        me = entry;
        break;
    }
    unlock_shared();
    return me;
}

__attribute__((destructor)) static void leave(void) {
    if (me && me != &alone && me->pid == getpid()) me->pid = 0;
}

static size_t used(int physical, const struct card *card) {
    size_t sum = card->held + mine()->used[physical];
    if (shared) {
        lock_shared();
        for (int i = 0; i < PROCESSES; i++) {
            struct process *entry = &shared->process[i];
            if (entry == me || !entry->pid || !entry->used[physical]) continue;
            if (kill(entry->pid, 0) == 0 || errno == EPERM) sum += entry->used[physical]; else entry->pid = 0;
        }
        unlock_shared();
    }
    return sum;
}

static void begin_context(int physical, const struct card *card) {
    if (!mine()->used[physical]) me->used[physical] = card->context;
}

static int take(int device, size_t bytes) {
    const struct card *card = stub_card(device);
    if (!card) return INVALID_DEVICE;
    int physical = stub_settings()->physical[device];
    begin_context(physical, card);
    if (used(physical, card) + bytes > card->total) return OUT_OF_MEMORY;
    me->used[physical] += bytes;
    return SUCCESS;
}

static void give(int device, size_t bytes) { mine()->used[stub_settings()->physical[device]] -= bytes; }

int stub_take(size_t bytes) {
    pthread_mutex_lock(&lock);
    int error = take(stub_device(), bytes);
    pthread_mutex_unlock(&lock);
    return error;
}
void stub_give(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    give(device, bytes);
    pthread_mutex_unlock(&lock);
}
size_t stub_used(int device) {
    const struct card *card = stub_card(device);
    if (!card) return 0;
    pthread_mutex_lock(&lock);
    begin_context(stub_settings()->physical[device], card);
    size_t sum = used(stub_settings()->physical[device], card);
    pthread_mutex_unlock(&lock);
    return sum;
}
size_t stub_used_by_me(int device) {
    pthread_mutex_lock(&lock);
    size_t sum = stub_card(device) ? mine()->used[stub_settings()->physical[device]] : 0;
    pthread_mutex_unlock(&lock);
    return sum;
}

// -- segments ---------------------------------------------------------------------------------------------------------------------
// Which segment a granule of the address space belongs to, by its number; a segment's record, by the same.

struct segment { char *at; u64 bytes, held; int device; };  // `held` of the card; 0 for a range of virtual memory
static struct segment *segments;
static uint32_t n_segments, room_segments, *unused, n_unused;
static uint32_t *owner;  // of each granule: the segment's number plus one

static struct segment *segment_at(const void *address) {
    u64 granule = addresses_granule(address);
    if (granule == NO_GRANULE || !owner || !owner[granule]) return 0;
    return &segments[owner[granule] - 1];
}

static void own(u64 granule, u64 count, uint32_t number) {
    for (u64 i = 0; i < count; i++) owner[granule + i] = number;
}

static void *add_segment(u64 bytes, u64 held, int device) {
    u64 room = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    if (!owner) {
        u64 granules = addresses_granules();
        owner = granules ? mmap(0, granules * sizeof *owner, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
        if (owner == MAP_FAILED) { owner = 0; return 0; }
    }
    if (!n_unused && n_segments == room_segments) {
        uint32_t more = room_segments * 2 + 256;
        struct segment *grown = realloc(segments, more * sizeof *grown);
        if (!grown) return 0;
        segments = grown;
        uint32_t *numbers = realloc(unused, more * sizeof *numbers);
        if (!numbers) return 0;
        unused = numbers, room_segments = more;
    }
    char *at = addresses_take(room);
    if (!at) return 0;
    uint32_t number = n_unused ? unused[--n_unused] : n_segments++;
    segments[number] = (struct segment){at, bytes, held, device};
    own(addresses_granule(at), room / GRANULE, number + 1);
    return at;
}

static void drop_segment(struct segment *segment) {
    u64 room = (segment->bytes + GRANULE - 1) / GRANULE * GRANULE;
    own(addresses_granule(segment->at), room / GRANULE, 0);
    addresses_give(segment->at, room);
    unused[n_unused++] = (uint32_t)(segment - segments);
}

int cudaMalloc(void **out, size_t bytes) {
    int dead = context_error();
    *out = 0;
    if (dead) return dead;
    u64 held = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    pthread_mutex_lock(&lock);
    int device = stub_device(), error = take(device, held);
    if (!error && bytes && !(*out = add_segment(bytes, held, device))) {
        give(device, held);
        error = OUT_OF_MEMORY;
        stub_assumed("the address space of this process is too small for the card's memory (ulimit -v, or vm.overcommit_memory=2)");
    }
    pthread_mutex_unlock(&lock);
    if (error == OUT_OF_MEMORY) {
        char words[64];
        snprintf(words, sizeof words, "%d %zu", device, bytes);
        stub_log("out-of-memory", words);
    }
    if (stub_settings()->verbose) fprintf(stderr, "cudaMalloc %zu on %d: %d, %zu used\n", bytes, device, error, stub_used(device));
    return failed(error);
}

int cudaFree(void *address) {
    int dead = context_error();
    if (dead) return dead;
    if (!address) return SUCCESS;
    streams_synchronize_all();
    pthread_mutex_lock(&lock);
    struct segment *segment = segment_at(address);
    int found = segment && segment->at == address && segment->held;
    if (found) {
        give(segment->device, segment->held);
        drop_segment(segment);
    }
    pthread_mutex_unlock(&lock);
    return failed(found ? SUCCESS : INVALID_VALUE);
}

void *stub_reserve(size_t bytes, int device) {
    pthread_mutex_lock(&lock);
    void *at = add_segment(bytes, 0, device);
    pthread_mutex_unlock(&lock);
    return at;
}
void stub_unreserve(void *address, size_t bytes) {
    (void)bytes;
    pthread_mutex_lock(&lock);
    struct segment *segment = segment_at(address);
    if (segment && segment->at == address) drop_segment(segment);
    pthread_mutex_unlock(&lock);
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    int dead = context_error(), device = stub_device();
    if (dead) return dead;
    const struct card *card = stub_card(device);
    if (!card) return failed(INVALID_DEVICE);
    size_t taken = stub_used(device);
    *total = card->total;
    *free_bytes = taken < card->total ? card->total - taken : 0;
    return SUCCESS;
}

// Its pools are the driver's, whose rules nobody has published.
int cudaMallocAsync(void **out, size_t bytes, void *stream) { (void)bytes, (void)stream; *out = 0; return failed(stub_unwritten("cudaMallocAsync (PyTorch's backend:cudaMallocAsync)", NOT_SUPPORTED)); }
int cudaFreeAsync(void *address, void *stream) { (void)address, (void)stream; return failed(stub_unwritten("cudaFreeAsync", NOT_SUPPORTED)); }

// -- pinned memory of the host ----------------------------------------------------------------------------------------------------

struct pinned { char *at; size_t bytes; int ours; };
static struct pinned *pinned;  // by address
static size_t n_pinned, room_pinned;

static size_t pinned_after(const void *address) {
    size_t low = 0, high = n_pinned;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (pinned[middle].at <= (char *)address) low = middle + 1; else high = middle;
    }
    return low;
}
static struct pinned *pinned_at(const void *address) {
    size_t after = pinned_after(address);
    return after && (char *)address < pinned[after - 1].at + pinned[after - 1].bytes ? &pinned[after - 1] : 0;
}
static int pin(void *address, size_t bytes, int ours) {
    if (n_pinned == room_pinned) {
        size_t room = room_pinned * 2 + 256;
        struct pinned *more = realloc(pinned, room * sizeof *more);
        if (!more) return OUT_OF_MEMORY;
        pinned = more, room_pinned = room;
    }
    size_t at = pinned_after(address);
    memmove(pinned + at + 1, pinned + at, (n_pinned++ - at) * sizeof *pinned);
    pinned[at] = (struct pinned){address, bytes, ours};
    return SUCCESS;
}
static int unpin(void *address, int ours, size_t *bytes) {
    size_t after = pinned_after(address);
    if (!after || pinned[after - 1].at != address || pinned[after - 1].ours != ours) return INVALID_VALUE;
    *bytes = pinned[after - 1].bytes;
    memmove(pinned + after - 1, pinned + after, (n_pinned-- - after) * sizeof *pinned);
    return SUCCESS;
}

int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    size_t room = bytes ? bytes : 1;
    *out = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*out == MAP_FAILED) { *out = 0; return failed(OUT_OF_MEMORY); }
    pthread_mutex_lock(&lock);
    int error = pin(*out, room, 1);
    pthread_mutex_unlock(&lock);
    return failed(error);
}
int cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
int cudaFreeHost(void *address) {
    size_t bytes = 0;
    if (!address) return SUCCESS;
    pthread_mutex_lock(&lock);
    int error = unpin(address, 1, &bytes);
    pthread_mutex_unlock(&lock);
    if (!error) munmap(address, bytes);
    return failed(error);
}
int cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int error = pin(address, bytes, 0);
    pthread_mutex_unlock(&lock);
    return failed(error);
}
int cudaHostUnregister(void *address) {
    size_t bytes;
    pthread_mutex_lock(&lock);
    int error = unpin(address, 0, &bytes);
    pthread_mutex_unlock(&lock);
    return failed(error);
}
int cudaHostGetDevicePointer(void **out, void *address, unsigned flags) { (void)flags; *out = address; return SUCCESS; }
// Pages of managed memory wander between host and card; none is counted as the card's.
int cudaMallocManaged(void **out, size_t bytes, unsigned flags) { return cudaHostAlloc(out, bytes, flags); }
int cudaMemPrefetchAsync(void) { return context_error(); }
int cudaMemAdvise(void) { return context_error(); }

// struct cudaPointerAttributes: type (0 not registered, 1 host, 2 device), device, both pointers.
struct pointer_attributes { int type, device; void *device_pointer, *host_pointer; };
int cudaPointerGetAttributes(struct pointer_attributes *out, const void *address) {
    pthread_mutex_lock(&lock);
    struct segment *segment = segment_at(address);
    int host = !segment && pinned_at(address);
    *out = (struct pointer_attributes){segment ? 2 : host, segment ? segment->device : 0, segment || host ? (void *)address : 0, segment ? 0 : (void *)address};
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

// -- copies -----------------------------------------------------------------------------------------------------------------------
// What is small is copied, so that scalars and sizes come and go; what is large stays untouched, and costs nothing.

static __thread struct { size_t bytes; unsigned char value[16]; } answer;
void stub_answer_next_read(const void *value, size_t bytes) {  // what the next copy of so many bytes to the host shall give
    answer.bytes = bytes <= sizeof answer.value ? bytes : 0;
    memcpy(answer.value, value, answer.bytes);
}

static int on_card(const void *address) { return addresses_granule(address) != NO_GRANULE; }
static int copy(void *to, const void *from, size_t bytes) {
    int dead = context_error();
    if (dead) return dead;
    if (answer.bytes == bytes && on_card(from) && !on_card(to)) {
        memcpy(to, answer.value, bytes);
        answer.bytes = 0;
    } else if (bytes <= stub_settings()->copied || !(on_card(to) || on_card(from))) {
        memmove(to, from, bytes);
    }
    return SUCCESS;
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { (void)kind; cudaStreamSynchronize(0); return copy(to, from, bytes); }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { (void)kind, (void)stream; return copy(to, from, bytes); }
int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) { (void)to_device, (void)from_device, (void)stream; return copy(to, from, bytes); }
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    (void)kind, (void)stream;
    if (width * height <= stub_settings()->copied)
        for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return context_error();
}
int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) { (void)symbol, (void)from, (void)bytes, (void)offset, (void)kind; return context_error(); }
void stub_zero(char *at, size_t bytes);
int cudaMemset(void *to, int value, size_t bytes) {
    int dead = context_error();
    if (!dead && !value) stub_zero(to, bytes);
    else if (!dead && bytes <= stub_settings()->copied) memset(to, value, bytes);
    return dead;
}
void stub_zero(char *at, size_t bytes) {  // whole pages are given back to the system, which gives zeros for them
    size_t page = 4096, before = (page - (uintptr_t)at % page) % page;
    if (!on_card(at) || bytes < 4 * page) { memset(at, 0, bytes); return; }
    memset(at, 0, before);
    size_t whole = (bytes - before) / page * page;
    madvise(at + before, whole, MADV_DONTNEED);
    memset(at + before + whole, 0, bytes - before - whole);
}
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { (void)stream; return cudaMemset(to, value, bytes); }
int cudaGetSymbolAddress(void **out, const void *symbol) {
    static char room[1 << 16];  // of any symbol: kernels that would read it do not run
    (void)symbol;
    *out = room;
    return SUCCESS;
}
