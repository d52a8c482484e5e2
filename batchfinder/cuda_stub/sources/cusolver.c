// cuSOLVER: handles. What work areas it wants is not known.
#include "stub.h"

int cusolverDnCreate(void **out) { return NEW_HANDLE(out); }
int cusolverDnCreateParams(void **out) { return NEW_HANDLE(out); }
int cusolverDnCreateGesvdjInfo(void **out) { return NEW_HANDLE(out); }
int cusolverDnCreateSyevjInfo(void **out) { return NEW_HANDLE(out); }
