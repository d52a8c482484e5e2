// CUPTI: torch.profiler asks it for the activity of kernels, of which there is none.
#include "stub.h"

enum { MAX_LIMIT_REACHED = 12 };
int cuptiGetVersion(unsigned *version) { *version = 18; return SUCCESS; }
int cuptiSubscribe(void **out, void *callback, void *data) { (void)callback, (void)data; return NEW_HANDLE(out); }
int cuptiGetResultString(int result, const char **out) { *out = result ? "no CUPTI here" : "CUPTI_SUCCESS"; return SUCCESS; }
int cuptiGetCallbackName(int domain, unsigned id, const char **out) { (void)domain, (void)id; *out = "unknown"; return SUCCESS; }
int cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) { (void)buffer, (void)bytes; *record = 0; return MAX_LIMIT_REACHED; }
int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *dropped) { (void)context, (void)stream; *dropped = 0; return SUCCESS; }
int cuptiActivityPopExternalCorrelationId(int kind, u64 *last) { (void)kind; if (last) *last = 0; return SUCCESS; }
int cuptiGetDeviceId(void *context, unsigned *device) { (void)context; *device = stub_device(); return SUCCESS; }
