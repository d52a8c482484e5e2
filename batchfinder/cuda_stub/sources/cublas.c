// cuBLAS: handles. Products do nothing; what a routine would answer to the host's memory is not known.
#include "stub.h"

struct handle { int math_mode, pointer_mode; void *stream; };
int cublasCreate_v2(void **out) { return (*out = calloc(1, sizeof(struct handle))) ? SUCCESS : 3; }
int cublasDestroy_v2(void *handle) { free(handle); return SUCCESS; }
int cublasGetMathMode(struct handle *handle, int *mode) { *mode = handle->math_mode; return SUCCESS; }
int cublasSetMathMode(struct handle *handle, int mode) { handle->math_mode = mode; return SUCCESS; }
int cublasGetPointerMode_v2(struct handle *handle, int *mode) { *mode = handle->pointer_mode; return SUCCESS; }
int cublasSetPointerMode_v2(struct handle *handle, int mode) { handle->pointer_mode = mode; return SUCCESS; }
int cublasGetStream_v2(struct handle *handle, void **stream) { *stream = handle->stream; return SUCCESS; }
int cublasSetStream_v2(struct handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
size_t cublasGetVersion_v2(void *handle, int *version) { (void)handle; *version = CUDA_VERSION * 10; return SUCCESS; }
