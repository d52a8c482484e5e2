// Where segments lie in the address space, which decides between free blocks of one size.
//
// Device memory is address space of this process that hardly anything touches, so that what is copied to it or computed for it has a
// place. All of it comes from one range. By default segments lie where cudaMalloc puts them, as published memory snapshots show
// (batchfinder/simulator/segments.py, CudaAddresses): addresses are reserved in multiples of 32 MiB; a segment lies in the lowest gap
// of a reservation that is partly in use, else at the lower end of a new one at the upper end of the highest hole; a reservation
// with nothing in it becomes a hole.
#include "addresses.h"
#include <sys/mman.h>

#define RESERVATION (32ull << 20)
struct range { u64 start, size; };
struct ranges { struct range *of; size_t count, room; };
struct reservation { u64 start, size, used; };

static char *arena;
static u64 arena_size;
static u64 lowest, highest;           // of what was ever given out, within the arena
static struct ranges gaps, holes, taken;  // `taken` for the lowest hole only
static struct reservation *reservations;
static size_t n_reservations, room_reservations;

static int begin(void) {
    if (arena) return 1;
    for (arena_size = 32ull << 40; arena_size >= 8ull << 30; arena_size /= 2) {
        arena = mmap(0, arena_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena != MAP_FAILED) break;
        arena = 0;
    }
    if (!arena) return 0;
    u64 aligned = ((u64)arena + RESERVATION - 1) / RESERVATION * RESERVATION;
    arena_size = (arena_size - (aligned - (u64)arena)) / RESERVATION * RESERVATION;
    arena = (char *)aligned;
    madvise(arena, arena_size, MADV_NOHUGEPAGE);  // a written number costs a page of 4 KiB, not one of 2 MiB
    madvise(arena, arena_size, MADV_DONTDUMP);
    lowest = arena_size;
    return 1;
}

static int insert(struct ranges *in, size_t at, u64 start, u64 size) {
    if (in->count == in->room) {
        size_t room = in->room * 2 + 64;
        struct range *of = realloc(in->of, room * sizeof *of);
        if (!of) return 0;
        in->of = of, in->room = room;
    }
    memmove(in->of + at + 1, in->of + at, (in->count - at) * sizeof *in->of);
    in->of[at] = (struct range){start, size};
    in->count++;
    return 1;
}

static void drop(struct ranges *in, size_t at) { memmove(in->of + at, in->of + at + 1, (--in->count - at) * sizeof *in->of); }

static size_t first_from(const struct ranges *in, u64 start) {
    size_t low = 0, high = in->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (in->of[middle].start < start) low = middle + 1; else high = middle;
    }
    return low;
}

// Put a range among others, joined with its neighbours where they touch it between two bounds.
static void add(struct ranges *in, u64 start, u64 size, u64 from, u64 to) {
    size_t at = first_from(in, start);
    if (at < in->count && start + size == in->of[at].start && in->of[at].start < to) {
        size += in->of[at].size;
        drop(in, at);
    }
    if (at > 0 && in->of[at - 1].start + in->of[at - 1].size == start && start > from) {
        in->of[at - 1].size += size;
        return;
    }
    insert(in, at, start, size);
}

static struct reservation *reservation_of(u64 address) {
    size_t low = 0, high = n_reservations;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (reservations[middle].start <= address) low = middle + 1; else high = middle;
    }
    return low ? &reservations[low - 1] : 0;
}

static int take_as_cuda(u64 size, u64 *at) {
    for (size_t i = 0; i < gaps.count; i++) {
        if (gaps.of[i].size < size) continue;
        *at = gaps.of[i].start;
        if (gaps.of[i].size == size) drop(&gaps, i);
        else gaps.of[i].start += size, gaps.of[i].size -= size;
        reservation_of(*at)->used += size;
        return 1;
    }
    u64 whole = (size + RESERVATION - 1) / RESERVATION * RESERVATION, start = 0;
    int found = 0;
    for (size_t i = holes.count; i-- && !found;) {
        if (holes.of[i].size < whole) continue;
        start = holes.of[i].start + holes.of[i].size - whole;
        if (holes.of[i].size == whole) drop(&holes, i); else holes.of[i].size -= whole;
        found = 1;
    }
    if (!found) {
        if (lowest < whole) return 0;
        start = lowest -= whole;
    }
    if (n_reservations == room_reservations) {
        size_t room = room_reservations * 2 + 64;
        struct reservation *more = realloc(reservations, room * sizeof *more);
        if (!more) return 0;
        reservations = more, room_reservations = room;
    }
    size_t place = 0;
    while (place < n_reservations && reservations[place].start < start) place++;
    memmove(reservations + place + 1, reservations + place, (n_reservations - place) * sizeof *reservations);
    reservations[place] = (struct reservation){start, whole, size};
    n_reservations++;
    if (whole > size) add(&gaps, start + size, whole - size, start, start + whole);
    *at = start;
    return 1;
}

static void give_as_cuda(u64 at, u64 size) {
    struct reservation *of = reservation_of(at);
    if ((of->used -= size)) {
        add(&gaps, at, size, of->start, of->start + of->size);
        return;
    }
    u64 start = of->start, whole = of->size;
    size_t index = of - reservations;
    memmove(of, of + 1, (--n_reservations - index) * sizeof *of);
    for (size_t i = first_from(&gaps, start); i < gaps.count && gaps.of[i].start < start + whole;) drop(&gaps, i);
    add(&holes, start, whole, 0, ~0ull);
}

void *addresses_take(u64 size) {
    u64 at;
    if (!begin()) return 0;
    switch (stub_settings()->addresses) {
    case ADDRESSES_CUDA:
        if (!take_as_cuda(size, &at)) return 0;
        break;
    case ADDRESSES_FALLING:
        if (lowest < size) return 0;
        at = lowest -= size;
        break;
    case ADDRESSES_RISING:
        if (highest + size > arena_size) return 0;
        at = highest, highest += size;
        break;
    default: {  // the lowest hole
        size_t i = 0;
        for (at = 0; i < taken.count && taken.of[i].start - at < size; i++) at = taken.of[i].start + taken.of[i].size;
        if (at + size > arena_size || !insert(&taken, i, at, size)) return 0;
    }
    }
    return arena + at;
}

void addresses_give(void *address, u64 size) {
    u64 at = (u64)((char *)address - arena);
    madvise(address, size, MADV_DONTNEED);  // what was written there is gone, and its pages are the system's again
    if (stub_settings()->addresses == ADDRESSES_CUDA) give_as_cuda(at, size);
    else if (stub_settings()->addresses == ADDRESSES_LOW) drop(&taken, first_from(&taken, at));
}

u64 addresses_granule(const void *address) {
    if (!arena || (char *)address < arena || (char *)address >= arena + arena_size) return NO_GRANULE;
    return (u64)((char *)address - arena) / GRANULE;
}

u64 addresses_granules(void) { return begin() ? arena_size / GRANULE : 0; }
