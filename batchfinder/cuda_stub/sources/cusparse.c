// cuSPARSE: handles and descriptors. What work areas it wants is not known.
#include "stub.h"

int cusparseCreate(void **out) { return NEW_HANDLE(out); }
int cusparseCreateMatDescr(void **out) { return NEW_HANDLE(out); }
int cusparseCreateDnMat(void **out) { return NEW_HANDLE(out); }
int cusparseCreateDnVec(void **out) { return NEW_HANDLE(out); }
int cusparseCreateCsr(void **out) { return NEW_HANDLE(out); }
int cusparseCreateCoo(void **out) { return NEW_HANDLE(out); }
const char *cusparseGetErrorString(int error) { return error ? "not there without a GPU" : "success"; }
