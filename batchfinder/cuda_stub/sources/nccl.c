// NCCL. Small buffers are really exchanged between the processes of one job that were started together (ranks=1): sizes, flags,
// pickled objects. Large ones are not moved. Of a rank that runs alone all others are taken to be as this one. NCCL's own memory is not counted.
#include "stub.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SMALL (1u << 20)   // exchanged up to so many bytes of each rank
#define SLOTS 4            // of calls that a rank may be ahead of another
#define PATIENCE_SECONDS 600
enum { SYSTEM_ERROR = 2, NCCL_INVALID = 4, NCCL_INVALID_USAGE = 5 };
enum operation { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE, SPLIT, DONE };
static const char *const words[] = {"all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "send", "receive", "split", ""};
struct id { char bytes[128]; };

// What a rank gives to a call, by the call's number; and how many calls each rank has read.
struct slot { volatile u64 call; int operation; u64 bytes; char data[SMALL]; };
struct mailbox { volatile u64 read; struct slot slot[SLOTS]; };
struct letter { u64 bytes; char data[SMALL]; };
struct letters { volatile u64 written, taken; struct letter of[SLOTS]; };  // from one rank to another
struct comm { int ranks, rank, device, parts; u64 calls; struct mailbox *mailboxes; struct letters *letters; u64 *sent, *received; struct id id; };

int ncclGetVersion(int *version) { *version = NCCL_VERSION; return SUCCESS; }
const char *ncclGetErrorString(int error) { return error == SYSTEM_ERROR ? "unhandled system error" : error == NCCL_INVALID ? "invalid argument" : error == NCCL_INVALID_USAGE ? "invalid usage" : error ? "internal error" : "no error"; }
const char *ncclGetLastError(void *comm) { (void)comm; return ""; }
int ncclGetUniqueId(struct id *id) {
    memset(id, 0, sizeof *id);
    int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    u64 number = (u64)time(0) * 1000003 + getpid();
    if (random >= 0) {
        if (read(random, &number, sizeof number) < 0) number += 1;
        close(random);
    }
    snprintf(id->bytes, sizeof id->bytes, "nccl-%016llx", (unsigned long long)number);
    return SUCCESS;
}

static void *map_shared(const char *name, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", stub_settings()->folder, name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) {
        fprintf(stderr, "batchfinder's CUDA stub: %s: %s\n", path, strerror(errno));
        if (file >= 0) close(file);
        return 0;
    }
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return at == MAP_FAILED ? 0 : at;
}
static int begin(struct comm **out, int ranks, struct id id, int rank) {
    struct comm *comm = calloc(1, sizeof *comm);
    comm->ranks = ranks, comm->rank = rank, comm->id = id, comm->device = stub_device();
    const struct settings *s = stub_settings();
    if (s->ranks && s->folder[0] && ranks > 1 && ranks <= MAX_CARDS) {
        char name[160];
        snprintf(name, sizeof name, "%.100s.all", id.bytes);
        comm->mailboxes = map_shared(name, ranks * sizeof *comm->mailboxes);
        snprintf(name, sizeof name, "%.100s.pairs", id.bytes);
        comm->letters = map_shared(name, (size_t)ranks * ranks * sizeof *comm->letters);
        comm->sent = calloc(ranks, sizeof *comm->sent), comm->received = calloc(ranks, sizeof *comm->received);
        if (!comm->mailboxes || !comm->letters) { free(comm); return SYSTEM_ERROR; }
    }
    *out = comm;
    return SUCCESS;
}
int ncclCommInitRank(struct comm **out, int ranks, struct id id, int rank) { return begin(out, ranks, id, rank); }
int ncclCommInitRankConfig(struct comm **out, int ranks, struct id id, int rank, void *config) { (void)config; return begin(out, ranks, id, rank); }
int ncclCommInitRankScalable(struct comm **out, int ranks, int rank, int count, struct id *ids, void *config) { (void)count, (void)config; return begin(out, ranks, ids[0], rank); }
int ncclCommCount(struct comm *comm, int *count) { *count = comm->ranks; return SUCCESS; }
int ncclCommUserRank(struct comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommCuDevice(struct comm *comm, int *device) { *device = comm->device; return SUCCESS; }
int ncclCommGetAsyncError(void *comm, int *error) { (void)comm; *error = 0; return SUCCESS; }
int ncclCommGetUniqueId(struct comm *comm, struct id *id) { *id = comm->id; return SUCCESS; }

// -- waiting for others -------------------------------------------------------------------------------------------------------------
static int wait_for(volatile u64 *value, u64 wanted, const struct comm *comm, const char *what, int other) {
    struct timespec pause = {0, 50000}, start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int turn = 0; __atomic_load_n(value, __ATOMIC_ACQUIRE) < wanted; turn++) {
        if (turn < 200) continue;
        nanosleep(&pause, 0);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec > PATIENCE_SECONDS) {
            fprintf(stderr, "batchfinder's CUDA stub: rank %d waited %d s in %s for rank %d, which has not called it\n", comm->rank, PATIENCE_SECONDS, what, other);
            return SYSTEM_ERROR;
        }
    }
    return SUCCESS;
}
// What each rank gives to this call; they must call the same. `use` gets rank and data of each.
static int exchange(struct comm *comm, enum operation operation, const void *data, u64 bytes, void (*use)(void *, int, const char *), void *context) {
    u64 call = ++comm->calls;
    for (int i = 0; i < comm->ranks; i++)  // nobody may still want what the slot has
        if (call > SLOTS && wait_for(&comm->mailboxes[i].read, call - SLOTS, comm, words[operation], i)) return SYSTEM_ERROR;
    struct slot *mine = &comm->mailboxes[comm->rank].slot[call % SLOTS];
    mine->operation = operation, mine->bytes = bytes;
    if (bytes && bytes <= SMALL) memcpy(mine->data, data, bytes);
    __atomic_store_n(&mine->call, call, __ATOMIC_RELEASE);
    for (int i = 0; bytes <= SMALL && i < comm->ranks; i++) {
        struct slot *theirs = &comm->mailboxes[i].slot[call % SLOTS];
        if (wait_for(&theirs->call, call, comm, words[operation], i)) return SYSTEM_ERROR;
        if (theirs->operation != (int)operation || theirs->bytes != bytes) {
            fprintf(stderr, "batchfinder's CUDA stub: rank %d calls %s of %llu bytes where rank %d calls %s of %llu\n", comm->rank, words[operation],
                    (unsigned long long)bytes, i, words[theirs->operation], (unsigned long long)theirs->bytes);
            return NCCL_INVALID_USAGE;
        }
        use(context, i, theirs->data);
    }
    __atomic_store_n(&comm->mailboxes[comm->rank].read, call, __ATOMIC_RELEASE);
    return SUCCESS;
}

// -- reductions of small buffers ----------------------------------------------------------------------------------------------------
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, FIRST_OWN };
static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, fp8 x 2
static double own_factor[32];  // of ncclRedOpCreatePreMulSum
static int n_own;
int ncclRedOpCreatePreMulSum(int *operation, const void *scalar, int type, int residence, struct comm *comm) {
    (void)residence, (void)comm;
    int place = n_own++ % 32;
    own_factor[place] = type == 8 ? *(const double *)scalar : type == 7 ? *(const float *)scalar : 1;
    *operation = FIRST_OWN + place;
    return SUCCESS;
}
static float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023, bits;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else { float tiny = mantissa / 16777216.0f; memcpy(&bits, &tiny, 4); bits |= sign; }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
static uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    float magnitude = value < 0 ? -value : value;
    if (!(magnitude < 65520)) return sign | (magnitude == magnitude ? 0x7c00 : 0x7e00);
    if (magnitude < 6.103515625e-5f) return sign | (uint16_t)(magnitude * 16777216.0f + 0.5f);
    uint32_t rounded = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((rounded >> 13) - (112 << 10));
}
static double load(const void *at, u64 i, int type) {
    switch (type) {
    case 0: return ((const int8_t *)at)[i];
    case 1: return ((const uint8_t *)at)[i];
    case 2: return ((const int32_t *)at)[i];
    case 3: return ((const uint32_t *)at)[i];
    case 6: return half_to_float(((const uint16_t *)at)[i]);
    case 7: return ((const float *)at)[i];
    case 8: return ((const double *)at)[i];
    case 9: { uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16; float value; memcpy(&value, &bits, 4); return value; }
    default: return 0;
    }
}
static void store(void *at, u64 i, int type, double value) {
    switch (type) {
    case 0: ((int8_t *)at)[i] = (int8_t)value; break;
    case 1: ((uint8_t *)at)[i] = (uint8_t)value; break;
    case 2: ((int32_t *)at)[i] = (int32_t)value; break;
    case 3: ((uint32_t *)at)[i] = (uint32_t)value; break;
    case 6: ((uint16_t *)at)[i] = float_to_half((float)value); break;
    case 7: ((float *)at)[i] = (float)value; break;
    case 8: ((double *)at)[i] = value; break;
    case 9: { float f = (float)value; uint32_t bits; memcpy(&bits, &f, 4); ((uint16_t *)at)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); break; }
    }
}
static double combined(double a, double b, int operation) { return operation == PRODUCT ? a * b : operation == MAXIMUM ? (a > b ? a : b) : operation == MINIMUM ? (a < b ? a : b) : a + b; }
struct reduction { char *out; u64 count, skip; int type, operation, ranks; };
static void reduce(void *context, int rank, const char *data) {
    struct reduction *r = context;
    data += r->skip;
    if (r->type == 4 || r->type == 5) {  // exact in 64 bits
        const int64_t *from = (const int64_t *)data;
        int64_t *to = (int64_t *)r->out;
        for (u64 i = 0; i < r->count; i++) {
            int64_t b = from[i], a = rank ? to[i] : b;
            int larger = r->type == 4 ? a > b : (u64)a > (u64)b;
            to[i] = !rank ? b : r->operation == PRODUCT ? a * b : r->operation == MAXIMUM ? (larger ? a : b) : r->operation == MINIMUM ? (larger ? b : a) : a + b;
        }
        return;
    }
    for (u64 i = 0; i < r->count; i++) {
        double value = load(data, i, r->type);
        if (r->operation >= FIRST_OWN) value *= own_factor[r->operation - FIRST_OWN];
        value = rank ? combined(load(r->out, i, r->type), value, r->operation) : value;
        if (r->operation == AVERAGE && rank == r->ranks - 1) value /= r->ranks;
        store(r->out, i, r->type, value);
    }
}

struct placed { char *out; u64 bytes, skip; int from; };  // `from` a rank, or all, one after the other
static void place(void *context, int rank, const char *data) {
    struct placed *p = context;
    if (p->from < 0) memcpy(p->out + rank * p->bytes, data + p->skip, p->bytes);
    else if (p->from == rank) memcpy(p->out, data + p->skip, p->bytes);
}

// -- groups: between ncclGroupStart and ncclGroupEnd calls are collected, and what is sent goes first
struct call { enum operation operation; const void *from; void *to; u64 count; int type, how; struct comm *comm; };
static __thread struct call *collected;
static __thread int n_collected, room_collected, depth;

// What must have happened before a letter can be sent or received: a place is free, or it has been written.
static struct letters *letters_of(const struct call *c) {
    struct comm *comm = c->comm;
    return c->operation == SEND ? &comm->letters[comm->rank * comm->ranks + c->how] : &comm->letters[c->how * comm->ranks + comm->rank];
}
static void awaited(const struct call *c, volatile u64 **value, u64 *wanted) {
    u64 sent = c->comm->sent[c->how];
    *value = c->operation == SEND ? &letters_of(c)->taken : &letters_of(c)->written;
    *wanted = c->operation == SEND ? (sent < SLOTS ? 0 : sent + 1 - SLOTS) : c->comm->received[c->how] + 1;
}
static void pass_letter(const struct call *c) {
    struct letters *letters = letters_of(c);
    u64 bytes = c->count * sizes[c->type], number = c->operation == SEND ? ++c->comm->sent[c->how] : ++c->comm->received[c->how];
    struct letter *letter = &letters->of[number % SLOTS];
    if (c->operation == SEND) {
        letter->bytes = bytes;
        if (bytes <= SMALL) memcpy(letter->data, c->from, bytes);
        __atomic_store_n(&letters->written, number, __ATOMIC_RELEASE);
    } else {
        if (bytes <= SMALL && letter->bytes == bytes) memcpy(c->to, letter->data, bytes);
        __atomic_store_n(&letters->taken, number, __ATOMIC_RELEASE);
    }
}

static int run(struct call *c) {
    struct comm *comm = c->comm;
    u64 size = sizes[c->type], bytes = c->count * size, ranks = comm->ranks, all = bytes * ranks;
    int real = comm->mailboxes != 0;
    switch (c->operation) {
    case ALL_REDUCE: {
        if (bytes > SMALL && !real) return SUCCESS;
        struct reduction r = {c->to, c->count, 0, c->type, c->how, (int)ranks};
        if (real) {  // what others read is in the mailbox by then, so the output may be the input
            return exchange(comm, ALL_REDUCE, c->from, bytes, reduce, &r);
        }
        char *own = malloc(bytes ? bytes : 1);
        memcpy(own, c->from, bytes);
        for (u64 i = 0; i < ranks; i++) reduce(&r, (int)i, own);
        free(own);
        return SUCCESS;
    }
    case BROADCAST: {
        struct placed p = {c->to, bytes, 0, c->how};
        if (real) return exchange(comm, BROADCAST, c->from, bytes, place, &p);
        if (bytes <= SMALL && c->to != c->from) memmove(c->to, c->from, bytes);
        return SUCCESS;
    }
    case ALL_GATHER: {
        struct placed p = {c->to, bytes, 0, -1};
        if (real) return exchange(comm, ALL_GATHER, c->from, bytes, place, &p);
        for (u64 i = 0; all <= SMALL && i < ranks; i++) memmove((char *)c->to + i * bytes, c->from, bytes);
        return SUCCESS;
    }
    case REDUCE_SCATTER: {
        struct reduction r = {c->to, c->count, comm->rank * bytes, c->type, c->how, (int)ranks};
        if (real) return exchange(comm, REDUCE_SCATTER, c->from, all, reduce, &r);
        if (all > SMALL) return SUCCESS;
        char *own = malloc(all ? all : 1);
        memcpy(own, c->from, all);
        for (u64 i = 0; i < ranks; i++) reduce(&r, (int)i, own);
        free(own);
        return SUCCESS;
    }
    case ALL_TO_ALL: {
        struct placed p = {c->to, bytes, comm->rank * bytes, -1};
        if (real) return exchange(comm, ALL_TO_ALL, c->from, all, place, &p);
        if (all <= SMALL) for (u64 i = 0; i < ranks; i++) memmove((char *)c->to + i * bytes, (const char *)c->from + comm->rank * bytes, bytes);
        return SUCCESS;
    }
    case SEND: case RECEIVE: {
        if (!real || c->how == comm->rank) return SUCCESS;
        volatile u64 *value;
        u64 wanted;
        awaited(c, &value, &wanted);
        if (wait_for(value, wanted, comm, words[c->operation], c->how)) return SYSTEM_ERROR;
        pass_letter(c);
        return SUCCESS;
    }
    default: return NCCL_INVALID;
    }
}
static int call(enum operation operation, const void *from, void *to, u64 count, int type, int how, struct comm *comm) {
    struct call one = {operation, from, to, count, type, how, comm};
    if (type < 0 || type >= (int)(sizeof sizes / sizeof *sizes)) return NCCL_INVALID;
    if (!depth) return run(&one);
    if (n_collected == room_collected) collected = realloc(collected, (room_collected = room_collected * 2 + 64) * sizeof *collected);
    collected[n_collected++] = one;
    return SUCCESS;
}
int ncclGroupStart(void) { depth++; return SUCCESS; }
// Letters of a group go and come as they can, those of one pair in their order; what a rank sends itself is copied.
static int pass_letters(void) {
    struct timespec pause = {0, 50000}, start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < n_collected; i++) {
        struct call *send = &collected[i];
        if (send->operation != SEND || send->how != send->comm->rank) continue;
        for (int k = 0; k < n_collected; k++) {
            struct call *receive = &collected[k];
            if (receive->operation != RECEIVE || receive->how != receive->comm->rank || receive->comm != send->comm) continue;
            if (send->count * sizes[send->type] <= SMALL) memmove(receive->to, send->from, send->count * sizes[send->type]);
            receive->operation = DONE;
            break;
        }
        send->operation = DONE;
    }
    for (;;) {
        int waiting = -1;
        for (int i = 0; i < n_collected; i++) {
            struct call *c = &collected[i];
            if (c->operation != SEND && c->operation != RECEIVE) continue;
            int behind = !c->comm->mailboxes;
            if (behind) { c->operation = DONE; continue; }
            for (int k = 0; k < i && !behind; k++) behind = collected[k].operation == c->operation && collected[k].how == c->how && collected[k].comm == c->comm;
            volatile u64 *value;
            u64 wanted;
            awaited(c, &value, &wanted);
            if (behind || __atomic_load_n(value, __ATOMIC_ACQUIRE) < wanted) { waiting = i; continue; }
            pass_letter(c);
            c->operation = DONE;
        }
        if (waiting < 0) return SUCCESS;
        nanosleep(&pause, 0);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec > PATIENCE_SECONDS) {
            fprintf(stderr, "batchfinder's CUDA stub: rank %d waited %d s in %s for rank %d\n", collected[waiting].comm->rank, PATIENCE_SECONDS, words[collected[waiting].operation], collected[waiting].how);
            return SYSTEM_ERROR;
        }
    }
}
int ncclGroupEnd(void) {
    if (!depth) return NCCL_INVALID_USAGE;
    if (--depth) return SUCCESS;
    int error = pass_letters();
    for (int i = 0; i < n_collected; i++) if (!error && collected[i].operation != DONE) error = run(&collected[i]);
    n_collected = 0;
    return error;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, struct comm *comm, void *stream) { (void)stream; return call(ALL_REDUCE, from, to, count, type, operation, comm); }
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, struct comm *comm, void *stream) {
    static __thread char unread[SMALL];  // where all ranks but the root put what comes out
    (void)stream;
    return call(ALL_REDUCE, from, comm->rank == root ? to : unread, count, type, operation, comm);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *comm, void *stream) { (void)stream; return call(BROADCAST, from, to, count, type, root, comm); }
int ncclBcast(void *buffer, size_t count, int type, int root, struct comm *comm, void *stream) { (void)stream; return call(BROADCAST, buffer, buffer, count, type, root, comm); }
int ncclAllGather(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream) { (void)stream; return call(ALL_GATHER, from, to, count, type, 0, comm); }
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, struct comm *comm, void *stream) { (void)stream; return call(REDUCE_SCATTER, from, to, count, type, operation, comm); }
int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream) { (void)stream; return call(ALL_TO_ALL, from, to, count, type, 0, comm); }
int ncclSend(const void *from, size_t count, int type, int peer, struct comm *comm, void *stream) { (void)stream; return call(SEND, from, 0, count, type, peer, comm); }
int ncclRecv(void *to, size_t count, int type, int peer, struct comm *comm, void *stream) { (void)stream; return call(RECEIVE, 0, to, count, type, peer, comm); }

// Of a split each rank tells its colour and key; those of one colour are ranked by key.
struct split { int color, key; };
struct members { struct split of[MAX_CARDS]; };
static void note(void *context, int rank, const char *data) { memcpy(&((struct members *)context)->of[rank], data, sizeof(struct split)); }
int ncclCommSplit(struct comm *comm, int color, int key, struct comm **out, void *config) {
    (void)config;
    *out = 0;
    struct split mine = {color, key};
    struct members members;
    if (!comm->mailboxes) return color < 0 ? SUCCESS : begin(out, comm->ranks, comm->id, comm->rank);
    if (exchange(comm, SPLIT, &mine, sizeof mine, note, &members)) return SYSTEM_ERROR;
    comm->parts++;
    if (color < 0) return SUCCESS;
    int ranks = 0, rank = 0;
    for (int i = 0; i < comm->ranks; i++) {
        if (members.of[i].color != color) continue;
        ranks++;
        if (members.of[i].key < key || (members.of[i].key == key && i < comm->rank)) rank++;
    }
    struct id id = {{0}};
    snprintf(id.bytes, sizeof id.bytes, "%.90s.%d.%d", comm->id.bytes, comm->parts, color);
    return begin(out, ranks, id, rank);
}
