// What BATCHFINDER_CUDA_STUB says: settings, then one part for each card, separated by '|'; in a part name=value, separated by ';'.
#include "stub.h"
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

static struct settings settings;
static pthread_once_t read_once = PTHREAD_ONCE_INIT, see_once = PTHREAD_ONCE_INIT;

static void set(char *name, char *value, struct card *card) {
    u64 number = strtoull(value, 0, 10);
    if (!card) {
        if (!strcmp(name, "events"))
            settings.events = !strcmp(value, "late") ? EVENTS_LATE : !strcmp(value, "in-order") ? EVENTS_IN_ORDER : EVENTS_EARLY;
        else if (!strcmp(name, "addresses"))
            settings.addresses = !strcmp(value, "low") ? ADDRESSES_LOW : !strcmp(value, "rising") ? ADDRESSES_RISING
                               : !strcmp(value, "falling") ? ADDRESSES_FALLING : ADDRESSES_CUDA;
        else if (!strcmp(name, "copied")) settings.copied = number;
        else if (!strcmp(name, "verbose")) settings.verbose = (int)number;
        else if (!strcmp(name, "ranks")) settings.ranks = (int)number;
        else if (!strcmp(name, "folder")) snprintf(settings.folder, sizeof settings.folder, "%s", value);
        else if (!strcmp(name, "cudnn")) snprintf(settings.cudnn, sizeof settings.cudnn, "%s", value);
        return;
    }
    if (!strcmp(name, "name")) snprintf(card->name, sizeof card->name, "%s", value);
    else if (!strcmp(name, "total")) card->total = number;
    else if (!strcmp(name, "context")) card->context = number;
    else if (!strcmp(name, "held")) card->held = number;
    else if (!strcmp(name, "capability")) card->capability = (int)number;
    else if (!strcmp(name, "multiprocessors")) card->multiprocessors = (int)number;
    else if (!strcmp(name, "l2")) card->l2_bytes = (int)number;
    else if (!strcmp(name, "clock")) card->clock_khz = (int)number;
    else if (!strcmp(name, "memory_clock")) card->memory_clock_khz = (int)number;
    else if (!strcmp(name, "bus")) card->bus_bits = (int)number;
}

static void read_settings(void) {
    const char *given = getenv("BATCHFINDER_CUDA_STUB");
    settings.copied = 256 << 10;
    if (!given) return;
    char *text = strdup(given), *parts, *part;
    int number = 0;
    for (part = strtok_r(text, "|", &parts); part; part = strtok_r(0, "|", &parts), number++) {
        if (number > MAX_CARDS) break;
        struct card *card = number ? &settings.card[number - 1] : 0;
        char *pairs, *pair;
        for (pair = strtok_r(part, ";", &pairs); pair; pair = strtok_r(0, ";", &pairs)) {
            char *value = strchr(pair, '=');
            if (!value) continue;
            *value = 0;
            set(pair, value + 1, card);
        }
        if (card) settings.cards = number;
    }
    free(text);
}

// As the driver reads CUDA_VISIBLE_DEVICES, at its first use: the first entry that names no card ends the list, a card named twice empties it.
static void see_devices(void) {
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    if (!given) {
        settings.visible = settings.cards;
        for (int i = 0; i < settings.cards; i++) settings.physical[i] = i;
        return;
    }
    char *text = strdup(given), *rest, *entry;
    for (entry = strtok_r(text, ",", &rest); entry && settings.visible < MAX_CARDS; entry = strtok_r(0, ",", &rest)) {
        while (*entry == ' ') entry++;
        char *end;
        long index = strtol(entry, &end, 10);
        if (!strncmp(entry, "GPU-", 4)) index = strtol(entry + 4, &end, 16) - 1;  // as the UUIDs here begin
        if (end == entry || index < 0 || index >= settings.cards) break;
        for (int i = 0; i < settings.visible; i++)
            if (settings.physical[i] == index) { settings.visible = 0; free(text); return; }
        settings.physical[settings.visible++] = (int)index;
    }
    free(text);
}

// A fork may have another card than the process that counted its devices: it reads again.
static void forget_settings(void) {
    read_once = see_once = (pthread_once_t)PTHREAD_ONCE_INIT;
    memset(&settings, 0, sizeof settings);
}

__attribute__((constructor)) static void read_again_in_forks(void) { pthread_atfork(0, 0, forget_settings); }

const struct settings *stub_settings(void) {
    pthread_once(&read_once, read_settings);
    pthread_once(&see_once, see_devices);
    return &settings;
}

const struct card *stub_card(int device) {
    const struct settings *s = stub_settings();
    return device >= 0 && device < s->visible ? &s->card[s->physical[device]] : 0;
}

void *stub_new_handle(void) {
    static uintptr_t next = 0x100000;
    return (void *)__sync_add_and_fetch(&next, 64);
}

void stub_log(const char *kind, const char *text) {
    const struct settings *s = stub_settings();
    if (!s->folder[0]) return;
    char path[4096], line[1024];
    snprintf(path, sizeof path, "%s/events", s->folder);
    int n = snprintf(line, sizeof line, "%s %d %s\n", kind, (int)getpid(), text);
    if (n >= (int)sizeof line) n = sizeof line - 1, line[n - 1] = '\n';
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (write(file, line, n) < 0) { /* a full disk loses the line */ }
    close(file);
}

static struct { const char *kind, *text; } *told;
static size_t told_count;
static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;

static int told_before(const char *kind, const char *text) {
    int found = 0;
    pthread_mutex_lock(&told_lock);
    for (size_t i = 0; i < told_count && !found; i++) found = !strcmp(told[i].text, text);
    if (!found) {
        void *more = realloc(told, (told_count + 1) * sizeof *told);
        if (more) {
            told = more;
            told[told_count].kind = kind;
            told[told_count++].text = strdup(text);
        }
    }
    pthread_mutex_unlock(&told_lock);
    return found;
}

const char *stub_told(const char *kind, size_t index) {  // what this process has met of a kind; 0 after the last
    const char *text = 0;
    pthread_mutex_lock(&told_lock);
    for (size_t i = 0; i < told_count && !text; i++)
        if (!strcmp(told[i].kind, kind) && !index--) text = told[i].text;
    pthread_mutex_unlock(&told_lock);
    return text;
}

int stub_unwritten(const char *name, int code) {
    if (!told_before("unwritten", name)) {
        fprintf(stderr, "batchfinder's CUDA stub has no %s: it fails with %d\n", name, code);
        stub_log("unwritten", name);
    }
    return code;
}

void stub_assumed(const char *what) {
    if (!told_before("assumed", what)) stub_log("assumed", what);
}

// Resident threads and blocks, and shared memory: "Technical Specifications per Compute Capability" in
// https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html, and before 7.5 in that of CUDA 11.
struct limits stub_limits(int capability) {
    const int k = 1024;
    switch (capability) {
    case 35: case 37: return (struct limits){112 * k, 48 * k, 0, 2048, 16};
    case 50: case 60: return (struct limits){64 * k, 48 * k, 0, 2048, 32};
    case 52: case 61: return (struct limits){96 * k, 48 * k, 0, 2048, 32};
    case 70: case 72: return (struct limits){96 * k, 96 * k, 0, 2048, 32};
    case 75: return (struct limits){64 * k, 64 * k, 0, 1024, 16};
    case 80: return (struct limits){164 * k, 163 * k, k, 2048, 32};
    case 87: return (struct limits){164 * k, 163 * k, k, 1536, 16};
    case 86: return (struct limits){100 * k, 99 * k, k, 1536, 16};
    case 89: return (struct limits){100 * k, 99 * k, k, 1536, 24};
    }
    if (capability >= 110) return (struct limits){100 * k, 99 * k, k, 1536, 24};
    return (struct limits){228 * k, 227 * k, k, 2048, 32};
}
