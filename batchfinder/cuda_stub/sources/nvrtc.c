// nvrtc, where NVIDIA's own is not there: what it compiles is not run.
#include "stub.h"

int nvrtcVersion(int *major, int *minor) { *major = CUDA_MAJOR, *minor = CUDA_VERSION % 1000 / 10; return SUCCESS; }
const char *nvrtcGetErrorString(int error) { return error ? "no nvrtc here" : "NVRTC_SUCCESS"; }
int nvrtcCreateProgram(void **out, const char *source, const char *name, int count, const char *const *headers, const char *const *names) { (void)source, (void)name, (void)count, (void)headers, (void)names; return NEW_HANDLE(out); }
int nvrtcDestroyProgram(void **program) { *program = 0; return SUCCESS; }
int nvrtcCompileProgram(void *program, int count, const char *const *options) { (void)program, (void)count, (void)options; return SUCCESS; }
int nvrtcAddNameExpression(void *program, const char *name) { (void)program, (void)name; return SUCCESS; }
int nvrtcGetLoweredName(void *program, const char *name, const char **out) { (void)program; *out = name; return SUCCESS; }
#define CODE(what) int nvrtcGet##what##Size(void *program, size_t *bytes) { (void)program; *bytes = 1; return SUCCESS; } \
                   int nvrtcGet##what(void *program, char *out) { (void)program; *out = 0; return SUCCESS; }
CODE(PTX) CODE(CUBIN) CODE(ProgramLog) CODE(LTOIR)
int nvrtcGetNumSupportedArchs(int *count) { *count = 1; return SUCCESS; }
int nvrtcGetSupportedArchs(int *out) { *out = stub_card(0) ? stub_card(0)->capability : 80; return SUCCESS; }
